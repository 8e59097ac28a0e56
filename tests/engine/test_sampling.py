"""Pieces change no bit: whatever is sampled, and however, it is what all tokens at once would have given."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from paceline.drafting.draft_model import DraftModel
from paceline.drafting.history import HistoryDrafter
from paceline.engine import sampling
from paceline.engine.engine import Engine, EngineSettings
from paceline.kernels import sampler
from paceline.kernels.row_tiles import ROW_TILE
from paceline.kernels.sampler import sample_truncated, top_logprobs
from paceline.pacing.strategy import PLAIN, FixedPacer, Strategy
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.types import Completion, Request, SamplingParams

# A vocabulary of more than one of the sampler's chunks.
DENSE = DecoderConfig("llama", 2500, 32, 64, 2, 4, 2, 8, 128, eos_token_ids=(2,))
EXPERTS = dataclasses.replace(
    DENSE,
    family="qwen3_moe",
    num_experts=4,
    num_experts_per_token=2,
    expert_intermediate_size=24,
    dense_layers=(0,),
)
ROWS = 40  # more than a piece, whatever the strategy
SHAPES = {"dense": DENSE, "experts": EXPERTS}
RULES = [
    (PLAIN, "shared-noise"),
    (Strategy("history", 3), "shared-noise"),
    (Strategy("draft_model", 4), "rejection"),
    pytest.param(Strategy("history", 2), "rejection", marks=pytest.mark.slow),
]
KINDS = {
    "plain": ({}, {"temperature": 0.7}, {"temperature": 0.0}),
    "truncated": ({"top_k": 7}, {"top_p": 0.8, "temperature": 1.2}, {}, {"min_p": 0.05}),
    "top logprobs": ({"top_logprobs": 4}, {}, {"top_logprobs": 2, "temperature": 0.5}),
    "both": ({"top_k": 30, "top_logprobs": 3}, {"top_p": 0.5}),
}


def requests_of(kind: str) -> list[Request]:
    settings = KINDS[kind]
    samplings = [
        SamplingParams(max_tokens=3 + i % 3, ignore_eos=True, **settings[i % len(settings)])
        for i in range(ROWS)
    ]
    return [Request(str(i), (5 + i, 6, 7), 1000 + i, sampling) for i, sampling in enumerate(samplings)]


def generate(
    shape: DecoderConfig, requests: list[Request], strategy: Strategy, verify: str
) -> dict[str, Completion]:
    policy, draft = (Decoder(shape).initialise(0) for _ in range(2))
    with torch.no_grad():
        draft.head.weight.add_(
            torch.randn(draft.head.weight.shape, generator=torch.Generator().manual_seed(1)) * 0.005
        )  # often right, not always
    settings = EngineSettings(max_running=ROWS, kv_tokens=2048, verify=verify)
    engine = Engine(
        policy, settings, drafters=[DraftModel(draft), HistoryDrafter()], pacer=FixedPacer(strategy)
    )
    engine.submit(requests)
    return {c.request.id: c for c in engine.completions()}


def in_pieces_of(monkeypatch, tokens: int, rows: int) -> list[list[int]]:
    """The sizes of each step's pieces, as they run."""
    monkeypatch.setattr(sampling, "SAMPLE_TOKENS", tokens)
    monkeypatch.setattr(sampler, "WIDE_ROWS", rows)
    steps: list[list[int]] = []
    sample_step = sampling.sample_step

    def noted(forward, rows_state, hidden_TE, *others):
        sizes: list[int] = []
        steps.append(sizes)
        spy = SimpleNamespace(logits=lambda piece_PE: sizes.append(len(piece_PE)) or forward.logits(piece_PE))
        return sample_step(spy, rows_state, hidden_TE, *others)

    monkeypatch.setattr("paceline.engine.step.sample_step", noted)
    return steps


# "both" has what each of the other kinds has: the core suite takes it.
CASES = [
    pytest.param(shape, kind, marks=() if (shape, kind) == ("experts", "both") else pytest.mark.slow)
    for shape in SHAPES
    for kind in KINDS
]


@pytest.mark.parametrize("shape, kind", CASES)
@pytest.mark.parametrize("strategy, verify", RULES, ids=str)
def test_sampling_in_pieces_changes_no_bit(shape, strategy, verify, kind, monkeypatch):
    requests = requests_of(kind)
    with monkeypatch.context() as whole:
        in_pieces_of(whole, 1 << 20, 1 << 20)
        expected = generate(SHAPES[shape], requests, strategy, verify)
    pieces = in_pieces_of(monkeypatch, ROW_TILE, 3)
    done = generate(SHAPES[shape], requests, strategy, verify)
    assert {name: (c.tokens, c.logprobs, c.top_logprobs) for name, c in done.items()} == {
        name: (c.tokens, c.logprobs, c.top_logprobs) for name, c in expected.items()
    }
    assert max(max(sizes) for sizes in pieces) <= ROW_TILE and max(len(sizes) for sizes in pieces) > 1


@pytest.mark.parametrize("rows", [1, 7, 16, 40])
def test_sampler_row_count_changes_no_bit(rows, monkeypatch):
    generator = torch.Generator().manual_seed(3)
    logits, seed, position = (
        torch.randn(40, 5001, generator=generator) * 3,
        torch.arange(40) * 77,
        torch.arange(40),
    )
    temperature = torch.tensor([1.0, 0.5, 0.0, 1.7]).repeat(10)
    truncation = (
        torch.tensor([0, 9, 0, 50]).repeat(10),
        torch.tensor([0.9, 1.0, 1.0, 0.7]).repeat(10),
        torch.tensor([0.0, 0.0, 0.1, 0.0]).repeat(10),
    )
    monkeypatch.setattr(sampler, "WIDE_ROWS", 1000)
    expected = (
        *sample_truncated(logits, temperature, seed, position, *truncation),
        *top_logprobs(logits, temperature, 6),
    )
    monkeypatch.setattr(sampler, "WIDE_ROWS", rows)
    found = (
        *sample_truncated(logits, temperature, seed, position, *truncation),
        *top_logprobs(logits, temperature, 6),
    )
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_sampling_pieces_fill_the_cpu_row_tiles():
    assert sampling.SAMPLE_TOKENS % ROW_TILE == 0
