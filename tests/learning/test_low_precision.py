"""Low-precision rollouts and the learner compute the same policy: bit for bit with exact numerics."""

from dataclasses import replace

import pytest
import torch

from paceline.cluster.learning_home import OwnProcess
from paceline.config import LoraConfig
from paceline.engine.engine import Engine, EngineSettings
from paceline.kernels.fp8_format import BlockMatrix, round_to_e4m3
from paceline.kernels.fp8_quantise import quantise_blocks_reference
from paceline.learning import learner as learner_module
from paceline.learning.batch import TrainingSequence, pack, training_sequence
from paceline.learning.checkpoint import Beside, TrainingState
from paceline.learning.exact import exact_logprobs
from paceline.learning.learner import Learner
from paceline.learning.logprobs import token_logprobs
from paceline.loop import train
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import load_policy, save_policy
from paceline.precision.weights import quantised_parameters
from paceline.report.console import Console
from paceline.tasks.running_sums import RunningSums
from paceline.types import Completion, Group, Precision, Sample, Score
from tests.learning.samples import make_config
from tests.learning.test_exact import make_requests, reported
from tests.learning.test_fused import MARKED_CASES, make_policy
from tests.length_reward import pay_for_length
from tests.loop_helpers import comparable_metrics, make_tiny_policy, tiny_config

LORA = LoraConfig(rank=4, alpha=8)


def make_engine(policy: Decoder, precision: str) -> Engine:
    settings = EngineSettings(max_running=5, kv_tokens=512, max_length=64, precision=Precision(precision))
    return Engine(policy, settings)


def roll_out(engine: Engine, seed: int = 0) -> list[Completion]:
    engine.submit(make_requests(16, seed))
    return list(engine.completions())


def sampled(completions: list[Completion]) -> dict[str, tuple]:
    return {completion.request.id: (completion.tokens, completion.logprobs) for completion in completions}


def groups_of(completions: list[Completion]) -> list[Group]:
    samples = [
        Sample(c, Score(float(i % 3), correct=False)) for i, c in enumerate(completions) if len(c.tokens) > 1
    ]
    return [
        Group(str(g), tuple(s for s in samples if s.completion.request.group == str(g))) for g in range(4)
    ]


def logprobs_over_cache(function, policy: Decoder, engine: Engine, completions: list[Completion]):
    batch = pack([training_sequence(c) for c in completions], policy.device)
    batch.attention.kv_scales = engine.kv_scales
    with torch.no_grad():
        return function(policy, batch)[0].double()


@pytest.mark.parametrize("precision", ["fp8", "kv", "fp8+kv"])
@pytest.mark.parametrize("family, lora", MARKED_CASES)
def test_exact_updates_have_no_mismatch(family, lora, precision):
    """In the first update and after it, with weights and scales that have moved."""
    policy = make_policy(family, lora, torch.float32)
    config = make_config(f"rollout.precision={precision}", "learning.numerics=exact", "learning.lr=1e-3")
    engine = make_engine(policy, precision)
    learner = Learner(policy, config)
    learner.observe_attention, learner.kv_scales = engine.attention_observer, engine.kv_scales
    for step in range(2):
        engine.update_weights(step)
        metrics = learner.update(groups_of(roll_out(engine, step)))
        assert metrics["mismatch/kl"] == 0.0 and metrics["mismatch/k3"] == 0.0, step
        assert metrics["policy/gradient_norm"] > 0


def test_a_scale_or_weight_that_is_off_shows():
    policy = make_policy("qwen3", None, torch.float32)
    policy.head.weight.data.mul_(40)  # so that a unit in the last place is not rounded away
    engine = make_engine(policy, "fp8+kv")
    Learner(policy, make_config("rollout.precision=fp8+kv"))  # which rounds the weights
    completions = roll_out(engine)
    expected = reported(completions)
    assert torch.equal(logprobs_over_cache(exact_logprobs, policy, engine, completions), expected)
    scales_L2H = engine.rollout_precision.kv.scales_L2H
    sound = scales_L2H[0, 1, 0].clone()
    scales_L2H[0, 1, 0] = torch.nextafter(sound, torch.tensor(torch.inf))
    assert not torch.equal(logprobs_over_cache(exact_logprobs, policy, engine, completions), expected)
    scales_L2H[0, 1, 0] = sound
    policy.layers[0].feed_forward.down.weight.data[3, 4] *= 1.125  # E4M3's next number, or the one behind
    assert not torch.equal(logprobs_over_cache(exact_logprobs, policy, engine, completions), expected)


def test_gradients_pass_the_rounding_of_keys_and_values():
    """Attention over the rounded numbers, with gradients as if they were the given ones."""
    sequence = TrainingSequence(tuple(range(9)), 4, (True,) * 5, (0.0,) * 5, 1.0, 1.0)
    attention = pack([sequence], torch.device("cpu")).attention
    q, k, v = (torch.randn(9, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    scales = torch.tensor([0.125, 0.25]), torch.tensor([0.5, 0.0625])
    attention.kv_scales = lambda layer: scales if layer == 1 else None
    out = attention.attend(q, *attention.as_cached(1, k, v))
    rounded = [round_to_e4m3(x.detach(), s).requires_grad_() for x, s in zip((k, v), scales, strict=True)]
    expected = attention.attend(q, *rounded)
    assert torch.equal(out, expected) and attention.as_cached(0, k, v) == (k, v)
    weights = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), weights)
    for one, other in zip(found, torch.autograd.grad(expected, (q, *rounded), weights), strict=True):
        assert torch.equal(one, other)


def test_scales_grow_with_values_that_the_cache_cuts_off():
    """The observer of an exact pass sees K and V as they are, beyond what the scales allow."""
    policy = make_policy("qwen3", None, torch.float32)
    engine = make_engine(policy, "kv")
    completions = roll_out(engine)
    before_L2H = engine.rollout_precision.kv.scales_L2H.clone()
    with torch.no_grad():
        for layer in policy.layers:
            layer.attention.qkv.weight.mul_(16)
    batch = pack([training_sequence(c) for c in completions], policy.device)
    batch.attention.kv_scales, batch.attention.observe = engine.kv_scales, engine.attention_observer
    exact_logprobs(policy, batch)
    engine.update_weights(1)
    assert (engine.rollout_precision.kv.scales_L2H[:, 1] >= 8 * before_L2H[:, 1]).all()


# -- weights on E4M3's grid ------------------------------------------------------------------------


def on_grid(policy: Decoder, base_layers: int = 0) -> list[bool]:
    found = []
    for _, parameter in quantised_parameters(policy, base_layers):
        again = parameter.detach().clone()
        quantise_blocks_reference(again, BlockMatrix.poisoned(again.shape, again.device), round_weight=True)
        found.append(torch.equal(again, parameter))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora", [None, LORA])
def test_weights_are_rounded_after_every_update(lora, dtype):
    policy = make_policy("qwen3", lora, dtype)
    assert not any(on_grid(policy))
    learner = Learner(
        policy, make_config("rollout.precision=fp8", "learning.lr=1e-2", "learning.minibatches=2")
    )
    for seed in range(2):
        before = policy.layers[0].attention.qkv.weight.detach().clone()
        learner.update(groups_of(roll_out(make_engine(policy, "fp8"), seed)))
        assert all(on_grid(policy))
        assert not torch.equal(policy.layers[0].attention.qkv.weight, before)


def test_layers_in_base_precision_are_not_rounded():
    policy = Decoder(DecoderConfig("llama", 50, 32, 48, 3, 4, 2, 8, 64)).initialise(0)
    Learner(policy, make_config("rollout.precision=fp8", "rollout.base_precision_layers=1"))
    rounded = on_grid(policy)
    assert [all(rounded[4 * i : 4 * i + 4]) for i in range(3)] == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_smaller_than_e4m3s_add_up(dtype):
    """A weight moves once its master has crossed half a step, so small updates are not lost."""
    policy = make_policy("qwen3", None, dtype)
    learner = Learner(policy, make_config("rollout.precision=fp8", "learning.lr=5e-5", "learning.beta1=0"))
    weight = policy.layers[1].feed_forward.down.weight
    start = weight.detach().clone()
    moved = []
    for _ in range(40):
        for parameter in policy.parameters():
            parameter.grad = torch.ones_like(parameter)
        learner.optimiser.step()
        learner.weights.round()
        moved.append(float((weight != start).float().mean()))
    assert 0 < moved[0] < 0.3, "most steps are too small to be seen at once"
    assert moved[-1] > 0.9
    change = (weight - start).double().mean()
    torch.testing.assert_close(change, torch.tensor(-2e-3, dtype=torch.float64), rtol=0.1, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_saved_is_what_was_learned_and_resumes(tmp_path, dtype):
    """A folder has the masters' weights, and a learner that is opened from a checkpoint continues alike."""
    config = make_config("rollout.precision=fp8", "learning.lr=1e-3")
    policy = make_policy("qwen3", None, dtype)
    save_policy(policy, tmp_path / "start")
    home = OwnProcess(Learner(policy, config), policy, tmp_path / "start")
    groups = groups_of(roll_out(make_engine(policy, "fp8")))
    home.learner.update(groups)
    home.save(tmp_path / "checkpoints", TrainingState(1, 1, 0), 2, Beside())
    rounded = {name: p.detach().clone() for name, p in policy.named_parameters()}
    folder = tmp_path / "checkpoints" / "step_000001"
    saved = load_policy(folder / "policy", dtype)
    assert not any(on_grid(saved)) and all(on_grid(policy))
    home.learner.update(groups)

    other = load_policy(folder / "policy", dtype)
    resumed = OwnProcess(Learner(other, config), other, tmp_path / "start")
    resumed.load(folder)
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, rounded[name]), name
    resumed.learner.update(groups)
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, policy.get_parameter(name)), name


def test_shared_weights_leave_the_mismatch_of_the_activations():
    """With rounded weights the fast learner is nearer to an FP8 rollout than with its own."""
    off = []
    for precision in ("base", "fp8"):
        policy = make_policy("qwen3", None, torch.float32)
        Learner(policy, make_config(f"rollout.precision={precision}"))  # which rounds in one of them
        engine = make_engine(policy, "fp8")
        completions = roll_out(engine)
        found = logprobs_over_cache(token_logprobs, policy, engine, completions)
        off.append(float((found - reported(completions)).square().mean()))
    assert off[1] < 0.8 * off[0]


def test_evaluation_in_base_precision_leaves_rollouts_as_they_were():
    """It samples what an engine in base precision does from the weights that are saved."""
    policy = make_policy("qwen3", None, torch.float32)
    saved = make_policy("qwen3", None, torch.float32)
    engine = make_engine(policy, "fp8+kv")
    learner = Learner(policy, make_config("rollout.precision=fp8+kv"))
    before, blocks = roll_out(engine), engine.cache.num_blocks
    with learner.weights.as_learned(), engine.in_base_precision():
        assert engine.precision is Precision.BASE
        in_base = roll_out(engine)
    assert sampled(in_base) == sampled(roll_out(make_engine(saved, "base"))) != sampled(before)
    assert engine.precision is Precision.FP8_KV and engine.cache.num_blocks == blocks
    assert sampled(roll_out(engine)) == sampled(before)


def test_a_run_evaluates_in_base_precision_where_asked(tmp_path, monkeypatch):
    """Before the first step its weights are those of a run in base precision, and so is what they sample."""
    monkeypatch.setattr(RunningSums, "score", pay_for_length)
    folder = make_tiny_policy(tmp_path / "policy")
    found = []
    for name, *overrides in (
        ("asked", "eval.precision=base"),
        ("base", "rollout.precision=base"),
        ("fp8",),
    ):
        config = sums_config(folder, tmp_path, name, "run.steps=1", *overrides)
        run = train(config, console=Console(quiet=True)).summary.run
        found.append(next(r for r in comparable_metrics(run) if r["kind"] == "eval"))
    assert found[0] == found[1] and found[0]["eval/base_precision"] == 1.0
    assert found[2]["eval/base_precision"] == 0.0


# -- the sentinel ----------------------------------------------------------------------------------


def sums_config(folder, tmp_path, name: str, *overrides: str):
    return tiny_config(
        folder,
        tmp_path,
        name,
        "rollout.precision=fp8",
        "rollout.speculation.drafters=[]",
        "eval.every=0",
        "eval.problems=2",
        "rollout.sentinel.capped_steps=0",
        "run.steps=5",
        *overrides,
    )


UNCORRECTED = ("learning.correction.preset=none",)


def shifted_rollouts(monkeypatch, spread: float) -> None:
    """What rollouts report is off by noise, as if they had been sampled in a precision of that error."""
    sound = learner_module.training_sequence

    def shifted(completion):
        sequence = sound(completion)
        generator = torch.Generator().manual_seed(len(sequence.tokens) + sum(sequence.tokens))
        noise = spread * torch.randn(len(sequence.rollout_logprobs), generator=generator)
        moved = tuple(x + float(n) for x, n in zip(sequence.rollout_logprobs, noise, strict=True))
        return replace(sequence, rollout_logprobs=moved)

    monkeypatch.setattr(learner_module, "training_sequence", shifted)


@pytest.mark.parametrize(
    "spread, overrides, spoken, fell_back",
    [
        (0.26, UNCORRECTED, True, False),
        (0.26, (*UNCORRECTED, "rollout.sentinel.on_lost_signal=fall_back"), True, True),
        (0.26, (), False, False),
        (0.26, (*UNCORRECTED, "rollout.sentinel.lost_signal=0"), False, False),
        (0.04, UNCORRECTED, False, False),
    ],
)
def test_sentinel_speaks_when_the_mismatch_takes_the_signal(
    tmp_path, monkeypatch, spread, overrides, spoken, fell_back
):
    monkeypatch.setattr(RunningSums, "score", pay_for_length)
    shifted_rollouts(monkeypatch, spread)
    console, warnings = Console(quiet=True), []
    console.warn = warnings.append
    folder = make_tiny_policy(tmp_path / "policy")
    run = train(sums_config(folder, tmp_path, "run", *overrides), console=console).summary.run
    steps = [r for r in comparable_metrics(run) if r["kind"] == "train"]
    lost = [r["policy/lost_signal"] for r in steps]
    assert (min(lost) > 0.1) == (spread > 0.1 and UNCORRECTED[0] in overrides)
    said = [warning for warning in warnings if "SENTINEL" in warning]
    assert len(said) == int(spoken)
    assert not spoken or ("step 3" in said[0] and "rollout.sentinel.lost_signal = 0.1" in said[0])
    assert not spoken or fell_back or "learning.correction.preset=token-tis" in said[0]
    assert [r["rollout/fell_back"] for r in steps] == ([0.0, 0.0, 1.0, 1.0, 1.0] if fell_back else [0.0] * 5)


def test_fallback_ends_the_rounding(tmp_path):
    policy = make_policy("qwen3", None, torch.float32)
    home = OwnProcess(Learner(policy, make_config("rollout.precision=fp8")), policy, tmp_path)
    home.stop_rounding()
    for name, parameter in make_policy("qwen3", None, torch.float32).named_parameters():
        assert torch.equal(policy.get_parameter(name), parameter), name
    home.learner.update(groups_of(roll_out(make_engine(policy, "base"))))
    assert not any(on_grid(policy))
