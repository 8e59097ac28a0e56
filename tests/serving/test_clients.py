"""The clients of OpenAI and Anthropic, unchanged, against a tiny untrained policy."""

import asyncio
import json

import pytest
from pydantic import BaseModel

from tests.serving.servers import Served, serving, small_policy

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
pytest.importorskip("llguidance")
pytestmark = [pytest.mark.slow, pytest.mark.ci]

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the weather?"}]
ARGUMENTS = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells it.", "parameters": ARGUMENTS},
}


class City(BaseModel):
    """What a structured answer holds."""

    visited: bool
    stars: int


@pytest.fixture(scope="module")
def served():
    with serving(*small_policy(), keys=("secret", "other")) as one:
        yield one


@pytest.fixture
def client(served: Served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="secret", max_retries=0) as one:
        yield one


@pytest.fixture
def claude(served: Served):
    with anthropic.Anthropic(base_url=served.url, api_key="other", max_retries=0) as one:
        yield one


def test_openai_lists_the_model(client):
    (model,) = client.models.list().data
    assert model.id == "tiny" and client.models.retrieve("tiny").id == "tiny"


def test_openai_completions_stream_what_they_answer(client):
    asked = dict(model="tiny", prompt=["one", "two"], max_tokens=40, seed=3, n=2, logprobs=2)
    whole = client.completions.create(**asked)
    texts = [""] * 4
    logprobs = [[] for _ in texts]
    reasons = [None] * 4
    stream = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            logprobs[choice.index] += choice.logprobs.token_logprobs
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert [choice.text for choice in whole.choices] == texts and len(set(texts)) == 4
    assert [choice.logprobs.token_logprobs for choice in whole.choices] == logprobs
    assert [choice.finish_reason for choice in whole.choices] == reasons
    assert chunk.usage.completion_tokens == whole.usage.completion_tokens == sum(map(len, logprobs))


def test_openai_chat_streams_what_it_answers(client):
    asked = dict(model="tiny", messages=CHAT, max_tokens=60, seed=3, n=2, logprobs=True, top_logprobs=2)
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.role == "assistant"
    texts = ["", ""]
    logprobs = [[], []]
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
    assert [choice.message.content for choice in whole.choices] == texts
    assert [choice.logprobs.content for choice in whole.choices] == logprobs
    assert len(logprobs[0][0].top_logprobs) == 2


def test_openai_chat_ends_before_a_stop_text(client):
    asked = dict(model="tiny", messages=CHAT, max_tokens=200, seed=5)
    text = client.chat.completions.create(**asked).choices[0].message.content
    stop = next(text[i : i + 2] for i in range(8, 60) if text[i : i + 2].isascii())
    cut = text[: text.find(stop)]
    one = client.chat.completions.create(**asked, stop=[stop, "never there"]).choices[0]
    assert (one.message.content, one.finish_reason) == (cut, "stop")
    told = ""
    for chunk in client.chat.completions.create(**asked, stop=stop, stream=True):
        told += chunk.choices[0].delta.content or ""
        assert cut.startswith(told), "not even a part of a stop text is sent"
    assert told == cut


def test_openai_chat_calls_tools(client):
    forced = dict(model="tiny", messages=CHAT, tools=[TOOL], tool_choice="required", seed=1, max_tokens=400)
    whole = client.chat.completions.create(**forced).choices[0]
    assert whole.finish_reason == "tool_calls"
    (call,) = whole.message.tool_calls
    assert call.function.name == "weather" and 1 <= json.loads(call.function.arguments)["days"] <= 9
    with client.chat.completions.stream(**forced) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.message.tool_calls[0].function.arguments == call.function.arguments
    named = forced | {"tool_choice": {"type": "function", "function": {"name": "weather"}}}
    assert client.chat.completions.create(**named).choices[0].message.tool_calls
    # The answer to a call continues the conversation, and its cache.
    followed = [
        *CHAT,
        whole.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    after = client.chat.completions.create(model="tiny", messages=followed, tools=[TOOL], max_tokens=4)
    assert after.usage.prompt_tokens_details.cached_tokens > 300


def test_openai_answers_follow_a_schema(client):
    asked = dict(model="tiny", messages=CHAT, seed=1, max_tokens=300)
    city = client.chat.completions.parse(**asked, response_format=City).choices[0].message.parsed
    assert isinstance(city, City)
    free = client.chat.completions.create(**asked)
    assert free.model_extra.get("masked") is None
    held = client.chat.completions.create(**asked, response_format={"type": "json_object"})
    assert held.choices[0].message.content.startswith("{") and held.model_extra["masked"]


def test_openai_responses_stream_what_they_answer(client):
    asked = dict(
        model="tiny", instructions="Be brief.", input="Hello", max_output_tokens=50, extra_body={"seed": 4}
    )
    whole = client.responses.create(**asked)
    assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens"
    with client.responses.stream(**asked) as stream:
        told = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert told == whole.output_text
    parsed = client.responses.parse(
        model="tiny", input=[{"role": "user", "content": "Hello"}], text_format=City, extra_body={"seed": 1}
    )
    assert isinstance(parsed.output_parsed, City)


def test_openai_responses_call_tools(client):
    tool = {"type": "function", **TOOL["function"], "strict": True}
    asked = dict(model="tiny", tools=[tool], tool_choice="required", extra_body={"seed": 2})
    items = [{"role": "user", "content": "Hello"}]
    whole = client.responses.create(input=items, **asked)
    (call,) = whole.output
    assert call.type == "function_call" and json.loads(call.arguments)["city"] in ("Paris", "Rome")
    with client.responses.stream(input=items, **asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.function_call_arguments.done" in kinds and kinds[-1] == "response.completed"
    assert final.output[0].arguments == call.arguments
    items += [*whole.output, {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
    assert client.responses.create(model="tiny", input=items, max_output_tokens=3).usage.output_tokens <= 3


def test_anthropic_streams_what_it_answers(claude):
    asked = dict(model="tiny", system="Be brief.", messages=CHAT[1:], max_tokens=50, extra_body={"seed": 3})
    whole = claude.messages.create(**asked)
    assert whole.stop_reason in ("max_tokens", "end_turn")
    with claude.messages.stream(**asked) as stream:
        told = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert told == whole.content[0].text == final.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens
    counted = claude.messages.count_tokens(model="tiny", system="Be brief.", messages=CHAT[1:])
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


def test_anthropic_calls_tools_and_stops_at_texts(claude):
    tool = {"name": "weather", "description": "Tells it.", "input_schema": ARGUMENTS}
    asked = dict(model="tiny", messages=CHAT[1:], tools=[tool], max_tokens=400, extra_body={"seed": 1})
    whole = claude.messages.create(**asked, tool_choice={"type": "tool", "name": "weather"})
    (use,) = whole.content
    assert whole.stop_reason == "tool_use" and use.input["city"] in ("Paris", "Rome")
    with claude.messages.stream(**asked, tool_choice={"type": "any"}) as stream:
        assert stream.get_final_message().content[0].input == use.input
    followed = [
        *CHAT[1:],
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "rain"}]},
    ]
    text = claude.messages.create(**asked | {"messages": followed, "max_tokens": 100}).content[0].text
    stop = next(text[i : i + 2] for i in range(4, 60) if text[i : i + 2].isascii())
    cut = claude.messages.create(**asked | {"messages": followed, "stop_sequences": [stop]})
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == text[: text.find(stop)]


def test_async_clients_at_once(served):
    """Both async clients share the server, streaming, each with its own tokens."""

    async def run() -> None:
        one = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="secret", max_retries=0)
        two = anthropic.AsyncAnthropic(base_url=served.url, api_key="other", max_retries=0)

        async def chat(seed: int) -> str:
            stream = await one.chat.completions.create(
                model="tiny", messages=CHAT[1:], seed=seed, max_tokens=30, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        async def message(seed: int) -> str:
            asked = dict(model="tiny", messages=CHAT[1:], max_tokens=30, extra_body={"seed": seed})
            async with two.messages.stream(**asked) as stream:
                return "".join([text async for text in stream.text_stream])

        seeds = range(12)
        told = await asyncio.gather(*(chat(seed) for seed in seeds), *(message(seed) for seed in seeds))
        assert told[:12] == told[12:], "one policy, one template, one seed: one text"
        assert len(set(told)) == 12
        await one.close()
        await two.close()

    asyncio.run(run())


def test_errors_are_the_clients_own(client, claude, served):
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'"):
        client.chat.completions.create(model="gpt", messages=CHAT)
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 3000}])
    assert refused.value.code == "context_length_exceeded" and refused.value.param == "messages"
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    with pytest.raises(openai.BadRequestError, match="image_url"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": image}])
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="tiny", messages=CHAT, logit_bias={"5": 3})
    assert refused.value.param == "logit_bias"
    with pytest.raises(anthropic.BadRequestError, match="image"):
        source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
        content = [{"type": "image", "source": source}]
        claude.messages.create(model="tiny", max_tokens=5, messages=[{"role": "user", "content": content}])
    for wrong in ("", "secrets"):
        stranger = openai.OpenAI(base_url=f"{served.url}/v1", api_key=wrong or "-", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()
