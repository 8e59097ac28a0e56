"""The event simulation against a brute-force one that does every step of every row."""

import math
import random

import numpy as np
import pytest

from paceline.simulate import operators
from paceline.simulate.deployment import KERNELS_ALONE, Deployment, Parallelism
from paceline.simulate.hardware import load_hardware
from paceline.simulate.model_shape import load_model
from paceline.simulate.pipeline import Pipeline, Schedule, StageSeconds
from paceline.simulate.replica import LOOKAHEAD, Replica, SimulatedRequest
from paceline.simulate.speculation import Acceptance, DrafterShape, Speculation, eagle, make_drafter
from paceline.simulate.step_cost import StepCost


@pytest.fixture(scope="module")
def cost() -> StepCost:
    model = load_model("qwen3-8b")
    return StepCost(Deployment(load_hardware("h200"), model), eagle(model))


def brute_force(
    cost: StepCost, lengths, prompt: int, group: int, k: int, gain: float, max_running: int, kv_tokens: int
) -> tuple[float, int]:
    """(seconds, preemptions) of a rollout, one step at a time. Members of a group hold their prompt once."""
    table = cost.linear(max_running, k)
    waiting = [[n, 0.0, i // group] for i, n in enumerate(lengths)]  # length, done, group
    rows, clock, preemptions = [], 0.0, 0

    def used(rows) -> float:
        return sum(done for _, done, _ in rows) + prompt * len({g for _, _, g in rows})

    while waiting or rows:
        tokens = pairs = 0.0
        while waiting and len(rows) < max_running:
            _, done, mine = waiting[0]
            new = done if mine in {g for _, _, g in rows} else prompt + done
            if rows and used(rows) + new + LOOKAHEAD > kv_tokens:
                break
            rows.append(waiting.pop(0))
            tokens, pairs = tokens + new, pairs + pairs_of(prompt + done - new, prompt + done)
        clock += cost.prefill(tokens, pairs)
        while True:
            contexts = [prompt + done for _, done, _ in rows]
            clock += table.seconds(len(rows), sum(contexts), max(contexts))
            for row in rows:
                row[1] += gain
            alive = [row for row in rows if row[1] < row[0] - 1e-9]
            changed = len(alive) < len(rows)
            rows = alive
            while len(rows) > 1 and used(rows) + len(rows) > kv_tokens:
                waiting.insert(0, rows.pop())
                preemptions += 1
                changed = True
            if changed:
                break
    return clock, preemptions


def pairs_of(first: float, last: float) -> float:
    """(query, key) pairs of the queries from position `first` to `last`: their number times their mean
    position.
    """
    return (last - first) * (first + last) / 2


@pytest.mark.parametrize(
    "k, kv_tokens, max_running, group",
    [
        (0, 10**6, 8, 1),
        (3, 10**6, 64, 4),
        (0, 1200, 16, 1),
        (3, 1500, 16, 1),
        (0, 900, 16, 4),
        (3, 1100, 16, 8),
    ],
)
def test_replica_equals_a_simulation_of_every_step(cost, k, kv_tokens, max_running, group):
    rng = random.Random(k + kv_tokens)
    lengths = [rng.randrange(5, 400) for _ in range(24)]
    speculation = Speculation((k,), Acceptance((0.8, 0.7)))
    replica = Replica(cost, speculation, max_running, kv_tokens)
    pipeline = Pipeline([replica], [lengths], group, 64, StageSeconds(), Schedule())
    pipeline.run()
    seconds, preemptions = brute_force(
        cost, lengths, 64, group, k, speculation.accept_lengths[k], max_running, kv_tokens
    )
    assert replica.totals.preemptions == preemptions
    assert preemptions > 0 or kv_tokens > 2000
    assert math.isclose(replica.clock, seconds, rel_tol=1e-9)
    assert replica.totals.tokens == sum(lengths)


def test_paced_replica_is_at_least_as_fast_as_any_fixed_k(cost):
    lengths = [40 * 2**i for i in range(8)] * 4
    acceptance = Acceptance((0.7, 0.6, 0.5))

    def seconds(draft_tokens):
        replica = Replica(cost, Speculation(draft_tokens, acceptance), 64, 10**6)
        Pipeline([replica], [lengths], 4, 64, StageSeconds(), Schedule()).run()
        return replica.clock

    paced = seconds(tuple(range(6)))
    assert all(paced <= seconds((k,)) * 1.005 for k in range(6))
    assert paced < seconds((0,)) * 0.8


def test_members_of_a_group_share_their_prompt(cost):
    def prefilled(group):
        replica = Replica(cost, Speculation(), 64, 10**6)
        Pipeline([replica], [[50] * 16], group, 100, StageSeconds(), Schedule()).run()
        assert replica.kv_used == 0 and replica.shared_tokens == 0
        return replica.totals.prefill_tokens

    assert prefilled(1) == 1600 and prefilled(8) == 200


def test_draft_model_costs_its_own_steps(cost):
    """k passes of the smaller model beside one step of the target, its own cache read included."""
    small = make_drafter("qwen3-0.6b", cost.model)
    with_model = StepCost(cost.deployment, small)
    alone = StepCost(Deployment(cost.deployment.hardware, load_model("qwen3-0.6b"), KERNELS_ALONE), small)
    rows, context, k = 8, 2000, 3
    free = StepCost(cost.deployment, DrafterShape("none", fixed_seconds=0.0))
    drafting = with_model.step(rows, k, context) - free.step(rows, k, context)
    own = alone.step(rows, 0, context) - context * alone.linear(rows, 0).per_longest
    assert drafting == pytest.approx(k * own + small.fixed_seconds, rel=1e-9)


def test_recomputing_the_cache_is_work_and_not_idle_time(cost):
    """New weights: what the recomputation takes counts as busy, as the prompts' first computation does."""
    replica = Replica(cost, Speculation(), 4, 10**6)
    replica.waiting.extend(SimulatedRequest(i, 100, 50, i, 0) for i in range(3))
    replica.admit(version=0)
    before = replica.clock
    replica.pause(before + 1.0, recompute=True)
    again = replica.clock - (before + 1.0)
    assert again > 0 and math.isclose(replica.totals.busy_seconds, before + again)
    assert replica.totals.prefill_tokens == 600


def test_experts_of_several_attention_groups_exchange_instead_of_summing():
    """Per layer: a sum after attention, then two exchanges in place of the second sum."""
    model, hardware, tokens = load_model("qwen3-30b-a3b"), load_hardware("h200"), 64

    def collectives(split: Parallelism) -> float:
        cost = StepCost(Deployment(hardware, model, parallelism=split), eagle(model))
        return float(cost.breakdown(np.asarray(tokens * split.attention_groups), 0).collectives)

    message = tokens * model.hidden_size * 2.0
    one_sum = model.num_layers * operators.all_reduce(hardware.links, 2, message)
    exchange = model.num_expert_layers * operators.all_to_all(
        hardware.links, 8, message * model.num_experts_per_token / 2
    )
    assert collectives(Parallelism(2, 2)) == pytest.approx(2 * one_sum)
    assert model.num_expert_layers == model.num_layers and collectives(Parallelism(2, 8)) == pytest.approx(
        one_sum + 2 * exchange
    )


@pytest.mark.parametrize("tensor, expert", [(8, 1), (8, 2), (8, 4), (8, 8), (4, 8)])
def test_devices_read_the_expert_weights_that_they_hold(tensor, expert):
    """With 256 tokens every expert is chosen, and each device reads its eighth of them once."""
    model, hardware = load_model("qwen3-235b-a22b"), load_hardware("h200")
    split = Parallelism(tensor, expert)
    cost = StepCost(Deployment(hardware, model, parallelism=split), eagle(model))
    held = 94 * 128 * 3 * 4096 * 1536 * 2 / 8
    experts = float(cost.breakdown(np.asarray(256), 0).experts)
    assert 1.0 < experts * hardware.kernels.experts.bandwidth / held < 1.25


@pytest.mark.parametrize("tensor, expert", [(8, 3), (3, 8), (12, 8)])
def test_devices_that_would_hold_no_whole_share_are_refused(tensor, expert):
    with pytest.raises(ValueError, match="the larger a multiple of the smaller"):
        Deployment(
            load_hardware("h200"), load_model("qwen3-235b-a22b"), parallelism=Parallelism(tensor, expert)
        )
