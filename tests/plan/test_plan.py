"""The plan as a whole: the pool takes what remains, what cannot fit is refused with a way out that does fit,
`train` asks first.
"""

import dataclasses
import json
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from typer.testing import CliRunner

import paceline.session
from paceline.cli.main import app
from paceline.config import Config, ConfigError, load_config
from paceline.loop import train
from paceline.plan.machine import GPUS, Machine, gpu_of_size, named_gpu
from paceline.plan.plan import Plan, make_plan
from paceline.plan.suggestions import refusal, suggestions
from paceline.session import Session
from tests.loop_helpers import make_tiny_policy, tiny_config
from tests.plan.shapes import SMALL_SHAPES

SHAPE = dataclasses.replace(SMALL_SHAPES["qwen3"], vocab_size=4000, max_positions=4096)
BASE = [
    "rollout.max_running=8",
    "rollout.max_tokens=1024",
    "eval.max_tokens=1024",
    "task.max_prompt_tokens=1024",
    "rollout.prefill_tokens=512",
]


def plan_for(megabytes: float, *overrides: str, learns: bool = True) -> Plan:
    return make_plan(
        config_of(*overrides),
        SHAPE,
        torch.bfloat16,
        Machine("test", int(megabytes * 1e6), taken_bytes=0),
        learns,
    )


def config_of(*overrides: str) -> Config:
    return load_config(None, [*BASE, *overrides])


def megabytes_without_pool() -> float:
    plan = plan_for(10_000)
    return (plan.peak_bytes - plan.bytes_of("KV pool")) / 1e6 / 0.97


def test_plan_has_room_for_every_request_where_there_is_memory():
    plan = plan_for(10_000)
    assert plan.kv_tokens == 8 * 2048 and not plan.sleeps and not plan.problem
    assert (
        plan.bytes_of("KV pool")
        == (plan.kv_tokens + 16) * 2 * SHAPE.num_layers * 2 * SHAPE.num_kv_heads * SHAPE.head_dim
    )
    assert plan.learning_peak == plan.peak_bytes == plan.phase_bytes("always") + plan.phase_bytes("learning")


def test_kv_pool_takes_the_remaining_memory():
    """Less memory: a smaller pool beside learning; less still: it sleeps and has learning's memory; then
    nothing fits.
    """
    needed = megabytes_without_pool()
    wanted = plan_for(10_000).bytes_of("KV pool") / 1e6
    beside = plan_for(needed + 0.7 * wanted)
    assert not beside.problem and not beside.sleeps and 0.55 * 8 * 2048 < beside.kv_tokens < 8 * 2048
    assert (
        beside.usable_bytes - 40 * beside.bytes_of("KV pool") / beside.kv_tokens
        < beside.peak_bytes
        <= beside.usable_bytes
    )
    asleep = plan_for(needed + 0.2 * wanted)
    assert not asleep.problem and asleep.sleeps and asleep.kv_tokens > 0.3 * 8 * 2048
    assert max(asleep.learning_peak, asleep.rollout_peak) <= asleep.usable_bytes
    assert asleep.learning_peak + asleep.bytes_of("KV pool") > asleep.usable_bytes, (
        "or it need not have slept"
    )
    assert "learning needs" in plan_for(0.9 * needed).problem


def test_plan_of_generation_alone_has_no_learner():
    plan = plan_for(10_000, learns=False)
    assert {"masters", "gradients", "activations"}.isdisjoint(part.name for part in plan.parts)
    assert (
        plan.phase_bytes("learning") == 0
        and not plan.sleeps
        and plan.peak_bytes < plan_for(10_000).peak_bytes
    )


def test_kv_pool_that_was_asked_for_is_kept_or_refused():
    assert plan_for(10_000, "rollout.kv_tokens=5000").kv_tokens == 5000
    plan = plan_for(10_000, "rollout.kv_tokens=100000000")
    assert plan.problem.startswith("rollout.kv_tokens = 100000000: ") and "lower it" in plan.problem


def test_kv_pool_too_small_for_one_request_is_named_in_the_error():
    """Not the memory's, of which there is plenty."""
    plan = plan_for(10_000, "rollout.kv_tokens=2047")
    assert (
        plan.problem.startswith("rollout.kv_tokens = 2047: one request may need 2048 tokens")
        and "fit beside" not in plan.problem
    )
    config, machine = config_of("rollout.kv_tokens=2047"), Machine("test", int(1e10), taken_bytes=0)
    for learns in (True, False):
        fitting = suggestions(config, SHAPE, torch.bfloat16, machine, learns)
        assert fitting[0].changes == (
            ("rollout.kv_tokens", 0),
        ) and "what would fit: rollout.kv_tokens=0 " in str(refusal(plan, fitting))
    assert not plan_for(10_000, "rollout.kv_tokens=2048").problem


def test_suggestions_fit():
    needed = megabytes_without_pool()
    machine = Machine("test", int(0.95 * needed * 1e6), taken_bytes=0)
    config = config_of("policy.activation_checkpointing=false")
    plan = make_plan(config, SHAPE, torch.bfloat16, machine)
    fitting = suggestions(config, SHAPE, torch.bfloat16, machine)
    assert plan.problem and fitting and all(not suggestion.plan.problem for suggestion in fitting)
    assert fitting[0].changes == (("policy.activation_checkpointing", True),)
    message = str(refusal(plan, fitting))
    assert "largest part is" in message and "policy.activation_checkpointing=true" in message
    again = make_plan(config_of("policy.activation_checkpointing=true"), SHAPE, torch.bfloat16, machine)
    assert again.peak_bytes == fitting[0].plan.peak_bytes
    hopeless = Machine("test", 10_000_000, taken_bytes=0)
    assert "larger GPU" in str(
        refusal(
            make_plan(config, SHAPE, torch.bfloat16, hopeless),
            suggestions(config, SHAPE, torch.bfloat16, hopeless),
        )
    )


@pytest.mark.slow
def test_adapters_are_suggested_where_every_feed_forward_has_experts():
    """Experts have no adapters: the suggestion names the projections that can."""
    small = SMALL_SHAPES["qwen3_moe"]
    shape = dataclasses.replace(small, expert_intermediate_size=8192, dense_layers=(), max_positions=4096)
    changes = "policy.lora.rank=32 policy.lora.targets=[q_proj,k_proj,v_proj,o_proj]"
    adapted = config_of(*changes.split())
    room = make_plan(adapted, shape, torch.bfloat16, Machine("test", int(1e10), taken_bytes=0)).peak_bytes
    machine = Machine("test", int(1.05 * room), taken_bytes=0)
    plan = make_plan(config_of(), shape, torch.bfloat16, machine)
    fitting = suggestions(config_of(), shape, torch.bfloat16, machine)
    assert "largest part is" in plan.problem and changes in str(refusal(plan, fitting))
    assert not make_plan(adapted, shape, torch.bfloat16, machine).problem


@pytest.mark.parametrize("gigabytes", [0.0, -3.0, float("nan"), float("inf"), 1e300])
def test_gpu_size_that_does_not_exist_is_refused(gigabytes):
    with pytest.raises(ConfigError, match="--memory-gb .* must be above 0 and below"):
        gpu_of_size(gigabytes)


def test_machines_are_found_by_name_and_size():
    assert named_gpu("h200").total_bytes == pytest.approx(150e9, rel=0.01)
    assert gpu_of_size(24).total_bytes == 24e9
    with pytest.raises(ConfigError, match="H100"):
        named_gpu("GTX 970")
    assert all(name == named_gpu(name).name for name in GPUS)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"))


def test_plan_command_prints_the_plan(policy):
    fits = CliRunner().invoke(
        app, ["plan", f"policy.path={policy}", "--gpu", "H200", "--json"], catch_exceptions=False
    )
    tree = json.loads(fits.stdout)
    assert (
        tree["fits"]
        and tree["kv_tokens"] == 256 * 256
        and {part["name"] for part in tree["parts"]} > {"weights", "gradients", "KV pool"}
    )
    shown = CliRunner().invoke(
        app, ["plan", f"policy.path={policy}", "--memory-gb", "40"], catch_exceptions=False
    )
    assert "Adam moments" in shown.stdout and "40 GB" in shown.stdout
    refused = CliRunner().invoke(app, ["plan", f"policy.path={policy}", "--memory-gb", "0.5"])
    assert isinstance(refused.exception, ConfigError) and "what would fit" in str(refused.exception)
    none = CliRunner().invoke(app, ["plan", f"policy.path={policy}", "--memory-gb", "0"])
    assert isinstance(none.exception, ConfigError) and str(none.exception).startswith("--memory-gb 0 must be")
    twice = CliRunner().invoke(app, ["plan", "--gpu", "H200", "--memory-gb", "0"])
    assert "--gpu H200 and --memory-gb 0 say the same thing twice" in str(twice.exception)
    nothing = CliRunner().invoke(app, ["plan", "policy.path=no-such-shape", "--gpu", "H200"])
    assert "qwen3-8b" in str(nothing.exception)


def test_train_refuses_before_it_loads_anything(policy, tmp_path, monkeypatch):
    monkeypatch.setattr(paceline.session, "prepare_device", lambda config: torch.device("cuda"))
    monkeypatch.setattr(paceline.session, "gpu_at_hand", lambda: Machine("tiny GPU", int(3e8)))
    monkeypatch.setattr(
        paceline.session,
        "load_policy",
        lambda *_: pytest.fail("loaded a policy that cannot be trained here"),
    )
    with pytest.raises(ConfigError, match="tiny GPU are usable"):
        train(tiny_config(policy, tmp_path, "never", "run.device=cuda"))
    assert not list(tmp_path.iterdir())


class SleepyBackend:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def sleep(self) -> None:
        self.calls.append("sleep")

    def wake(self) -> None:
        self.calls.append("wake")

    def training(self) -> AbstractContextManager[None]:
        return nullcontext()


@pytest.mark.parametrize("sleeps", [True, False])
def test_kv_pool_sleeps_exactly_while_learning(sleeps):
    backend = SleepyBackend()
    plan = dataclasses.replace(plan_for(10_000), sleeps=sleeps)
    session = Session(config_of(), torch.device("cpu"), None, None, None, None, backend, None, plan)
    with pytest.raises(RuntimeError), session.learning():
        backend.calls.append("learn")
        raise RuntimeError("an update that fails leaves the pool awake")
    assert backend.calls == (["sleep", "learn", "wake"] if sleeps else ["learn"])


def test_kv_pool_is_asleep_for_the_next_learner():
    """One sleep for the policy's update and the drafter's; a rollout in between wakes it."""
    backend = SleepyBackend()
    plan = dataclasses.replace(plan_for(10_000), sleeps=True)
    session = Session(config_of(), torch.device("cpu"), None, None, None, None, backend, None, plan)
    for needs_memory in (True, False):
        with session.learning(stays=True):
            backend.calls.append("policy")
        with session.learning(needs_memory=needs_memory):
            backend.calls.append("drafter")
    assert backend.calls == ["sleep", "policy", "drafter", "wake"] * 2
    backend.calls.clear()
    with session.learning(stays=True):
        pass
    session.wake()
    session.wake()
    with session.learning(needs_memory=False):
        backend.calls.append("drafter")
    assert backend.calls == ["sleep", "wake", "drafter"]
    backend.calls.clear()
    with pytest.raises(RuntimeError), session.learning(stays=True):
        raise RuntimeError("an update that fails leaves the pool awake")
    assert backend.calls == ["sleep", "wake"]
