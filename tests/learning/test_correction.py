"""Rollout correction against its formulas, written as loops over responses and tokens in Python floats."""

import math
import random

import pytest
import torch

from paceline.config import CORRECTION_PRESETS, ConfigError, CorrectionConfig, load_config
from paceline.learning.batch import MicroBatch, TrainingSequence, pack
from paceline.learning.correction import apply_correction, compute_correction
from paceline.learning.mismatch import Mismatch, mismatch_values, sum_mismatches
from tests.learning.correction_oracle import Drawn, bounded_exp, correction_config, expected, k3

# -- inputs ----------------------------------------------------------------------------------------


def draw(seed: int, spread: float, responses: int = 12) -> list[Drawn]:
    rng = random.Random(seed)
    drawn = []
    for index in range(responses):
        length = rng.randint(1, 9)
        # Every third response has observations in it; whatever stands there must not matter.
        sampled = [index % 3 > 0 or i == 0 or rng.random() < 0.6 for i in range(length)]
        rollout = [-rng.expovariate(1.0) if s else 0.0 for s in sampled]
        width = spread * rng.random()  # some responses are near, some far
        learner = [
            min(0.0, x + rng.gauss(0, width)) if s else -rng.expovariate(0.1)
            for x, s in zip(rollout, sampled, strict=True)
        ]
        drawn.append(Drawn(learner, rollout, sampled))
    return drawn


def pack_drawn(drawn: list[Drawn]) -> tuple[MicroBatch, torch.Tensor]:
    sequences = [
        TrainingSequence((1,) * (2 + len(r.sampled)), 2, tuple(r.sampled), tuple(r.rollout), 1.0, 1.0)
        for r in drawn
    ]
    batch = pack(sequences, torch.device("cpu"))
    return batch, torch.tensor([x for r in drawn for x in r.learner], dtype=torch.float64)


CONFIGS = {preset: correction_config(preset=preset) for preset in CORRECTION_PRESETS} | {
    "tis lopsided": correction_config(preset="token-tis", weight_bounds=[0.7, 1.1]),
    "seq zero": correction_config(preset="seq-tis", weight_bounds=[0.8, 3.0], weight_outside="zero"),
    "geo wide": correction_config(preset="geo-rs", reject_bounds=[0.9, 1.02], veto=0.2),
    "k3 wide": correction_config(preset="k3-rs-token-tis", reject_bounds=[0.0, 0.05]),
    "bypass token": correction_config(reject="token", reject_bounds=[0.8, 1.5]),
    "bypass sequence, veto": correction_config(reject="sequence", reject_bounds=[0.5, 3.0], veto=0.3),
    "veto alone": correction_config(veto=0.5),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("spread", [0.002, 0.3, 3.0, 60.0])  # the last one reaches the clamps
def test_correction_weights_and_masks_are_the_formula(name, spread):
    config = CONFIGS[name]
    drawn = draw(seed=len(name), spread=spread)
    batch, learner_R = pack_drawn(drawn)
    correction = compute_correction(config, batch, learner_R)
    wanted = [token for response in drawn for token in expected(config, response)]
    got = list(
        zip(
            correction.weights_R[batch.mask_R].tolist(), correction.kept_R[batch.mask_R].tolist(), strict=True
        )
    )
    assert [kept for _, kept in got] == [kept for _, kept in wanted]
    assert [weight for weight, _ in got] == pytest.approx([weight for weight, _ in wanted], rel=1e-12)
    assert not correction.kept_R[~batch.mask_R].any(), "an observation never enters the loss"


@pytest.mark.parametrize(
    "name", ["token-tis", "seq-tis", "icepop", "seq-mis", "geo wide", "k3 wide", "bypass token", "veto alone"]
)
def test_correction_inputs_reach_both_sides_of_every_bound(name):
    config = CONFIGS[name]
    tokens = [
        t for spread in (0.002, 0.3, 3.0, 60.0) for r in draw(len(name), spread) for t in expected(config, r)
    ]
    assert {kept for _, kept in tokens} == (
        {True, False} if config.reject != "none" or config.veto else {True}
    )
    if config.weight != "none":
        outside = {0.0} if config.weight_outside == "zero" else {config.weight_bounds[1]}
        weights = {weight for weight, _ in tokens}
        assert outside & weights and weights - outside


def one(delta: float, tokens: int = 1) -> tuple[MicroBatch, torch.Tensor]:
    return pack_drawn([Drawn([-1.0 + delta] * tokens, [-1.0] * tokens, [True] * tokens)])


@pytest.mark.parametrize("reject", ["token", "sequence", "geometric"])
@pytest.mark.parametrize(
    "ratio, kept", [(0.55, True), (0.45, False), (4.5, True), (5.5, False), (0.25, False), (1.9, True)]
)
def test_rejection_with_lopsided_bounds_is_by_the_ratio_itself(reject, ratio, kept):
    """verl compares -log rho with log lo and log hi, which keeps [1/hi, 1/lo]: [0.2, 2] for [0.5, 5]."""
    delta = math.log(ratio)
    batch, learner_R = one(delta)
    got = bool(
        compute_correction(
            correction_config(reject=reject, reject_bounds=[0.5, 5.0]), batch, learner_R
        ).kept_R[0]
    )
    inverted = math.log(0.5) <= -delta <= math.log(5.0)
    assert got == kept
    assert (inverted != kept) == (ratio in (0.45, 0.25, 4.5)), "these ratios tell the two readings apart"


@pytest.mark.parametrize("delta, token, sequence", [(30.0, 20, 20), (-30.0, -20, -20), (7.0, 7, 20)])
def test_log_ratio_clamps_are_at_twenty(delta, token, sequence):
    batch, learner_R = pack_drawn([Drawn([delta] * 4, [0.0] * 4, [True] * 4)])
    for weight, exponent in (("token", token), ("sequence", sequence)):
        config = correction_config(mode="decoupled", weight=weight, weight_bounds=[0.0, 1e300])
        assert compute_correction(config, batch, learner_R).weights_R.tolist() == pytest.approx(
            [math.exp(exponent)] * 4, rel=1e-12
        )


def test_sequence_ratio_clamps_the_sum_and_not_its_terms():
    """30 and -29 make a ratio of e, where clamping the terms first would give 1."""
    batch, learner_R = pack_drawn([Drawn([30.0, -29.0], [0.0, 0.0], [True, True])])
    weights_R = compute_correction(
        correction_config(preset="seq-tis", weight_bounds=[0, 10]), batch, learner_R
    ).weights_R
    assert weights_R.tolist() == pytest.approx([math.e] * 2)


def test_correction_weights_have_no_gradient():
    batch, learner_R = pack_drawn(draw(1, 0.3))
    current_R = learner_R.clone().requires_grad_()
    config = correction_config(preset="token-tis")
    correction = compute_correction(config, batch, current_R)
    seen = apply_correction(config, batch, correction, current_R, 1.0)
    assert not any(
        x.requires_grad
        for x in (correction.weights_R, correction.delta_R, seen.advantages_R, seen.old_logprobs_R)
    )


def test_decoupled_mode_takes_the_ratio_to_the_learner_and_bypass_to_the_rollout():
    batch, learner_R = pack_drawn(draw(1, 0.3))
    for mode, old_R in (("decoupled", learner_R), ("bypass", batch.rollout_logprobs_R)):
        config = correction_config(mode=mode)
        assert torch.equal(
            apply_correction(
                config, batch, compute_correction(config, batch, learner_R), learner_R, 1.0
            ).old_logprobs_R,
            old_R,
        )


# -- mismatch --------------------------------------------------------------------------------------


def expected_metrics(config: CorrectionConfig, drawn: list[Drawn]) -> dict[str, float]:
    deltas = [d for r in drawn for d in r.deltas]
    tokens = [t for r in drawn for t in expected(config, r)]
    mean = lambda values: sum(values) / len(values)  # noqa: E731
    effective = [
        kept * (bounded_exp(d) if config.weight == "none" else w)
        for d, (w, kept) in zip(deltas, tokens, strict=True)
    ]
    probabilities = [
        (math.exp(a), math.exp(b))
        for r in drawn
        for a, b, sampled in zip(r.learner, r.rollout, r.sampled, strict=True)
        if sampled
    ]
    raw = [bounded_exp(d if config.weight == "token" else sum(r.deltas)) for r in drawn for d in r.deltas]
    truncates = config.weight != "none" and config.weight_outside == "truncate"
    return {
        "mismatch/kl": mean([-d for d in deltas]),
        "mismatch/k3": mean([k3(d) for d in deltas]),
        "mismatch/chi2_token": mean([bounded_exp(d) ** 2 for d in deltas]) - 1,
        "mismatch/chi2_sequence": mean([bounded_exp(sum(r.deltas)) ** 2 for r in drawn]) - 1,
        "mismatch/perplexity_ratio": math.exp(max(-20.0, min(20.0, mean([-mean(r.deltas) for r in drawn])))),
        "mismatch/largest_probability_difference": max(abs(a - b) for a, b in probabilities),
        "correction/ess": 1 / mean([(w / mean(effective)) ** 2 for w in effective])
        if any(effective)
        else 0.0,
        "correction/weight_mean": mean([w for w, _ in tokens]),
        "correction/clipped": mean(
            [truncates and not config.weight_bounds[0] <= x <= config.weight_bounds[1] for x in raw]
        ),
        "correction/masked": mean([not kept or w == 0 for w, kept in tokens]),
        "correction/rejected_sequences": mean(
            [not any(kept for _, kept in expected(config, r)) for r in drawn]
        ),
    }


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("spread", [0.002, 0.3, 3.0, 60.0])
def test_correction_metrics_are_the_formulas_however_the_step_is_cut(name, spread):
    config = CONFIGS[name]
    drawn = draw(seed=7, spread=spread)
    parts: list[Mismatch] = []
    for piece in (drawn[:5], drawn[5:6], drawn[6:]):
        batch, learner_R = pack_drawn(piece)
        values = mismatch_values(
            batch, compute_correction(config, batch, learner_R), learner_R, config.weight != "none"
        )
        parts.append(Mismatch.of(values.tolist(), batch.versions))
    got = sum_mismatches(parts)
    assert got.metrics() == pytest.approx(expected_metrics(config, drawn), rel=1e-10, abs=1e-15)
    assert got.finite


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_mismatch_counts_logprobs_that_are_not_finite_except_in_observations(bad):
    config = correction_config(preset="icepop")
    for sampled in (True, False):
        batch, learner_R = pack_drawn([Drawn([-1.0, -1.0], [-1.0, bad], [True, sampled])])
        values = mismatch_values(batch, compute_correction(config, batch, learner_R), learner_R, True)
        assert Mismatch.of(values.tolist(), batch.versions).finite == (not sampled)


# -- recipes ---------------------------------------------------------------------------------------


def test_correction_presets_set_keys_and_explicit_keys_win():
    assert (
        CORRECTION_PRESETS["tis"] == CORRECTION_PRESETS["token-tis"]
        and CORRECTION_PRESETS["icepop"] == CORRECTION_PRESETS["token-mis"]
    )
    config = load_config(
        None,
        ["learning.correction.preset=geo-rs-token-tis", "learning.correction.reject_bounds=[0.99, 1.02]"],
    ).learning.correction
    assert (config.mode, config.weight, config.weight_bounds, config.reject) == (
        "decoupled",
        "token",
        (0.0, 2.0),
        "geometric",
    )
    assert config.reject_bounds == (0.99, 1.02)
    assert load_config(None).learning.correction == correction_config(
        mode="bypass", weight="none", reject="none"
    )


def test_correction_presets_bounds_apply_to_its_own_kind_only():
    """[0.999, 1.001] is a geometric mean's; single tokens would nearly all be rejected."""
    assert correction_config(preset="geo-rs", reject="token").reject_bounds == (0.5, 2.0)
    assert correction_config(preset="geo-rs", reject="token", reject_bounds=[0.2, 5.0]).reject_bounds == (
        0.2,
        5.0,
    )
    assert correction_config(preset="geo-rs", reject="geometric").reject_bounds == (0.999, 1.001)
    other = correction_config(preset="icepop", weight="sequence")
    assert (other.weight_bounds, other.weight_outside) == ((0.0, 2.0), "truncate")
    assert correction_config(preset="icepop", weight="none", veto=0.1).weight_bounds == (0.0, 2.0), (
        "what is switched off takes its bounds along"
    )


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["weight=token"], "weight = 'token' needs mode: decoupled"),
        (["preset=token-tis", "mode=bypass"], "weight = 'token' needs mode: decoupled"),
        (
            ["preset=icepop", "weight_bounds=[5, 0.5]"],
            r"weight_bounds = \[5.0, 0.5\] must be \[lowest, highest\]",
        ),
        (["preset=k3-rs", "reject_bounds=[0.001, 0.01]"], r"only an upper bound; write \[0, 0.01\]"),
        (["preset=geo-rs", "normalise=true"], "needs weights to normalise"),
        (["preset=icepopp"], "Did you mean 'icepop'"),
        (
            ["preset=tis", "weight=none"],
            "preset = 'tis' is undone by weight = 'none' beside it.*use preset: none",
        ),
    ],
)
def test_correction_keys_that_do_not_fit_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, [f"learning.correction.{override}" for override in overrides])
