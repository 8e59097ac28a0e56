"""What a server does not do for its clients, and what it does for the others meanwhile."""

import asyncio
import json
import socket
import time

import pytest

from paceline.config import load_config
from paceline.serving.limits import Limits
from paceline.serving.server import ServerSettings, serve
from tests.serving.http import Answer, get, post, send
from tests.serving.servers import Served, serving, small_policy

LONG = {"model": "tiny", "prompt": "hello", "max_tokens": 1900, "ignore_eos": True, "stream": True}
SHORT = {"model": "tiny", "prompt": "hello", "max_tokens": 3}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


@pytest.fixture(scope="module")
def policy():
    return small_policy()


def ask(served: Served, path: str, body: object, headers: str = "") -> tuple[int, dict]:
    async def run() -> tuple[int, dict]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await send(served.url + path, "POST", data, headers)
        return answer.status, await answer.json()

    return asyncio.run(run())


async def last_event(answer: Answer) -> dict:
    return [event async for event in answer.events()][-1]


@pytest.fixture(scope="module")
def served(policy):
    with serving(*policy) as one:
        yield one


WRONG = [
    ("/v1/completions", b"{", 400, None),
    ("/v1/completions", b"\xff\xfe", 400, None),
    ("/v1/completions", [], 400, ""),
    ("/v1/completions", {"model": "tiny"}, 400, "prompt"),
    ("/v1/completions", SHORT | {"prompt": ""}, 400, "prompt"),
    ("/v1/completions", SHORT | {"prompt": ["fine", ""]}, 400, "prompt[1]"),
    ("/v1/completions", SHORT | {"prompt": [1, 100000]}, 400, "prompt"),
    ("/v1/completions", SHORT | {"prompt": "x" * 3000}, 400, "prompt"),
    ("/v1/completions", SHORT | {"model": "gpt"}, 404, "model"),
    ("/v1/completions", SHORT | {"temperature": -1}, 400, "temperature"),
    ("/v1/completions", SHORT | {"seed": 2**64}, 400, "seed"),
    ("/v1/completions", SHORT | {"presence_penalty": 1}, 400, "presence_penalty"),
    ("/v1/completions", SHORT | {"guided_json": {}}, 400, "guided_json"),
    ("/v1/completions", SHORT | {"stop": [""]}, 400, "stop"),
    ("/v1/chat/completions", CHAT | {"messages": []}, 400, "messages"),
    (
        "/v1/chat/completions",
        CHAT | {"messages": [{"role": "boss", "content": "x"}]},
        400,
        "messages[0].role",
    ),
    ("/v1/chat/completions", CHAT | {"tool_choice": "required"}, 400, "tool_choice"),
    ("/v1/chat/completions", CHAT | {"top_logprobs": 3}, 400, "top_logprobs"),
    ("/v1/messages", CHAT | {"max_tokens": 0}, 400, "max_tokens"),
    ("/v1/messages", CHAT | {"system": 5}, 400, "system"),
    (
        "/v1/responses",
        {"model": "tiny", "input": "x", "previous_response_id": "r"},
        400,
        "previous_response_id",
    ),
    ("/inference/v1/generate", {"token_ids": [-1], "sampling_params": {}}, 400, "token_ids[0]"),
    ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"n": 0}}, 400, "sampling_params.n"),
    ("/v1/embeddings", SHORT, 404, None),
]


@pytest.mark.parametrize(("path", "body", "status", "field"), WRONG)
def test_wrong_requests_get_their_apis_error_with_the_field(served, path, body, status, field):
    told, answer = ask(served, path, body)
    assert told == status
    if path == "/v1/messages":
        assert answer["type"] == "error" and answer["error"]["message"].startswith(f"{field}: ")
        return
    assert (
        set(answer) == {"error"}
        and answer["error"]["message"]
        and answer["error"]["param"] == (field or None)
    )
    assert "Traceback" not in answer["error"]["message"]


def test_methods_that_a_path_has_not_are_refused(served):
    async def run() -> None:
        assert (await get(f"{served.url}/v1/completions")).status == 405
        assert (await post(f"{served.url}/v1/models", {})).status == 405
        assert (await get(f"{served.url}/nothing")).status == 404

    asyncio.run(run())


def test_keys_are_asked_for_and_separate_what_is_cached(policy):
    with serving(*policy, keys=("one", "two")) as served:

        async def cached(key: str) -> int:
            body = CHAT | {"messages": [{"role": "user", "content": "x" * 100}]}
            answer = await post(f"{served.url}/v1/chat/completions", body, f"Authorization: Bearer {key}\r\n")
            assert answer.status == 200
            return (await answer.json())["usage"]["prompt_tokens_details"]["cached_tokens"]

        async def run() -> None:
            assert await cached("one") == 0 and await cached("one") > 100 and await cached("two") == 0
            for headers in ("", "Authorization: Bearer three\r\n", "x-api-key: \r\n"):
                for path in ("/v1/models", "/metrics", "/openapi.json"):
                    assert (await get(served.url + path, headers)).status == 401
                refused = await post(f"{served.url}/v1/messages", CHAT, headers)
                assert refused.status == 401
                assert (await refused.json())["error"]["type"] == "authentication_error"
            assert (await get(f"{served.url}/health")).status == 200

        asyncio.run(run())


def test_server_for_others_needs_a_key():
    with pytest.raises(ValueError, match="--host 0.0.0.0: others could use this server; give --key-file"):
        serve(load_config("default"), ServerSettings(host="0.0.0.0"), print)


def test_full_queue_and_large_bodies_are_refused(policy):
    with serving(*policy, limits=Limits(queue=2, body_bytes=1000)) as served:

        async def run() -> None:
            busy = [await post(f"{served.url}/v1/completions", LONG) for _ in range(2)]
            refused = await post(f"{served.url}/v1/chat/completions", CHAT)
            assert refused.status == 429 and refused.headers["retry-after"]
            assert (await refused.json())["error"]["type"] == "rate_limit_error"
            large = await post(f"{served.url}/v1/completions", SHORT | {"prompt": "x" * 2000})
            assert large.status == 413
            for one in busy:
                one.leave()

        asyncio.run(run())
        served.wait_for_idle()
        assert ask(served, "/v1/completions", SHORT)[0] == 200


def test_requests_end_when_their_time_is_up(policy):
    with serving(*policy, limits=Limits(request_seconds=0.3, body_seconds=0.3)) as served:

        async def run() -> None:
            whole = await post(f"{served.url}/v1/completions", LONG | {"stream": False})
            assert whole.status == 504
            stream = await post(f"{served.url}/v1/completions", LONG)
            assert stream.status == 200 and "0.3 s" in (await last_event(stream))["error"]["message"]
            slow = await send(f"{served.url}/v1/completions", "POST", None, "Content-Length: 100\r\n")
            assert slow.status == 408
            # A connection on which no request begins is closed.
            reader, writer = await asyncio.open_connection(*served.url.removeprefix("http://").split(":"))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: ")
            assert await reader.read() == b""

        asyncio.run(run())
        served.wait_for_idle()


def test_client_that_leaves_ends_its_request(policy):
    with serving(*policy) as served:

        async def run() -> None:
            answers = [await post(f"{served.url}/v1/completions", LONG) for _ in range(6)]
            for answer in answers:
                await anext(answer.events())
                answer.leave()

        asyncio.run(run())
        served.wait_for_idle()
        assert served.app.service.engine.counters.generated_tokens < 3 * LONG["max_tokens"]
        assert served.engine.pool.used == 0


def test_slow_reader_holds_back_nobody(policy):
    """It gets everything in the end, in larger pieces; the answer does not fit the sockets' buffers."""
    asked = {"token_ids": [1, 2, 3], "stream": True}
    asked["sampling_params"] = {"max_tokens": 100, "ignore_eos": True, "logprobs": 20}
    with serving(*policy) as served:

        async def run() -> None:
            slow = await post(f"{served.url}/inference/v1/generate", asked)
            limit = slow.reader._transport.get_extra_info("socket")
            limit.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.reader._transport.pause_reading()
            for _ in range(3):
                answer = await post(f"{served.url}/v1/completions", SHORT)
                assert answer.status == 200 and (await answer.json())["choices"]
            while served.app.service.engine.outstanding:
                await asyncio.sleep(0.01)
            slow.reader._transport.resume_reading()
            tokens = [t async for e in slow.events() for c in e["choices"] for t in c["token_ids"]]
            assert len(tokens) == 100

        asyncio.run(run())


def test_server_that_stops_ends_what_it_has_begun(policy):
    with serving(*policy) as served:

        async def run() -> None:
            answer = await post(f"{served.url}/v1/completions", LONG | {"max_tokens": 60})
            events = answer.events()
            await anext(events)
            served.stop()
            assert [e async for e in events][-1]["choices"][0]["finish_reason"] == "length"
            with pytest.raises(OSError):
                await post(f"{served.url}/v1/completions", SHORT)

        asyncio.run(run())


def test_engine_that_ends_leaves_no_request_without_an_answer(policy):
    with serving(*policy) as served:

        async def run() -> None:
            stream = await post(f"{served.url}/v1/completions", LONG)
            whole = asyncio.create_task(post(f"{served.url}/v1/completions", LONG | {"stream": False}))
            events = stream.events()
            await anext(events)
            while len(served.app.service.engine.outstanding) < 2:
                await asyncio.sleep(0.01)
            served.lose_engine()
            assert "the engine has ended" in [e async for e in events][-1]["error"]["message"]
            assert (await whole).status == 500
            assert (await post(f"{served.url}/v1/completions", SHORT)).status == 503
            assert (await get(f"{served.url}/health")).status == 503

        asyncio.run(run())


def test_metrics_count_what_was_done(policy):
    with serving(*policy) as served:
        assert ask(served, "/v1/completions", SHORT | {"ignore_eos": True})[0] == 200
        assert ask(served, "/v1/completions", SHORT | {"model": "gpt"})[0] == 404
        served.wait_for_idle()
        time.sleep(0.1)

        async def read() -> dict[str, float]:
            text = (await (await get(f"{served.url}/metrics")).body()).decode()
            lines = [line for line in text.splitlines() if not line.startswith("#")]
            return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

        known = asyncio.run(read())
        assert known["paceline_generated_tokens_total"] == 3 and known["paceline_requests_running"] == 0
        assert known['paceline_answers_total{path="/v1/completions",status="200"}'] == 1
        assert known['paceline_answers_total{path="/v1/completions",status="404"}'] == 1
