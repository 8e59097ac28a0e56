"""A grammar masks the distribution of its own request, and nothing else."""

import json

import pytest

pytest.importorskip("llguidance")

from paceline.drafting.history import HistoryDrafter
from paceline.engine.engine import Engine
from paceline.engine.settings import EngineSettings
from paceline.pacing.strategy import FixedPacer, Strategy
from paceline.types import Completion, FinishReason, Request, SamplingParams
from tests.serving.servers import small_policy

SCHEMA = {
    "type": "object",
    "properties": {
        "number": {"type": "integer", "minimum": 0, "maximum": 99},
        "letter": {"enum": ["a", "b"]},
    },
    "required": ["number", "letter"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GRAMMAR = f"start: %json {json.dumps(SCHEMA)}"


@pytest.fixture(scope="module")
def made():
    return small_policy(512)


def make_engine(made, kv_tokens: int = 2048) -> Engine:
    policy, tokenizer = made
    drafting = {"drafters": [HistoryDrafter()], "pacer": FixedPacer(Strategy("history", 3), 8)}
    return Engine(policy, EngineSettings(max_running=8, kv_tokens=kv_tokens), tokenizer, **drafting)


def run(made, requests: list[Request]) -> dict[str, Completion]:
    return run_in(make_engine(made), requests)


def run_in(engine: Engine, requests: list[Request]) -> dict[str, Completion]:
    engine.submit(requests)
    done = {completion.request.id: completion for completion in engine.completions()}
    assert engine.pool.used == 0
    return done


def requests(count: int, grammar: str, **sampling) -> list[Request]:
    params = SamplingParams(**{"max_tokens": 60, **sampling})
    return [
        Request(f"{grammar[:5]}{i}", (72, 73, 74 + i % 3), i, params, grammar=grammar) for i in range(count)
    ]


def test_grammar_holds_every_response_and_leaves_its_neighbours_alone(made):
    _, tokenizer = made
    held, free = requests(12, GRAMMAR), requests(12, "")
    together = run(made, [request for pair in zip(held, free, strict=True) for request in pair])
    answers = set()
    for request in held:
        done = together[request.id]
        assert done.finish_reason is FinishReason.STOP
        answer = json.loads(tokenizer.decode(done.tokens))
        assert 0 <= answer["number"] <= 99 and answer["letter"] in "ab" and len(answer) == 2
        answers.add(str(answer))
    assert len(answers) > 6, "it is sampled, not fixed"
    alone = run(made, free) | run(made, held)
    assert {n: (c.tokens, c.logprobs) for n, c in together.items()} == {
        n: (c.tokens, c.logprobs) for n, c in alone.items()
    }


def test_grammar_reports_logprobs_of_what_it_leaves(made):
    """A token that had no alternative has logprob 0."""
    policy, tokenizer = made
    (done,) = run(made, requests(1, 'start: "x" ("y" | "z") "w"', top_logprobs=3)).values()
    assert tokenizer.decode(done.tokens) in ("xyw", "xzw")
    certain = done.logprobs[0], *done.logprobs[2:]
    assert certain == pytest.approx([0.0] * len(certain)) and -3 < done.logprobs[1] < -0.1


def test_grammar_survives_preemption(made):
    few = requests(8, GRAMMAR)
    expected = run(made, few)
    engine = make_engine(made, kv_tokens=160)
    tight = run_in(engine, few)
    assert engine.preemptions
    assert {n: c.tokens for n, c in tight.items()} == {n: c.tokens for n, c in expected.items()}


def test_grammar_that_cannot_be_read_is_refused(made):
    (done,) = run(made, requests(1, "start: nothing")).values()
    assert done.finish_reason is FinishReason.REFUSED and "unknown name" in done.error
