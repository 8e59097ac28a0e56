"""Responses without an advantage do not pass through the policy, and the update is the same without them."""

from dataclasses import replace

import pytest
import torch

from paceline.learning.learner import Learner
from paceline.types import Group
from tests.learning.samples import make_config, make_groups, make_policy


def groups_with_silent_one() -> list[Group]:
    """Three groups, the second with equal rewards."""
    groups = make_groups() + make_groups(seed=1)[:1]
    silent = tuple(replace(sample, score=replace(sample.score, reward=0.5)) for sample in groups[1].samples)
    return [groups[0], replace(groups[1], samples=silent), groups[2]]


def update(*overrides: str) -> tuple[dict[str, torch.Tensor], dict[str, float], int]:
    """Returns the new weights, the metrics and the tokens that passed through the policy."""
    policy = make_policy()
    passed = 0
    policy.register_forward_pre_hook(lambda module, inputs: add(len(inputs[0])))

    def add(tokens: int) -> None:
        nonlocal passed
        passed += tokens

    learner = Learner(policy, make_config("learning.lr=1e-2", "rollout.prompts_per_step=3", *overrides))
    metrics = learner.update(groups_with_silent_one())
    return {name: p.detach().clone() for name, p in policy.named_parameters()}, metrics, passed


CASES = [
    *([f"learning.algorithm={name}"] for name in ("grpo", "dapo", "dr_grpo", "gspo")),
    ["learning.algorithm=reinforce++", "learning.kl_coef=0"],
    ["learning.loss_mean=sequence"],
    ["learning.correction.preset=icepop"],
    ["learning.correction.preset=seq-tis"],
    ["learning.epochs=2", "learning.minibatches=3", "learning.correction.mode=decoupled"],
    ["learning.weight_decay=0.1", "learning.minibatches=3"],
]


@pytest.mark.parametrize("overrides", CASES, ids=lambda case: " ".join(case))
def test_update_is_the_same_without_zero_advantages(overrides):
    skipping, metrics, fewer = update(*overrides)
    plain, plain_metrics, all_tokens = update("learning.skip_zero_advantages=false", *overrides)
    if "reinforce++" not in overrides[0]:  # which normalises over the step: no advantage is zero
        assert metrics["policy/zero_advantage_share"] > 0.2 or "minibatches=3" in " ".join(overrides)
        assert fewer < all_tokens or "minibatches=3" in " ".join(overrides)
    for name, expected in plain.items():
        torch.testing.assert_close(skipping[name], expected, rtol=0, atol=1e-12)
    for key in ("policy/loss", "policy/gradient_norm", "policy/learning_rate"):
        assert metrics[key] == pytest.approx(plain_metrics[key], rel=1e-9), key
    assert plain_metrics["policy/zero_advantage_share"] == 0


@pytest.mark.parametrize(
    "overrides",
    [
        ["learning.kl_coef=0.1"],
        ["learning.correction.preset=geo-rs"],
        ["learning.correction.preset=seq-tis", "learning.correction.normalise=true"],
        ["learning.correction.veto=1e-4"],
        ["rollout.precision=fp8"],
    ],
    ids=lambda case: " ".join(case),
)
def test_samples_with_zero_advantage_pass_where_the_update_would_differ(overrides):
    _, metrics, passed = update(*overrides)
    _, _, all_tokens = update("learning.skip_zero_advantages=false", *overrides)
    assert passed == all_tokens and metrics["policy/zero_advantage_share"] == 0


def test_minibatch_without_signal_is_still_a_step():
    """Its gradient is zero, but moments and weight decay move on."""
    learner = Learner(make_policy(), make_config("rollout.prompts_per_step=3", "learning.minibatches=3"))
    learner.update(groups_with_silent_one())
    assert learner.optimiser.steps == 3
