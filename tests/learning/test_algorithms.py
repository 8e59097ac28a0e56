"""Every algorithm's loss and gradients against its paper's formula, as loops over samples and tokens.

The oracles share nothing with the code but the forward pass of one sequence.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from paceline.config import ALGORITHM_DEFAULTS, load_config
from paceline.learning.algorithms import ALGORITHMS
from paceline.learning.algorithms.base import with_reference_kl
from paceline.learning.algorithms.dapo import overlong_punishment, punish_overlong
from paceline.learning.learner import Learner
from paceline.policy.decoder import Decoder
from paceline.types import FinishReason, Group, Sample, Score
from tests.learning.samples import (
    MAX_TOKENS,
    make_config,
    make_groups,
    make_policy,
    response_logprobs,
    watch_gradients,
)

Oracle = Callable[[Decoder, Decoder, list[Group]], torch.Tensor]


def clipped(ratio: torch.Tensor, advantage: float, low: float, high: float) -> torch.Tensor:
    bounded = min(
        max(ratio, torch.tensor(1 - low, dtype=torch.float64)), torch.tensor(1 + high, dtype=torch.float64)
    )
    return -min(ratio * advantage, bounded * advantage)


def token_losses(
    policy: Decoder, sample: Sample, advantage: float, low: float, high: float
) -> list[torch.Tensor]:
    new = response_logprobs(policy, sample.completion)
    completion = sample.completion
    ratios = [
        (new[t] - completion.logprobs[t]).exp() for t, sampled in enumerate(completion.loss_mask) if sampled
    ]
    return [clipped(ratio, advantage, low, high) for ratio in ratios]


def group_advantages(group: Group) -> list[float]:
    mean = statistics.mean(group.rewards)
    deviation = statistics.stdev(group.rewards)
    return [(reward - mean) / (deviation + 1e-6) for reward in group.rewards]


def grpo(policy: Decoder, reference: Decoder, groups: list[Group]) -> torch.Tensor:
    """As the paper has it: mean within each response, beta 0.04 on the k3 KL."""
    responses = []
    for group in groups:
        for sample, advantage in zip(group.samples, group_advantages(group), strict=True):
            new = response_logprobs(policy, sample.completion)
            fixed = response_logprobs(reference, sample.completion).detach()
            kls = [
                (f - n).exp() - (f - n) - 1
                for n, f, m in zip(new, fixed, sample.completion.loss_mask, strict=True)
                if m
            ]
            losses = token_losses(policy, sample, advantage, 0.2, 0.2)
            responses.append(
                sum(loss + 0.04 * kl for loss, kl in zip(losses, kls, strict=True)) / len(losses)
            )
    return sum(responses) / len(responses)


def dapo(policy: Decoder, reference: Decoder, groups: list[Group]) -> torch.Tensor:
    """Token mean over the step, clip 0.2 and 0.28."""
    losses = [
        loss
        for group in groups
        for sample, advantage in zip(group.samples, group_advantages(group), strict=True)
        for loss in token_losses(policy, sample, advantage, 0.2, 0.28)
    ]
    return sum(losses) / len(losses)


def dr_grpo(policy: Decoder, reference: Decoder, groups: list[Group]) -> torch.Tensor:
    """Centred rewards, and the sum over tokens over a constant."""
    responses = []
    for group in groups:
        for sample in group.samples:
            advantage = sample.score.reward - statistics.mean(group.rewards)
            responses.append(sum(token_losses(policy, sample, advantage, 0.2, 0.2)) / MAX_TOKENS)
    return sum(responses) / len(responses)


def gspo(policy: Decoder, reference: Decoder, groups: list[Group]) -> torch.Tensor:
    """The ratio of whole sequences, to the power 1 / length, clipped at 3e-4 and 4e-4."""
    responses = []
    for group in groups:
        for sample, advantage in zip(group.samples, group_advantages(group), strict=True):
            completion = sample.completion
            sampled = [t for t, use in enumerate(completion.loss_mask) if use]
            new = response_logprobs(policy, completion)
            new_likelihood = sum(new[t] for t in sampled)
            old_likelihood = sum(completion.logprobs[t] for t in sampled)
            ratio = (new_likelihood.exp() / math.exp(old_likelihood)) ** (1 / len(sampled))
            responses.append(clipped(ratio, advantage, 3e-4, 4e-4))
    return sum(responses) / len(responses)


def reinforce_plus_plus(policy: Decoder, reference: Decoder, groups: list[Group]) -> torch.Tensor:
    """Returns of a reward at the end and a KL penalty of 0.01 per token, whitened over the step's tokens."""
    returns = []
    ratios = []
    for group in groups:
        for sample in group.samples:
            completion = sample.completion
            fixed = response_logprobs(reference, completion).detach()
            new = response_logprobs(policy, completion)
            sampled = [t for t, use in enumerate(completion.loss_mask) if use]
            for t in sampled:
                kl_to_go = sum(completion.logprobs[i] - fixed[i].item() for i in sampled if i >= t)
                returns.append(sample.score.reward - 0.01 * kl_to_go)
                ratios.append((new[t] - completion.logprobs[t]).exp())
    mean = statistics.mean(returns)
    deviation = statistics.stdev(returns)
    losses = [
        clipped(ratio, (value - mean) / (deviation + 1e-6), 0.2, 0.2)
        for ratio, value in zip(ratios, returns, strict=True)
    ]
    return sum(losses) / len(losses)


def rloo(policy: Decoder, reference: Decoder, groups: list[Group]) -> torch.Tensor:
    """Whole responses against the mean of their siblings; 0.05 of a response's KL is off its reward."""
    responses = []
    for group in groups:
        rewards = []
        for sample in group.samples:
            fixed = response_logprobs(reference, sample.completion).detach()
            completion = sample.completion
            pairs = zip(completion.logprobs, fixed, completion.loss_mask, strict=True)
            kl = sum(old - f.item() for old, f, sampled in pairs if sampled)
            rewards.append(sample.score.reward - 0.05 * kl)
        for i, sample in enumerate(group.samples):
            siblings = [reward for j, reward in enumerate(rewards) if j != i]
            completion = sample.completion
            new = response_logprobs(policy, completion)
            sampled = [t for t, use in enumerate(completion.loss_mask) if use]
            ratio = (sum(new[t] for t in sampled) - sum(completion.logprobs[t] for t in sampled)).exp()
            responses.append(clipped(ratio, rewards[i] - statistics.mean(siblings), 0.2, 0.5))
    return sum(responses) / len(responses)


def cispo(policy: Decoder, reference: Decoder, groups: list[Group]) -> torch.Tensor:
    """REINFORCE on every token, its weight cut at 1.3."""
    losses = []
    for group in groups:
        for sample, advantage in zip(group.samples, group_advantages(group), strict=True):
            completion = sample.completion
            new = response_logprobs(policy, completion)
            for t in (t for t, sampled in enumerate(completion.loss_mask) if sampled):
                weight = min(math.exp(new[t].item() - completion.logprobs[t]), 1.3)
                losses.append(-weight * advantage * new[t])
    return sum(losses) / len(losses)


CASES: dict[str, tuple[list[str], Oracle]] = {
    "grpo": (["learning.kl_coef=0.04", "learning.loss_mean=sequence"], grpo),
    "dapo": ([], dapo),
    "dr_grpo": ([], dr_grpo),
    "gspo": ([], gspo),
    "reinforce++": ([], reinforce_plus_plus),
    "rloo": (["learning.clip_high=0.5"], rloo),
    "cispo": (["learning.clip_high=0.3"], cispo),
}


def test_algorithms_all_have_an_oracle_and_defaults():
    assert {*CASES, "distill", "sft"} == set(ALGORITHMS) == set(ALGORITHM_DEFAULTS)


@pytest.mark.parametrize("algorithm", CASES)
@pytest.mark.parametrize("budget", [64, 4096])
def test_algorithm_loss_and_gradients_follow_the_paper(algorithm, budget):
    """With nothing set but the algorithm, however the step is cut into micro-batches."""
    overrides, oracle = CASES[algorithm]
    config = make_config(
        f"learning.algorithm={algorithm}", f"learning.micro_batch_tokens={budget}", *overrides
    )
    # GSPO's clip is so narrow that all samples would be outside of it, were they far from the policy.
    groups = near_policy(make_groups()) if algorithm == "gspo" else make_groups()
    policy = make_policy()
    reference = make_policy(seed=1).requires_grad_(False)
    expected_policy = make_policy()
    learner = Learner(policy, config)
    if learner.reference is not None:
        learner.reference.load_state_dict(reference.state_dict())
    expected = oracle(expected_policy, reference, groups)
    expected.backward()

    gradients = watch_gradients(learner)
    metrics = learner.update(groups)
    assert metrics["policy/loss"] == pytest.approx(expected.item(), rel=1e-9, abs=1e-12)
    for name, parameter in expected_policy.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-8, atol=1e-12, msg=name)
    assert 0 < metrics["policy/clip_fraction"] < 1, "both branches of the clip must have been tested"
    assert (metrics["policy/reference_kl"] > 0) == (config.learning.kl_coef > 0)


def near_policy(groups: list[Group]) -> list[Group]:
    """Makes samples of nearly this policy: each a little more or less likely as a whole.

    Those with an observation are exactly as likely. An observation has logprob 0, as in rollouts.
    """
    policy = make_policy()
    shifts = torch.Generator().manual_seed(5)
    for sample in (sample for group in groups for sample in group.samples):
        shift = (
            1e-3 * torch.randn((), generator=shifts, dtype=torch.float64) * all(sample.completion.loss_mask)
        )
        new = response_logprobs(policy, sample.completion) + shift
        logprobs = tuple(
            x if sampled else 0.0
            for x, sampled in zip(new.tolist(), sample.completion.loss_mask, strict=True)
        )
        object.__setattr__(sample.completion, "logprobs", logprobs)
    return groups


@pytest.mark.parametrize("algorithm", CASES)
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0])
def test_update_is_skipped_and_reported_where_all_rewards_are_equal(algorithm, reward):
    """The mean of three times 0.1 is not 0.1; reinforce++ must not turn the KL that is left into a signal."""
    policy = make_policy()
    reference = make_policy(seed=1)
    learner = Learner(policy, make_config(f"learning.algorithm={algorithm}", "learning.kl_coef=0.1"))
    learner.reference.load_state_dict(reference.state_dict())
    groups = [
        Group(g.prompt_id, tuple(Sample(s.completion, Score(reward, True)) for s in g.samples[:3]))
        for g in make_groups()
    ]
    before = [parameter.clone() for parameter in policy.parameters()]
    metrics = learner.update(groups)
    assert metrics["policy/skipped"] == 1.0 and metrics["mismatch/k3"] > 0, (
        "nothing to learn, but the mismatch is known"
    )
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


def test_reinforce_plus_plus_gets_no_kl_signal_from_a_refused_sample():
    """It scores 0 among ones, but has no token that could learn from it: the rest scored alike."""
    groups = [
        Group(g.prompt_id, tuple(Sample(s.completion, Score(1.0, True)) for s in g.samples))
        for g in make_groups()
    ]
    first = groups[0].samples[0].completion
    refused = replace(first, tokens=(), logprobs=(), segments=(), finish_reason=FinishReason.REFUSED)
    groups[0] = replace(groups[0], samples=(Sample(refused, Score(0.0, False)), *groups[0].samples[1:]))
    policy = make_policy()
    learner = Learner(policy, make_config("learning.algorithm=reinforce++"))
    learner.reference.load_state_dict(make_policy(seed=1).state_dict())
    before = [parameter.clone() for parameter in policy.parameters()]
    assert learner.update(groups)["policy/skipped"] == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


def test_algorithm_sets_the_papers_values_and_explicit_keys_win():
    dapo = load_config(None, ["learning.algorithm=dapo"]).learning
    assert (dapo.clip_low, dapo.clip_high, dapo.loss_mean, dapo.kl_coef) == (0.2, 0.28, "token", 0)
    assert dapo.overlong_share == 0.2 and dapo.dynamic_sampling_rounds > 0
    assert load_config(None, ["learning.algorithm=dr_grpo"]).learning.loss_mean == "constant"
    gspo = load_config(None, ["learning.algorithm=gspo", "learning.clip_high=0.01"]).learning
    assert (gspo.clip_low, gspo.clip_high, gspo.loss_mean) == (3e-4, 0.01, "sequence")
    assert load_config(None, ["learning.algorithm=reinforce++", "learning.kl_coef=0"]).learning.kl_coef == 0


@pytest.mark.parametrize("length, expected", [(1, 0), (16384, 0), (18432, -0.5), (20480, -1), (30000, -1)])
def test_overlong_punishment_with_the_papers_numbers(length, expected):
    assert overlong_punishment(length, max_tokens=20480, share=0.2) == pytest.approx(expected)


def test_overlong_punishment_is_a_reward_component_of_its_own():
    groups = make_groups()
    punished = punish_overlong(groups, max_tokens=12, share=0.5)
    for before, after in zip(groups, punished, strict=True):
        for old, new in zip(before.samples, after.samples, strict=True):
            length = len(old.completion.tokens)
            expected = 0.0 if length <= 6 else max(-1.0, (6 - length) / 6)
            assert new.score.components["overlong"] == pytest.approx(expected)
            assert new.score.reward == pytest.approx(old.score.reward + expected)
            assert new.completion == old.completion and new.score.correct == old.score.correct
    assert punish_overlong(groups, max_tokens=12, share=0.0) == groups
    assert punish_overlong(punished, max_tokens=12, share=0.5) == punished, "a run's samples, replayed"


def test_clip_fraction_counts_the_tokens_without_a_gradient():
    policy = make_policy()
    groups = make_groups()
    without = 0
    tokens = 0
    for group in groups:
        for sample, advantage in zip(group.samples, group_advantages(group), strict=True):
            new = response_logprobs(policy, sample.completion)
            completion = sample.completion
            ratios = [
                math.exp(new[t].item() - completion.logprobs[t])
                for t, sampled in enumerate(completion.loss_mask)
                if sampled
            ]
            without += sum(
                (advantage > 0 and ratio > 1.28) or (advantage < 0 and ratio < 0.8) for ratio in ratios
            )
            tokens += len(ratios)
    metrics = Learner(policy, make_config("learning.algorithm=dapo")).update(groups)
    assert metrics["policy/clip_fraction"] == pytest.approx(without / tokens) and without > 0


def test_loss_ignores_reference_logprobs_of_tokens_outside_it():
    """The policy finds an observation impossible, the reference does not: exp of that is infinite."""
    logprobs_R = torch.tensor([-1.0, -120.0], requires_grad=True)
    mask_R = torch.tensor([1.0, 0.0])
    nothing_R = torch.zeros(2)
    found = with_reference_kl(
        make_config("learning.kl_coef=0.1").learning,
        nothing_R,
        nothing_R > 0,
        logprobs_R,
        torch.tensor([-1.5, -3.0]),
    )
    loss = (found.loss_R * mask_R).sum()
    loss.backward()
    assert loss.item() == pytest.approx(0.1 * (math.exp(-0.5) + 0.5 - 1), rel=1e-5)
    assert logprobs_R.grad.tolist() == pytest.approx([0.1 * (1 - math.exp(-0.5)), 0.0], rel=1e-5)
