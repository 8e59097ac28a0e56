"""The server's tokens are those of `paceline.load(...).generate`, whatever else is served."""

import asyncio
import random

import pytest
from tokenizers import Tokenizer

from paceline.api import Policy
from paceline.drafting.history import HistoryDrafter
from paceline.engine.engine import Engine
from paceline.engine.settings import EngineSettings
from paceline.pacing.strategy import FixedPacer, Strategy
from paceline.policy.decoder import Decoder
from paceline.types import Purpose, Request, SamplingParams, request_seed
from tests.serving.http import post
from tests.serving.servers import Served, serving, small_policy


async def ask(served: Served, asked: dict, leaves: str) -> tuple[list, list] | None:
    """Returns tokens and logprobs of each choice; None if the client left before the end."""
    body = {"model": served.name, "return_token_ids": True, "logprobs": 0, **asked}
    if leaves == "before":
        sending = asyncio.create_task(post(f"{served.url}/v1/completions", body))
        await asyncio.sleep(random.random() / 50)
        sending.cancel()
        return None
    answer = await post(f"{served.url}/v1/completions", body)
    assert answer.status == 200, await answer.body()
    tokens = [[] for _ in range(asked["n"])]
    logprobs = [[] for _ in range(asked["n"])]
    parts = answer.events() if asked["stream"] else [await answer.json()]
    count = 0
    async for part in parts if asked["stream"] else _each(parts):
        for choice in part["choices"]:
            tokens[choice["index"]] += choice["token_ids"]
            logprobs[choice["index"]] += choice["logprobs"]["token_logprobs"]
        count += 1
        if leaves == "within" and count == 3:
            answer.leave()
            return None
    return tokens, logprobs


async def _each(parts):
    for part in parts:
        yield part


def random_request(rng: random.Random) -> dict:
    begin = rng.choice(["", "You are a helpful assistant that answers with great care. "])
    return {
        "prompt": begin + "".join(rng.choices("abc def\n", k=rng.choice((1, 15, 16, 17, 60, 200)))),
        "seed": rng.randrange(8),
        "n": rng.choice((1, 1, 1, 3)),
        "temperature": rng.choice((0.0, 0.7, 1.0)),
        "max_tokens": rng.randint(1, 24),
        "stream": rng.random() < 0.6,
    }


@pytest.mark.parametrize("speculates", [False, True])
def test_served_tokens_are_those_of_generate(speculates):
    """200 requests at once, of which some are left alone: every other one has its tokens, bit for bit."""
    rng = random.Random(speculates)
    policy, tokenizer = small_policy()
    asked = [random_request(rng) for _ in range(200)]
    leaves = [rng.choices(("", "before", "within"), (6, 2, 2))[0] for _ in asked]
    drafting = {}
    if speculates:
        drafting = {"drafters": [HistoryDrafter()], "pacer": FixedPacer(Strategy("history", 3), 16)}

    async def ask_all(served: Served) -> list:
        return await asyncio.gather(*(ask(served, *one) for one in zip(asked, leaves, strict=True)))

    with serving(policy, tokenizer, kv_tokens=3072, **drafting) as served:
        told = asyncio.run(ask_all(served))
        served.wait_for_idle()
        assert served.engine.pool.used == 0
        # Tokens that nobody read were not sampled, either: requests end with their clients.
        assert not served.app.service.engine.outstanding
    alone = alone_in_an_engine(policy, tokenizer, asked)
    answered = [number for number, answer in enumerate(told) if answer is not None]
    assert len(answered) >= 100 and all(leaves[number] for number in set(range(200)) - set(answered))
    for number in answered:
        assert told[number] == alone[number]
    for number in answered[:8]:
        one = asked[number]
        (group,) = Policy(policy, tokenizer).complete(
            [one["prompt"]], one["n"], one["seed"], one["temperature"], one["max_tokens"]
        )
        assert told[number] == ([list(c.tokens) for c in group], [list(c.logprobs) for c in group])


def alone_in_an_engine(policy: Decoder, tokenizer: Tokenizer, asked: list[dict]) -> list[tuple[list, list]]:
    """Returns what `Policy.complete` gives for each request, without making an engine for each."""
    engine = Engine(policy, EngineSettings(max_running=64, kv_tokens=32768), tokenizer)
    for number, one in enumerate(asked):
        sampling = SamplingParams(temperature=one["temperature"], max_tokens=one["max_tokens"])
        prompt = tuple(tokenizer.encode(one["prompt"]).ids)
        seeds = [request_seed(Purpose.EVAL, one["seed"], 0, one["prompt"], 0, s) for s in range(one["n"])]
        engine.submit([Request(f"{number}/{s}", prompt, seed, sampling) for s, seed in enumerate(seeds)])
    done = {completion.request.id: completion for completion in engine.completions()}
    groups = [[done[f"{number}/{s}"] for s in range(one["n"])] for number, one in enumerate(asked)]
    return [([list(c.tokens) for c in group], [list(c.logprobs) for c in group]) for group in groups]
