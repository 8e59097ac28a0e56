"""`verify: rejection` in the engine; that it samples the right distribution is `tests/certify`'s to show."""

from dataclasses import replace

import pytest
import torch

from paceline.drafting.draft_model import DraftModel
from paceline.drafting.history import HistoryDrafter
from paceline.pacing.strategy import FixedPacer, Strategy
from paceline.policy.huggingface import load_policy
from paceline.types import FinishReason, Request, SamplingParams
from tests.drafting.test_exactness import folders, plain_run, run  # noqa: F401  (a fixture)
from tests.drafting.test_model_drafters import make_drafter
from tests.engine.test_engine import bits, grouped_requests


@pytest.mark.parametrize("kind", ["eagle", "draft_model", "history"])
def test_rejection_of_greedy_requests_is_plain_decoding(kind, folders):  # noqa: F811
    """At temperature 0 there is nothing to draw, with probabilities and without."""
    requests = [
        replace(r, sampling=replace(r.sampling, temperature=0.0))
        for r in grouped_requests(prompts=3, samples=2, longest=30)
    ]
    plain = plain_run(folders["llama"], requests)
    drafter = HistoryDrafter() if kind == "history" else make_drafter(kind, folders["llama"])
    engine, done = run(folders["llama"], requests, [drafter], Strategy(kind, 3), verify="rejection")
    assert bits(done) == bits(plain)
    assert (engine.runner.probabilities_SKV is not None) == (kind != "history"), (
        "kept only where somebody has them"
    )
    assert str(Strategy(kind, 3)) in engine.take_stats().strategies


@pytest.mark.parametrize("truncation", [{}, {"top_k": 5}, {"top_p": 0.8, "min_p": 0.02}])
def test_rejection_always_accepts_the_policy_as_its_own_drafter(truncation, folders):  # noqa: F811
    """p = q but for rounding; rows without truncation beside rows with it."""
    samplings = (
        SamplingParams(0.9, 24, ignore_eos=True),
        SamplingParams(1.3, 24, ignore_eos=True, **truncation),
    )
    requests = [Request(str(i), (5, 6, 7 + i), 100 + i, samplings[i % 2]) for i in range(6)]
    engine, _ = run(
        folders["qwen3"],
        requests,
        [DraftModel(load_policy(folders["qwen3"], torch.float32))],
        Strategy("draft_model", 3),
        verify="rejection",
    )
    assert engine.take_stats().drafts["draft_model"].accept_length == 4.0


def test_rejection_stops_at_stops_and_limits(folders):  # noqa: F811
    requests = grouped_requests(prompts=5, samples=4, longest=30)
    drafters = [make_drafter("draft_model", folders["llama"]), HistoryDrafter()]

    def switch(engine, count: int) -> None:
        engine.pacer = FixedPacer(Strategy("history" if count % 2 else "draft_model", 1 + count % 7), 1000)

    engine, done = run(
        folders["llama"],
        requests,
        drafters,
        Strategy("draft_model", 5),
        switch,
        kv_tokens=256,
        verify="rejection",
    )
    for completion in done.values():
        tokens, limit = completion.tokens, completion.request.sampling.max_tokens
        stops = {11, *engine.policy.config.eos_token_ids}
        assert 1 <= len(tokens) <= limit and not stops & set(tokens[:-1])
        assert completion.finish_reason is (FinishReason.STOP if tokens[-1] in stops else FinishReason.LENGTH)
        assert len(tokens) == limit or tokens[-1] in stops
