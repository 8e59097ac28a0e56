"""What all algorithms share: logprobs, minibatches, gradients that are not finite, memory that runs out."""

import math

import pytest
import torch

from paceline.learning.batch import micro_batches, split_by_tokens, training_sequence
from paceline.learning.learner import Learner
from paceline.learning.logprobs import token_logprobs
from paceline.policy.decoder import Capture
from tests.learning.samples import make_config, make_groups, make_policy


def test_token_logprobs_and_entropy_do_not_depend_on_chunks(monkeypatch):
    policy = make_policy()
    sequences = [training_sequence(sample.completion) for group in make_groups() for sample in group.samples]
    batch = micro_batches(sequences, 4096, torch.device("cpu"))[0]
    whole = token_logprobs(policy, batch)
    monkeypatch.setattr("paceline.learning.logprobs.CHUNK_ELEMENTS", 31 * 5)
    chunked = token_logprobs(policy, batch)
    torch.testing.assert_close(whole, chunked)
    hidden = policy(batch.tokens_T, batch.attention.positions_T, batch.attention)[batch.predictors_R]
    distribution = torch.distributions.Categorical(logits=policy.logits(hidden) / 0.7)
    torch.testing.assert_close(whole[1], distribution.entropy(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(whole[0], distribution.log_prob(batch.targets_R), rtol=1e-9, atol=1e-12)


def test_nan_gradient_leaves_weights_and_moments_alone():
    policy = make_policy()
    groups = make_groups()
    learner = Learner(policy, make_config())
    learner.update(groups)
    before = [p.clone() for p in policy.parameters()]
    before += [state.second.clone() for state in learner.optimiser.states]
    poisoned = groups[0].samples[0]
    object.__setattr__(poisoned.completion, "logprobs", (math.nan,) * len(poisoned.completion.tokens))
    metrics = learner.update(groups)
    assert metrics["policy/skipped"] == 1.0 and math.isnan(metrics["policy/gradient_norm"])
    after = [*policy.parameters(), *(state.second for state in learner.optimiser.states)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_minibatches_take_one_optimiser_step_each():
    learner = Learner(make_policy(), make_config("learning.minibatches=2", "learning.epochs=3"))
    learner.update(make_groups())
    assert learner.optimiser.steps == 6


# The samples fill the micro-batches only if those without an advantage pass, too.
EVERYONE = "learning.skip_zero_advantages=false"


def fail_above(monkeypatch, token_limit: int) -> list[int]:
    """Micro-batches of more tokens than the limit run out of memory; returns the sizes that were tried."""
    tried: list[int] = []
    real = Learner._backward

    def backward(self, batch, *totals):
        tried.append(len(batch.tokens_T))
        sums = real(self, batch, *totals)  # gradients have been accumulated by the time it fails
        if len(batch.tokens_T) > token_limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB")
        return sums

    monkeypatch.setattr(Learner, "_backward", backward)
    return tried


@pytest.mark.parametrize("algorithm", ["grpo", "reinforce++"])
@pytest.mark.parametrize("limit, smaller", [(64, 64), (20, 16)])
def test_out_of_memory_ends_where_the_smaller_budget_would_have(monkeypatch, algorithm, limit, smaller):
    groups = make_groups()
    overrides = [f"learning.algorithm={algorithm}", "learning.epochs=2", "learning.lr=1e-2", EVERYONE]
    calm = Learner(make_policy(), make_config(*overrides))
    calm.token_budget = smaller
    calm_metrics = calm.update(groups)

    warnings: list[str] = []
    learner = Learner(
        make_policy(), make_config(*overrides, "learning.micro_batch_tokens=128"), warnings.append
    )
    tried = fail_above(monkeypatch, limit)
    metrics = learner.update(groups)

    assert learner.token_budget == smaller == metrics["memory/micro_batch_tokens"]
    halvings = int(math.log2(128 // smaller))
    assert metrics["memory/micro_batch_halvings"] == halvings == len(warnings)
    assert (
        "micro-batches of 128 tokens become 64" in warnings[0]
        and "learning.micro_batch_tokens=64" in warnings[0]
    )
    assert max(tried) > limit >= tried[-1]
    for a, b in zip(calm.policy.parameters(), learner.policy.parameters(), strict=True):
        if algorithm == "grpo":
            assert torch.equal(a, b)
        # reinforce++ has asked the reference before anything failed, in larger micro-batches: equal up to
        # rounding
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    for name, value in calm_metrics.items():
        if name.startswith("policy/"):
            assert metrics[name] == pytest.approx(value, rel=1e-12), name


def test_states_for_a_head_are_given_up_before_micro_batches_are_halved(monkeypatch):
    """An update in halves is not the same to the last bit: a head that learns is not to change it."""
    calm = Learner(make_policy(), make_config(EVERYONE))
    calm.update(make_groups())
    warnings: list[str] = []
    learner = Learner(make_policy(), make_config(EVERYONE), warnings.append)
    learner.capture_states = lambda sequences: Capture((0,))
    tried: list[bool] = []
    real = Learner._backward

    def backward(self, batch, *totals):
        tried.append(batch.capture is not None)
        sums = real(self, batch, *totals)
        if batch.capture is not None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB")
        return sums

    monkeypatch.setattr(Learner, "_backward", backward)
    for step in range(2):
        metrics = learner.update(make_groups())
        assert metrics["memory/micro_batch_halvings"] == 0
        if step == 0:
            for a, b in zip(calm.policy.parameters(), learner.policy.parameters(), strict=True):
                assert torch.equal(a, b)
    assert tried[0] and not any(tried[1:]), "once"
    assert len(warnings) == 1 and "takes no states" in warnings[0]


def test_smaller_budget_is_kept_in_later_steps(monkeypatch):
    warnings: list[str] = []
    config = make_config("learning.micro_batch_tokens=128", EVERYONE)
    learner = Learner(make_policy(), config, warnings.append)
    fail_above(monkeypatch, 64)
    learner.update(make_groups())
    assert learner.update(make_groups(seed=1))["memory/micro_batch_halvings"] == 0 and len(warnings) == 1


def test_out_of_memory_with_one_response_names_the_remedy(monkeypatch):
    learner = Learner(make_policy(), make_config())
    before = [p.clone() for p in learner.policy.parameters()]
    fail_above(monkeypatch, 0)
    with pytest.raises(
        torch.OutOfMemoryError,
        match=r"single response.*rollout.max_tokens.*activation_checkpointing.*Tried to allocate",
    ):
        learner.update(make_groups())
    assert all(torch.equal(a, b) for a, b in zip(before, learner.policy.parameters(), strict=True))
    assert all(p.grad is None for p in learner.policy.parameters()), "nothing half-done is left behind"


def test_split_by_tokens_keeps_every_sequence_once():
    sequences = [training_sequence(sample.completion) for group in make_groups() for sample in group.samples]
    for budget in (1, 16, 30, 1000):
        parts = split_by_tokens(sequences, budget)
        assert sorted(map(id, sequences)) == sorted(id(s) for part in parts for s in part)
        assert all(len(part) == 1 or sum(len(s.tokens) for s in part) <= budget for part in parts)
