"""Exact numerics: the learner computes the rollout's logprobs, bit for bit, and the right gradients."""

import math
import random
from dataclasses import replace

import pytest
import torch

from paceline.config import ConfigError
from paceline.drafting.history import HistoryDrafter
from paceline.engine.engine import Engine, EngineSettings
from paceline.learning.batch import TrainingSequence, pack, training_sequence
from paceline.learning.exact import exact_logprobs
from paceline.learning.learner import Learner
from paceline.learning.logprobs import token_logprobs
from paceline.pacing.strategy import FixedPacer, Strategy
from paceline.policy.decoder import Decoder
from paceline.policy.fused import Recompute
from paceline.types import Completion, Group, Request, Sample, SamplingParams, Score
from tests.learning.samples import make_config
from tests.learning.test_fused import MARKED_CASES, make_policy

VOCABULARY = 50


def make_requests(count: int, seed: int = 0) -> list[Request]:
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(VOCABULARY) for _ in range(n)) for n in (1, 3, 16, 17)]
    return [
        Request(
            str(i),
            prompts[i % 4],
            rng.getrandbits(62),
            SamplingParams(temperature=rng.choice((1.0, 0.7, 0.0)), max_tokens=rng.randint(1, 40)),
            group=str(i % 4),
        )
        for i in range(count)
    ]


def roll_out(policy: Decoder, count: int, drafting: bool = False) -> list[Completion]:
    drafters = [HistoryDrafter()] if drafting else []
    pacer = FixedPacer(Strategy("history", 3), 1000) if drafting else None
    engine = Engine(
        policy, EngineSettings(max_running=5, kv_tokens=512, max_length=64), drafters=drafters, pacer=pacer
    )
    engine.submit(make_requests(count))
    return list(engine.completions())


def computed(policy: Decoder, sequences: list[TrainingSequence]) -> torch.Tensor:
    with torch.no_grad():
        return exact_logprobs(policy, pack(sequences, policy.device))[0]


def reported(completions: list[Completion]) -> torch.Tensor:
    return torch.tensor([x for c in completions for x in c.logprobs], dtype=torch.float64)


@pytest.mark.parametrize(
    "drafting", [pytest.param(False, id="plain", marks=pytest.mark.slow), pytest.param(True, id="drafted")]
)
@pytest.mark.parametrize("family, lora", MARKED_CASES)
def test_exact_logprobs_are_the_rollouts(family, lora, drafting):
    policy = make_policy(family, lora, torch.float32)
    completions = roll_out(policy, 20, drafting)
    ours = computed(policy, [training_sequence(c) for c in completions])
    assert torch.equal(ours.double(), reported(completions))


@pytest.mark.slow
def test_plain_forward_pass_is_not_exact():
    """Or nothing above would show anything."""
    policy = make_policy("qwen3", None, torch.bfloat16)
    completions = roll_out(policy, 20)
    with torch.no_grad():
        plain = token_logprobs(policy, pack([training_sequence(c) for c in completions], policy.device))[0]
    assert not torch.equal(plain.double(), reported(completions))


def test_exact_logprobs_are_computed_not_copied():
    policy = make_policy("qwen3", None, torch.float32)
    policy.head.weight.data.mul_(40)  # so that a unit in the last place of a weight is not rounded away
    sequences = [training_sequence(c) for c in roll_out(policy, 12)]
    honest = computed(policy, sequences)
    garbage = [replace(s, rollout_logprobs=(-1.0,) * len(s.rollout_logprobs)) for s in sequences]
    assert torch.equal(computed(policy, garbage), honest)
    weight = policy.norm.weight.data
    weight[0] = torch.nextafter(weight[0], torch.tensor(torch.inf))
    assert not torch.equal(computed(policy, sequences), honest)


@pytest.mark.parametrize("layers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family, lora", MARKED_CASES)
def test_exact_gradients_are_those_of_the_plain_pass(family, lora, layers):
    found = []
    for logprobs in (token_logprobs, exact_logprobs):
        policy = make_policy(family, lora, torch.float64)
        policy.recompute = Recompute(layers)
        rng = random.Random(0)
        tokens = tuple(rng.randrange(VOCABULARY) for _ in range(30))
        sequences = [
            TrainingSequence(tokens[:n], p, (True,) * (n - p), (0.0,) * (n - p), 1.0, 0.8)
            for n, p in ((30, 4), (9, 1), (17, 16))
        ]
        logprobs_R, entropies_R = logprobs(policy, pack(sequences, policy.device))
        weights_R = torch.randn(len(logprobs_R), generator=torch.Generator().manual_seed(2)).double()
        (logprobs_R * weights_R).sum().backward()
        gradients = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
        found.append(gradients | {"logprobs": logprobs_R.detach(), "entropies": entropies_R})
    plain, exact = found
    assert plain.keys() == exact.keys()
    for name, expected in plain.items():
        torch.testing.assert_close(exact[name], expected, rtol=1e-8, atol=1e-10, msg=name)


def test_exact_update_reports_no_mismatch():
    policy = make_policy("qwen3", None, torch.float32)
    completions = [c for c in roll_out(policy, 24) if len(c.tokens) > 1]
    samples = [Sample(c, Score(float(i % 3), correct=False)) for i, c in enumerate(completions)]
    groups = [
        Group(str(g), tuple(s for s in samples if s.completion.request.group == str(g))) for g in range(4)
    ]
    config = make_config("learning.numerics=exact", "learning.micro_batch_tokens=128")
    metrics = Learner(policy, config).update(groups)
    assert metrics["mismatch/kl"] == 0.0 and metrics["mismatch/k3"] == 0.0
    assert str(metrics["mismatch/kl"]) == "0.0", "a sign before nothing"
    assert metrics["policy/largest_logprob_delta"] == 0.0 and metrics["policy/gradient_norm"] > 0
    assert math.isfinite(metrics["policy/loss"])


def test_exact_numerics_refuse_recipes_that_cannot_be_exact():
    with pytest.raises(ConfigError, match=r"learning.numerics.*rollout.backend"):
        make_config("learning.numerics=exact", "rollout.backend=reference")
