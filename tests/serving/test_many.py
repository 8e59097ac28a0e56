"""Many clients at once, and many one after another."""

import asyncio
import gc
import os
import resource
from pathlib import Path

import pytest

from tests.serving.http import post
from tests.serving.servers import Served, serving, small_policy

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def many_files():
    """Lets this process have a connection's both ends a thousand times."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def ask(served: Served, number: int, stream: bool) -> int:
    """Returns how many tokens came; the text of each request is its own."""
    body = {
        "model": "tiny",
        "prompt": f"number {number}",
        "max_tokens": 6,
        "ignore_eos": True,
        "stream": stream,
    }
    answer = await post(f"{served.url}/v1/completions", body | {"return_token_ids": True, "seed": number})
    assert answer.status == 200
    if not stream:
        return len((await answer.json())["choices"][0]["token_ids"])
    choices = [event["choices"][0] async for event in answer.events()]
    assert choices[-1]["finish_reason"] == "length"
    return sum(len(choice["token_ids"]) for choice in choices)


def test_a_thousand_streams_at_once_lose_nothing():
    with serving(*small_policy(256), max_running=64) as served:

        async def run() -> list[int]:
            return await asyncio.gather(*(ask(served, number, True) for number in range(1000)))

        assert asyncio.run(run()) == [6] * 1000
        served.wait_for_idle()
        assert served.engine.pool.used == 0


def test_memory_does_not_grow_with_requests():
    """20,000 requests, each with a prompt of its own, 100 at a time; a tenth of them warms everything up."""

    def megabytes() -> float:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    with serving(*small_policy(256), max_running=64) as served:

        async def run(first: int, last: int) -> None:
            waiting = iter(range(first, last))

            async def work() -> None:
                for number in waiting:
                    assert await ask(served, number, number % 4 == 0) == 6

            await asyncio.gather(*(work() for _ in range(100)))

        asyncio.run(run(0, 2000))
        before = megabytes()
        asyncio.run(run(2000, 20_000))
        served.wait_for_idle()
        assert megabytes() - before < 20, "more than 1 kB a request"
