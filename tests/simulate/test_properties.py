"""What must hold whatever the numbers: a higher rate is never slower, no token is lost, lags are kept."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.simulate.deployment import Deployment, Parallelism
from paceline.simulate.hardware import Hardware, load_hardware
from paceline.simulate.model_shape import load_model
from paceline.simulate.scenario import Scenario, simulate
from paceline.simulate.speculation import Acceptance, Speculation, eagle, history, make_drafter
from paceline.simulate.step_cost import StepCost
from paceline.simulate.workload import Lengths, Workload

# A model and how it is split, rows, draft tokens, context.
Point = tuple[tuple[str, Parallelism], int, int, int]
H200 = load_hardware("h200")
RATES = [
    ("gemm_bf16", "bandwidth"),
    ("gemm_bf16", "flops"),
    ("attention", "bandwidth"),
    ("attention", "flops"),
    ("attention", "prefill_flops"),
    ("other", "bandwidth"),
    ("other", "sampler_elements_per_second"),
    ("experts", "bandwidth"),
    ("experts", "flops"),
    ("links", "link_bandwidth"),
    ("links", "network_bandwidth"),
]
COSTS = [
    ("gemm_bf16", "launch_seconds"),
    ("attention", "launch_seconds"),
    ("other", "layer_seconds"),
    ("links", "link_seconds"),
]


def changed(part: str, field: str, factor: float) -> Hardware:
    if part == "links":
        return dataclasses.replace(
            H200, links=dataclasses.replace(H200.links, **{field: getattr(H200.links, field) * factor})
        )
    curve = getattr(H200.kernels, part)
    curve = dataclasses.replace(curve, **{field: getattr(curve, field) * factor})
    return dataclasses.replace(H200, kernels=dataclasses.replace(H200.kernels, **{part: curve}))


def step_seconds(hardware: Hardware, point: Point) -> float:
    (model, split), rows, k, context = point
    shape = load_model(model)
    return StepCost(Deployment(hardware, shape, parallelism=split), eagle(shape)).step(rows, k, context)


MODELS = [
    ("qwen3-8b", Parallelism(1, 1)),
    ("llama-3.3-70b", Parallelism(4, 1)),
    ("qwen3-30b-a3b", Parallelism(2, 8)),
]
points = st.tuples(st.sampled_from(MODELS), st.integers(1, 512), st.integers(0, 7), st.integers(0, 40000))


@settings(max_examples=60, deadline=None)
@given(points, st.sampled_from(RATES), st.sampled_from(COSTS), st.floats(1.0, 10.0))
def test_higher_rate_is_never_slower_and_higher_cost_never_faster(point, rate, cost, factor):
    here = step_seconds(H200, point)
    assert step_seconds(changed(*rate, factor), point) <= here * (1 + 1e-12)
    assert step_seconds(changed(*cost, factor), point) >= here * (1 - 1e-12)


@settings(max_examples=60, deadline=None)
@given(points, st.integers(1, 64), st.integers(0, 4), st.integers(0, 10000))
def test_step_cost_never_falls_with_more_work(point, more_rows, more_k, more_context):
    (where, rows, k, context), here = point, step_seconds(H200, point)
    assert step_seconds(H200, (where, rows + more_rows, k, context)) >= here
    assert step_seconds(H200, (where, rows, k + more_k, context)) >= here
    assert step_seconds(H200, (where, rows, k, context + more_context)) >= here


def scenario(**changes) -> Scenario:
    base = Scenario(
        H200,
        load_model("qwen3-8b"),
        gpus=4,
        workload=Workload(8, 4, 64, Lengths(200, 1.0, 4, 2000)),
        max_running=16,
        speculation=Speculation((0, 1, 3), Acceptance((0.7,))),
    )
    return dataclasses.replace(base, **changes)


@settings(max_examples=25, deadline=None)
@given(
    mode=st.sampled_from(["sync", "one-step-off", "partial", "oversample", "async"]),
    seed=st.integers(0, 1000),
    k=st.sampled_from([(0,), (3,), (0, 1, 2, 3)]),
    kv_tokens=st.sampled_from([0, 2600, 4000]),
    lag=st.integers(1, 4),
)
def test_pipeline_loses_no_tokens_and_keeps_the_lag(mode, seed, k, kv_tokens, lag):
    asked = scenario(
        mode=mode,
        seed=seed,
        speculation=Speculation(k, Acceptance((0.8, 0.6))),
        kv_tokens=kv_tokens,
        lag=None if mode in ("sync", "oversample") else lag,
    )
    outcome = simulate(asked)
    steps = asked.schedule.steps
    drawn = [asked.workload.draw(seed + i).sum() for i in range(steps + asked.schedule.lag)]
    assert outcome.generated_tokens == outcome.tokens
    if asked.schedule.take == "batch":
        assert outcome.tokens == sum(drawn[:steps])
    assert outcome.max_lag <= asked.schedule.lag
    assert 0 <= outcome.idle_share <= 1
    assert outcome.step_seconds > 0 and outcome.rollout_seconds > 0


@pytest.mark.parametrize("lag", [2, 3])
def test_pipeline_keeps_the_lag_when_short_responses_overtake_long_ones(lag):
    """Updates filled with short responses must not leave more long ones behind than later updates can
    take.
    """
    long_tail = Workload(16, 8, 64, Lengths(1000, 1.2, 4, 2000))
    asked = scenario(
        mode="async",
        lag=lag,
        gpus=24,
        train_share=0.75,
        workload=long_tail,
        steps=10,
        max_running=64,
        speculation=Speculation(),
    )
    assert simulate(asked).max_lag == lag


def test_modes_that_do_not_wait_for_the_tail_wait_less_and_over_sampling_takes_shorter_responses():
    """On the same devices; what over-sampling leaves out is the long end, and partial leaves out nothing."""
    shared = dict(steps=6, speculation=Speculation(), max_running=64)
    sync, partial, oversample = (
        simulate(scenario(**shared, mode=mode)) for mode in ("sync", "partial", "oversample")
    )
    assert partial.exposed_generation_seconds < sync.exposed_generation_seconds
    assert oversample.exposed_generation_seconds < sync.exposed_generation_seconds
    assert oversample.tokens < 0.9 * sync.tokens
    assert 0 < partial.mean_lag <= partial.max_lag <= 1


@pytest.mark.parametrize("mode", ["sync", "partial", "oversample"])
def test_learning_devices_are_not_idle(mode):
    """Where all devices generate and then learn, only the time of generation can be idle."""
    asked = scenario(mode=mode, steps=6, max_running=64)
    outcome = simulate(asked)
    assert outcome.stages.train > 0
    assert outcome.idle_device_seconds <= outcome.exposed_generation_seconds * asked.gpus
    assert outcome.idle_share < 0.5


def test_over_sampling_learns_from_no_more_than_a_step_takes():
    """Its rollout ends with the last response that it takes, and only those are learned from."""
    asked = scenario(mode="oversample", steps=6, speculation=Speculation(), max_running=64)
    outcome = simulate(asked)
    assert outcome.rollout_seconds == pytest.approx(outcome.exposed_generation_seconds)
    tokens = outcome.tokens / 6 + asked.workload.responses * asked.workload.prompt_tokens
    forward = 2 * asked.model.active_parameters * tokens / (4 * 989e12 * 0.4)
    assert outcome.stages.logprob == pytest.approx(forward, rel=0.02)


@pytest.mark.parametrize("mode", ["sync", "one-step-off", "partial", "async"])
def test_rollout_begins_with_the_first_request(mode):
    """Responses of equal length that all run at once: a rollout is as long as each of them."""
    lengths = Lengths(100, 0.0, 100, 100)
    asked = scenario(mode=mode, gpus=8, workload=Workload(1, 1, 64, lengths), speculation=Speculation())
    assert simulate(asked).rollout_seconds > 100 * 16e9 / 4.8e12


@pytest.mark.parametrize("mode", ["one-step-off", "async"])
def test_weights_are_sent_to_a_single_device_that_generates_beside_the_learner(mode):
    apart = simulate(scenario(mode=mode, gpus=2))
    assert apart.stages.sync == simulate(scenario(mode=mode, gpus=3)).stages.sync > 0
    assert simulate(scenario(mode=mode, gpus=1)).stages.sync == 0
    within, beyond = (simulate(scenario(mode=mode, gpus=n)).stages.sync for n in (8, 10))
    assert beyond > within, "eight of the ten generate, and two machines hold them all"


def test_drafter_takes_memory_from_the_cache():
    """Counted by hand for an 8B and a 4B draft model beside it, 16 bits each."""
    drafting = scenario(drafter=make_drafter("qwen3-4b", load_model("qwen3-8b")))
    free = 0.9 * 141e9 - 2 * 8.19e9 - 2 * 4.02e9
    per_token = 2 * 2 * 8 * 128 * (36 + 36)
    assert drafting.replica_kv_tokens == pytest.approx(free / per_token, rel=0.01)
    assert drafting.plain().replica_kv_tokens == drafting.deployment.kv_tokens
    head = scenario()
    assert 0.95 < head.replica_kv_tokens / head.deployment.kv_tokens < 0.98
    assert scenario(drafter=history()).replica_kv_tokens == head.deployment.kv_tokens
    split = scenario(parallelism=Parallelism(2), drafter=drafting.drafter)
    free = 0.9 * 141e9 - 8.19e9 - 2 * 4.02e9
    assert split.replica_kv_tokens == pytest.approx(free / (1.5 * per_token / 2), rel=0.01)
