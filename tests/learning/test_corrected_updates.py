"""Updates with correction: loss and gradients against formulas, the old-logprobs pass, skipped updates."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from paceline.config import CORRECTION_PRESETS
from paceline.learning import learner as learner_module
from paceline.learning.learner import Learner
from paceline.learning.mismatch import Mismatch
from paceline.types import Group, SamplingParams
from tests.learning.correction_oracle import Drawn, correction_config, expected
from tests.learning.samples import (
    MAX_TOKENS,
    make_config,
    make_groups,
    make_policy,
    response_logprobs,
    watch_gradients,
)
from tests.learning.test_algorithms import group_advantages

# Bounds as wide as the made-up samples are from the made-up policy, so that some tokens and responses fall
# outside.
CORRECTIONS = {
    "token-tis": {"preset": "token-tis", "weight_bounds": [0.0, 1.2]},
    "seq-tis": {"preset": "seq-tis", "weight_bounds": [0.0, 1.1]},
    "icepop": {"preset": "icepop", "weight_bounds": [0.8, 1.3]},
    "seq-mis": {"preset": "seq-mis", "reject_bounds": [0.5, 1.5]},
    "geo-rs": {"preset": "geo-rs", "reject_bounds": [0.95, 1.1]},
    "k3-rs-token-tis": {"preset": "k3-rs-token-tis", "reject_bounds": [0.0, 0.05]},
    "normalised": {"preset": "token-tis", "weight_bounds": [0.0, 1.2], "normalise": True},
    "normalised seq-mis": {"preset": "seq-mis", "reject_bounds": [0.5, 1.5], "normalise": True},
    "bypass geometric": {"reject": "geometric", "reject_bounds": [0.95, 1.1]},
    "bypass token": {"reject": "token", "reject_bounds": [0.8, 1.3]},
    "veto": {"preset": "token-tis", "veto": 0.6},
}


def overrides_for(name: str) -> list[str]:
    return [f"learning.correction.{key}={value}" for key, value in CORRECTIONS[name].items()]


def objective(name: str, groups: list[Group], policy, before, loss_mean: str) -> torch.Tensor:
    """w min(r A, clip(r) A) over what is kept; `before` is the learner's policy before the first update."""
    config = correction_config(**CORRECTIONS[name])
    terms: list[list[torch.Tensor]] = []
    token_weights = []
    sequence_weights = []
    for group in groups:
        for sample, advantage in zip(group.samples, group_advantages(group), strict=True):
            mask = sample.completion.loss_mask
            rollout = sample.completion.logprobs
            new = response_logprobs(policy, sample.completion)
            old = response_logprobs(before, sample.completion).tolist()
            anchor = old if config.mode == "decoupled" else rollout
            places = [i for i, sampled in enumerate(mask) if sampled]
            corrections = expected(config, Drawn(old, list(rollout), mask))
            token_weights += [weight for weight, _ in corrections]
            sequence_weights.append(corrections[0][0])
            terms.append([])
            for i, (weight, kept) in zip(places, corrections, strict=True):
                ratio = (new[i] - anchor[i]).exp()
                surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                if kept:
                    terms[-1].append(-weight * surrogate)
    averaged = sequence_weights if config.weight == "sequence" else token_weights
    mean_weight = sum(averaged) / len(averaged) if config.normalise else 1.0
    kept_responses = [response for response in terms if response]
    if loss_mean == "token":
        loss = sum(map(sum, terms)) / sum(map(len, terms))
    elif loss_mean == "sequence":
        loss = sum(sum(response) / len(response) for response in kept_responses) / len(kept_responses)
    else:
        loss = sum(map(sum, terms)) / (MAX_TOKENS * len(kept_responses))
    return loss / mean_weight


def assert_gradients(gradients: dict[str, torch.Tensor], policy) -> None:
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-8, atol=1e-12, msg=name)


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize(
    "loss_mean, budget",
    [
        ("token", 64),
        pytest.param("token", 4096, marks=pytest.mark.slow),
        ("sequence", 64),
        pytest.param("constant", 64, marks=pytest.mark.slow),
    ],
)
def test_corrected_loss_and_gradients_follow_the_formula(name, loss_mean, budget):
    groups = make_groups()
    policy = make_policy()
    expected_policy = make_policy()
    config = make_config(
        f"learning.micro_batch_tokens={budget}", f"learning.loss_mean={loss_mean}", *overrides_for(name)
    )
    learner = Learner(policy, config)
    gradients = watch_gradients(learner)
    metrics = learner.update(groups)
    wanted = objective(name, groups, expected_policy, make_policy(), loss_mean)
    wanted.backward()
    assert metrics["policy/loss"] == pytest.approx(wanted.item(), rel=1e-9)
    assert_gradients(gradients, expected_policy)
    acted = [metrics["correction/masked"], metrics["correction/clipped"]]
    assert max(acted) > 0 and all(share < 1 for share in acted), (
        "some tokens must be inside and some outside of the bounds"
    )


@pytest.mark.parametrize("name", ["token-tis", "seq-mis", "normalised"])
def test_later_updates_keep_the_policy_and_the_weights_from_before_the_first(name):
    groups = make_groups()
    before = make_policy()
    learner = Learner(
        make_policy(), make_config("learning.epochs=2", "learning.lr=1e-2", *overrides_for(name))
    )
    gradients = watch_gradients(learner)
    policies: list = []
    watched = learner.optimiser.step

    def step(scale: float = 1.0) -> float:
        policies.append(copy.deepcopy(learner.policy))  # as it is when the update's gradient has been taken
        return watched(scale)

    learner.optimiser.step = step
    learner.update(groups)
    assert len(policies) == 2
    second = policies[1]
    second.zero_grad()
    objective(name, groups, second, before, "token").backward()
    assert_gradients(gradients, second)


def count_forwards(monkeypatch) -> list[bool]:
    """For every forward pass of the learner, whether it was for learning."""
    learning: list[bool] = []
    real = learner_module.token_logprobs

    def counted(*arguments):
        learning.append(torch.is_grad_enabled())
        return real(*arguments)

    monkeypatch.setattr(learner_module, "token_logprobs", counted)
    return learning


@pytest.mark.parametrize(
    "overrides, surveys, passes",
    [
        ([], 0, 1),
        (["learning.correction.preset=token-tis"], 0, 1),
        (["learning.correction.preset=token-tis", "learning.correction.normalise=true"], 1, 1),
        (
            [
                "learning.correction.preset=seq-mis",
                "learning.correction.reject_bounds=[0, 100]",
                "learning.epochs=2",
            ],
            1,
            2,
        ),
        (["learning.correction.preset=icepop", "learning.minibatches=2"], 1, 2),
        (["learning.epochs=3"], 0, 3),
        (["learning.correction.veto=1e-4", "learning.epochs=3"], 0, 3),
    ],
)
def test_old_logprobs_pass_runs_only_where_it_is_needed(monkeypatch, overrides, surveys, passes):
    forwards = count_forwards(monkeypatch)
    Learner(make_policy(), make_config(*overrides)).update(make_groups())
    assert (forwards.count(False), forwards.count(True)) == (surveys, passes)


def of_mismatch(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith(("mismatch/", "correction/"))}


@pytest.mark.parametrize("correction", ["none", "token-tis"])
def test_mismatch_is_measured_before_the_weights_move(correction):
    def mismatch(*overrides: str) -> dict[str, float]:
        metrics = Learner(
            make_policy(),
            make_config(f"learning.correction.preset={correction}", "learning.lr=5e-2", *overrides),
        ).update(make_groups())
        return {
            name: value for name, value in metrics.items() if name.startswith(("mismatch/", "correction/"))
        }

    assert mismatch("learning.epochs=4") == pytest.approx(mismatch(), rel=1e-9)
    if correction == "none":  # without a survey, of the first minibatch
        first = Learner(make_policy(), make_config()).update(make_groups()[:1])
        assert mismatch("learning.minibatches=2")["mismatch/kl"] == pytest.approx(
            first["mismatch/kl"], rel=1e-9
        )
    else:
        assert mismatch("learning.minibatches=2") == pytest.approx(mismatch(), rel=1e-9)


def test_mismatch_is_measured_without_signal(monkeypatch):
    groups = make_groups()
    wanted = Learner(make_policy(), make_config("learning.skip_zero_advantages=false")).update(groups)
    alike = [
        replace(g, samples=tuple(replace(s, score=replace(s.score, reward=1.0)) for s in g.samples))
        for g in groups
    ]
    forwards = count_forwards(monkeypatch)
    metrics = Learner(make_policy(), make_config()).update(alike)
    assert forwards == [False] and metrics["policy/skipped"] == 1 and metrics["policy/nonfinite_updates"] == 0
    assert {k: v for k, v in metrics.items() if k.startswith("mismatch/")} == pytest.approx(
        {k: v for k, v in wanted.items() if k.startswith("mismatch/")}
    )


def own_samples(policy, temperature: float) -> list[Group]:
    """The made-up samples with the logprobs that this policy really gives them at the temperature."""
    groups = make_groups(temperature=temperature)
    for sample in (sample for group in groups for sample in group.samples):
        with torch.no_grad():
            logprobs = response_logprobs(policy, sample.completion).tolist()
        object.__setattr__(sample.completion, "logprobs", tuple(logprobs))
    return groups


def test_learner_logprobs_are_of_the_distribution_sampled_from():
    """A learner that forgot the temperature would find a mismatch where there is none."""
    policy = make_policy()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(3.0)  # sharp enough for the temperature to matter
    for temperature in (0.5, 1.0, 1.7):
        metrics = Learner(copy.deepcopy(policy), make_config()).update(own_samples(policy, temperature))
        assert (
            metrics["mismatch/k3"] < 1e-12
            and abs(metrics["mismatch/kl"]) < 1e-12
            and metrics["correction/ess"] == pytest.approx(1)
        )
    groups = own_samples(policy, 0.5)
    for sample in (sample for group in groups for sample in group.samples):
        object.__setattr__(sample.completion.request, "sampling", SamplingParams(temperature=1.0))
    assert Learner(copy.deepcopy(policy), make_config()).update(groups)["mismatch/k3"] > 1e-3


def test_truncated_sampling_is_refused():
    groups = make_groups()
    object.__setattr__(
        groups[0].samples[0].completion.request, "sampling", SamplingParams(temperature=0.7, top_p=0.9)
    )
    with pytest.raises(ValueError, match=r"0/0 was sampled with top_p.*temperature alone"):
        Learner(make_policy(), make_config()).update(groups)


def snapshot(learner: Learner) -> list[torch.Tensor]:
    return [
        x.clone()
        for x in (
            *learner.policy.parameters(),
            *(tensor for state in learner.optimiser.states for tensor in state.moments().values()),
        )
    ]


def assert_untouched(learner: Learner, before: list[torch.Tensor], steps: int) -> None:
    assert (
        all(torch.equal(a, b) for a, b in zip(before, snapshot(learner), strict=True))
        and learner.optimiser.steps == steps
    )
    assert all(parameter.grad is None for parameter in learner.policy.parameters())


@pytest.mark.parametrize(
    "overrides",
    [
        ["preset=geo-rs", "reject_bounds=[7, 8]"],
        ["preset=seq-mis", "reject_bounds=[1e5, 1e6]", "normalise=true"],
        ["preset=icepop", "weight_bounds=[50, 60]"],
        ["preset=icepop", "weight_bounds=[50, 60]", "normalise=true"],
        ["reject=k3", "reject_bounds=[0, 0]"],
        ["veto=0.999"],
    ],
)
@pytest.mark.parametrize("loss_mean", ["token", "sequence"])
def test_update_is_skipped_and_reported_where_all_tokens_are_masked(overrides, loss_mean):
    warnings: list[str] = []
    config = make_config(
        f"learning.loss_mean={loss_mean}", *(f"learning.correction.{override}" for override in overrides)
    )
    learner = Learner(make_policy(), config, warnings.append)
    before = snapshot(learner)
    metrics = learner.update(make_groups())
    assert_untouched(learner, before, steps=0)
    assert (
        metrics["policy/skipped"] == 1
        and metrics["policy/masked_updates"] == 1
        and metrics["policy/nonfinite_updates"] == 0
    )
    assert metrics["correction/masked"] == 1 and metrics["correction/ess"] == 0
    assert (
        len(warnings) == 1
        and "learning.correction masked all 52 tokens of an update: it was skipped" in warnings[0]
    )
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("algorithm", ["grpo", "gspo"])
@pytest.mark.parametrize("logprob", [-500.0, 400.0])
def test_rejected_token_leaves_no_trace_however_wrong_it_is(algorithm, logprob):
    """exp of its log ratio is infinite in float32, and infinity times a weight of zero is NaN."""
    config = make_config(
        f"learning.algorithm={algorithm}",
        "learning.correction.reject=sequence",
        "learning.correction.reject_bounds=[1e-3, 1e3]",
    )
    groups = make_groups()
    without = [replace(groups[0], samples=groups[0].samples[:-1]), groups[1]]
    advantages = Learner(make_policy(), config).algorithm.advantages(groups)
    learners = [Learner(make_policy().float(), config) for _ in range(2)]
    victim = groups[0].samples[-1].completion
    object.__setattr__(victim, "logprobs", (logprob, *victim.logprobs[1:]))
    gradients = []
    for learner, part, values in zip(
        learners, (groups, without), (advantages, [advantages[0][:-1], advantages[1]]), strict=True
    ):
        learner.algorithm.advantages = lambda groups, log_ratios, values=values: values
        gradients.append(watch_gradients(learner))
        assert learner.update(part)["policy/nonfinite_updates"] == 0
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-4, atol=1e-7, msg=name)


class Refused(Exception):
    pass


@pytest.mark.parametrize("overrides", [[], ["learning.correction.preset=token-tis", "learning.epochs=2"]])
def test_mismatch_check_can_stop_the_update(overrides):
    learner = Learner(make_policy(), make_config(*overrides))
    learner.update(make_groups())
    before = snapshot(learner)
    steps = learner.optimiser.steps
    seen = []

    def refuse(mismatch: Mismatch) -> None:
        seen.append(mismatch.kl)
        raise Refused

    with pytest.raises(Refused):
        learner.update(make_groups(seed=1), refuse)
    assert_untouched(learner, before, steps)
    metrics = learner.update(make_groups(seed=1), lambda mismatch: seen.append(mismatch.kl))
    assert len(seen) == 2 and seen[0] == seen[1] == metrics["mismatch/kl"], (
        "asked once an update, and nothing was left behind"
    )


@pytest.mark.parametrize("preset", ["none", "icepop", "geo-rs"])
def test_nan_logprob_is_never_masked_silently(preset):
    groups = make_groups()
    victim = groups[0].samples[0].completion
    object.__setattr__(victim, "logprobs", (math.nan, *victim.logprobs[1:]))
    bounds = ["learning.correction.reject_bounds=[0, 10]"] if "reject" in CORRECTION_PRESETS[preset] else []
    learner = Learner(make_policy(), make_config(f"learning.correction.preset={preset}", *bounds))
    before = snapshot(learner)
    metrics = learner.update(groups)
    assert_untouched(learner, before, steps=0)
    assert (
        metrics["policy/skipped"] == 1
        and metrics["policy/nonfinite_updates"] == 1
        and metrics["policy/masked_updates"] == 0
    )


@pytest.mark.parametrize("algorithm", ["grpo", "reinforce++"])
def test_metrics_stay_finite_with_one_hopeless_token(algorithm):
    """exp of its log ratio is infinite even in float64."""
    groups = make_groups()
    victim = groups[0].samples[1].completion
    object.__setattr__(victim, "logprobs", (-900.0, *victim.logprobs[1:]))
    learner = Learner(make_policy(), make_config(f"learning.algorithm={algorithm}"))
    metrics = learner.update(groups)
    assert metrics["policy/nonfinite_updates"] == 0 and all(map(math.isfinite, metrics.values()))
    assert metrics["policy/approximate_kl"] == pytest.approx(metrics["mismatch/k3"], rel=1e-12)
    assert metrics["policy/reference_kl"] >= 0


@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "reinforce++"])
@pytest.mark.parametrize("logprob", [math.nan, math.inf, -math.inf])
def test_observation_logprobs_do_not_matter(algorithm, logprob):
    """Saved rollouts of elsewhere may not have one."""
    groups = make_groups()
    wanted = Learner(make_policy(), make_config(f"learning.algorithm={algorithm}")).update(groups)
    for completion in (sample.completion for group in groups for sample in group.samples):
        logprobs = zip(completion.logprobs, completion.loss_mask, strict=True)
        object.__setattr__(
            completion, "logprobs", tuple(x if sampled else logprob for x, sampled in logprobs)
        )
    found = Learner(make_policy(), make_config(f"learning.algorithm={algorithm}")).update(groups)
    assert found == pytest.approx(wanted, rel=1e-12)
