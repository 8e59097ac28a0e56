"""Outcomes that are read late: a slot may have a new owner by then, and the host's work per step must not
grow with the batch.
"""

import sys
from pathlib import Path

import pytest
import torch

from paceline.engine import engine as engine_module
from paceline.engine.engine import Engine, EngineSettings
from paceline.pacing.strategy import FixedPacer, Strategy
from paceline.policy.huggingface import load_policy
from paceline.policy.tokenizer import character_tokenizer
from paceline.types import Completion, Request, SamplingParams
from tests.drafting.test_exactness import OracleDrafter, RandomDrafter
from tests.engine.test_engine import bits, grouped_requests
from tests.oracles import small_model

ENGINE_ROOM = str(Path(engine_module.__file__).parent)
ALPHABET = "".join(chr(0x4E00 + i) for i in range(96))


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    small_model("llama").save_pretrained(folder)
    return load_policy(folder, torch.float32)


def make_engine(policy, steps_ahead=0, drafters=(), strategy=None, **settings) -> Engine:
    pacer = FixedPacer(strategy, 64) if strategy is not None else None
    settings = EngineSettings(**{"max_running": 6, "kv_tokens": 1024, **settings})
    engine = Engine(policy, settings, character_tokenizer(ALPHABET), drafters, pacer)
    engine.steps_ahead = steps_ahead  # a CPU has nothing to run ahead of, but it can be made to
    return engine


def run(engine: Engine, requests: list[Request]) -> dict[str, Completion]:
    engine.submit(requests)
    done = list(engine.completions())
    assert len({c.request.id for c in done}) == len(done) == len(requests)
    assert engine.pool.used == 0 and not engine.outcomes.unread
    return {c.request.id: c for c in done}


def watched_requests() -> list[Request]:
    """Some with stop strings, some with top logprobs, some plain; slots change hands all the time."""
    requests = []
    for i, request in enumerate(grouped_requests(prompts=6, samples=3, longest=60, seed=3)):
        stop = (ALPHABET[20 + i % 7], ALPHABET[50]) if i % 3 == 0 else ()
        sampling = SamplingParams(
            temperature=1.0, max_tokens=request.sampling.max_tokens, stop=stop, top_logprobs=2 * (i % 2)
        )
        requests.append(Request(request.id, request.prompt, request.seed, sampling))
    return requests


@pytest.mark.parametrize(
    "requests",
    [
        pytest.param(grouped_requests(6, 3, 60), id="plain", marks=pytest.mark.slow),
        pytest.param(watched_requests(), id="watched"),
    ],
)
def test_outcomes_read_late_are_never_credited_to_the_next_owner_of_a_slot(policy, requests):
    at_once = run(make_engine(policy), requests)
    late_engine = make_engine(policy, steps_ahead=5, kv_tokens=112)
    late = run(late_engine, requests)
    assert bits(late) == bits(at_once) and late_engine.preemptions > 0
    assert {name: c.top_logprobs for name, c in late.items()} == {
        name: c.top_logprobs for name, c in at_once.items()
    }


@pytest.mark.parametrize("steps_ahead", [pytest.param(0, marks=pytest.mark.slow), 5])
def test_draft_statistics_account_for_every_token(policy, steps_ahead):
    """Where every step speculates, a draft emits one token and those it had right."""
    requests = grouped_requests(5, 4, 30)
    plain = run(make_engine(policy), requests)
    tokens = sum(len(c.tokens) for c in plain.values())
    for drafter, name in ((OracleDrafter(plain), "oracle"), (RandomDrafter(), "random")):
        engine = make_engine(policy, steps_ahead, [drafter], Strategy(name, 3))
        assert bits(run(engine, requests)) == bits(plain)
        drafts = engine.take_stats().drafts[name]
        assert drafts.drafts + drafts.accepted == tokens and drafts.proposed == 3 * drafts.drafts
        assert sum(drafts.accepted_at) == drafts.accepted
        assert (drafts.accept_length > 2.5) == (name == "oracle")


def test_draft_statistics_count_only_proposed_tokens(policy):
    """A drafter that has one token for some rows and none for others; every row that took the step is still a
    draft to the pacer.
    """
    requests = grouped_requests(8, 4, 30)
    plain = run(make_engine(policy), requests)
    engine = make_engine(policy, 0, [Reticent(plain)], Strategy("reticent", 3))
    assert bits(run(engine, requests)) == bits(plain)
    drafts = engine.take_stats().drafts["reticent"]
    assert drafts.proposed == engine.drafters["reticent"].said > drafts.accepted > 0
    assert drafts.drafts + drafts.accepted == sum(len(c.tokens) for c in plain.values())
    assert drafts.accepted_at == [drafts.accepted, 0, 0]


class Reticent(OracleDrafter):
    name = "reticent"
    said = 0

    def tokens_for(self, request: Request, start: int, count: int) -> list[int]:
        if start % 2 or start >= len(self.answers[request.id].tokens):
            return [-1] * count
        self.said += 1
        return [*super().tokens_for(request, start, 1), *[-1] * (count - 1)]


@torch.inference_mode()
def instructions_per_step(policy, rows: int, strategy: Strategy | None) -> int:
    """Python instructions that the engine's own files execute for eight steps of a batch of `rows`."""
    drafters = [RandomDrafter()] if strategy is not None else []
    engine = make_engine(policy, 2, drafters, strategy, max_running=32, kv_tokens=4096)
    engine.submit(
        [Request(str(i), (5 + i,), i, SamplingParams(max_tokens=100, ignore_eos=True)) for i in range(rows)]
    )
    assert not engine.scheduler.admit(nobody_runs=True, lookahead=16, blocks_to_keep=0)
    engine._prefill()
    engine._launch()  # reserves blocks for the next steps
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if not frame.f_code.co_filename.startswith(ENGINE_ROOM):
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        for _ in range(8):
            engine._launch()
            engine._read_outcome()
    finally:
        sys.settrace(None)
    assert len(engine.batch) == rows and count > 0
    return count


@pytest.mark.parametrize("strategy", [None, Strategy("random", 3)], ids=["plain", "speculating"])
def test_host_work_per_step_does_not_grow_with_the_batch(policy, strategy):
    assert instructions_per_step(policy, 2, strategy) == instructions_per_step(policy, 30, strategy)
