"""Learning with adapters: only they change, the reference is the policy without them, runs resume."""

import pytest
import torch

from paceline.cli.export import export_policy
from paceline.config import Config, LoraConfig
from paceline.learning.checkpoint import TrainingState, damage, load_checkpoint, save_checkpoint
from paceline.learning.learner import Learner
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import exported_tensors, load_policy, save_policy
from paceline.policy.lora import add_adapters, load_adapters, merge_adapters
from tests.learning.samples import CONFIG, make_config, make_groups, make_policy, response_logprobs

LORA = LoraConfig(rank=3, alpha=6, targets=["q_proj", "v_proj", "gate_proj", "down_proj"])


def make_learner(config: Config, dtype: torch.dtype = torch.float64) -> Learner:
    policy = Decoder(CONFIG, dtype).initialise(0)
    add_adapters(policy, LORA, seed=7)
    return Learner(policy, config)


def weights(policy: Decoder) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in exported_tensors(policy)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_lora_update_changes_the_adapters_and_nothing_else(dtype):
    learner = make_learner(make_config("learning.lr=1e-2", "learning.epochs=3"), dtype)
    before = weights(learner.policy)
    base = weights(Decoder(CONFIG, dtype).initialise(0))
    assert all(torch.equal(before[name], base[name]) for name in base)
    factors = {
        name: parameter.clone()
        for name, parameter in learner.policy.named_parameters()
        if parameter.requires_grad
    }
    learner.update(make_groups())
    assert learner.optimiser.steps == 3 and {name for name, _ in learner.optimiser.named} == set(factors)
    parameters = dict(learner.policy.named_parameters())
    assert all(not torch.equal(factor, parameters[name]) for name, factor in factors.items())
    for name, tensor in weights(learner.policy).items():
        targeted = name.removesuffix(".weight").rsplit(".", 1)[-1] in LORA.targets
        assert torch.equal(tensor, before[name]) != targeted, name
    assert all(parameters[name].grad is None for name in parameters)
    optimiser_bytes = sum(tensor.nbytes for tensor in learner.optimiser.state().values())
    assert optimiser_bytes == sum(2 * factor.nbytes for factor in factors.values()), "two moments, no masters"


def test_lora_update_equals_one_of_the_unfused_adapters():
    """The merged forward pass gives the gradient of base + scale B A, by finite differences."""
    learner = make_learner(make_config("learning.lr=1e-2"))
    learner.update(make_groups())  # B is no longer zero
    metrics: list[float] = []
    name, factor = next(
        (n, p) for n, p in learner.policy.named_parameters() if n.endswith("adapters.v_proj.A")
    )
    gradient = torch.zeros(())

    def loss_only(scale: float = 1.0) -> float:
        nonlocal gradient
        gradient = dict(learner.optimiser.named)[name].grad[1, 2].clone()
        learner.optimiser.discard_gradients()
        return 0.0

    learner.optimiser.step = loss_only
    for shift in (1e-6, -2e-6, 1e-6):
        with torch.no_grad():
            factor[1, 2] += shift
        merge_adapters(learner.policy)
        metrics.append(learner.update(make_groups(seed=4))["policy/loss"])
    assert gradient.item() == pytest.approx((metrics[0] - metrics[1]) / 2e-6, rel=1e-5)


@pytest.mark.parametrize("algorithm", ["grpo", "reinforce++"])
def test_lora_reference_is_the_policy_without_adapters(algorithm):
    learner = make_learner(
        make_config("learning.lr=1e-2", f"learning.algorithm={algorithm}", "learning.kl_coef=0.1")
    )
    assert learner.reference is learner.policy, "no second copy"
    assert (
        learner.update(make_groups())["policy/reference_kl"] == pytest.approx(0, abs=1e-12)
        or algorithm == "reinforce++"
    )
    base = make_policy()
    groups = make_groups()
    kls = []
    for sample in (sample for group in groups for sample in group.samples):
        ours = response_logprobs(learner.policy, sample.completion).detach()
        if algorithm == "reinforce++":  # its KL is that of the policy that sampled
            ours = torch.tensor(sample.completion.logprobs, dtype=torch.float64)
        delta = response_logprobs(base, sample.completion).detach() - ours
        kls += (delta.exp() - delta - 1)[torch.tensor(sample.completion.loss_mask)].tolist()
    assert learner.update(groups)["policy/reference_kl"] == pytest.approx(sum(kls) / len(kls), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora_checkpoint_resumes_exactly_and_holds_the_merged_model(dtype, tmp_path):
    config = make_config("learning.lr=1e-2", "learning.kl_coef=0.1")
    learner = make_learner(config, dtype)
    for seed in range(3):
        learner.update(make_groups(seed))
    state = TrainingState(3, learner.optimiser.steps, 48, 0.5)
    path = save_checkpoint(
        tmp_path / "checkpoints", learner.policy, learner.optimiser, state, tokenizer_from=tmp_path, keep=2
    )
    assert damage(path) is None and {p.name for p in (path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }

    resumed = make_learner(config, dtype)
    assert load_checkpoint(path, resumed.policy, resumed.optimiser) == state
    for (name, a), (_, b) in zip(
        learner.policy.named_parameters(), resumed.policy.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name
    assert learner.update(make_groups(3)) == resumed.update(make_groups(3)), "the next update is the same one"
    assert all(
        torch.equal(a, b)
        for a, b in zip(learner.policy.parameters(), resumed.policy.parameters(), strict=True)
    )


def test_lora_export_writes_the_merged_model_and_the_adapters(tmp_path):
    learner = make_learner(make_config("learning.lr=1e-2"))
    learner.update(make_groups())
    state = TrainingState(1, 1, 16, 0.5)
    save_checkpoint(
        tmp_path / "run/checkpoints",
        learner.policy,
        learner.optimiser,
        state,
        tokenizer_from=tmp_path,
        keep=2,
    )
    export_policy(tmp_path / "run", tmp_path / "out", "float64")
    merged = load_policy(tmp_path / "out", torch.float64)
    assert all(
        torch.equal(a, b)
        for (_, a), (_, b) in zip(exported_tensors(learner.policy), exported_tensors(merged), strict=True)
    )

    again = Decoder(CONFIG, torch.float64).initialise(0)
    add_adapters(again, LORA.model_copy(update={"path": str(tmp_path / "out/adapter")}), seed=99)
    assert all(
        torch.equal(a, b)
        for (_, a), (_, b) in zip(exported_tensors(again), exported_tensors(merged), strict=True)
    )


def test_adapters_of_another_model_are_refused(tmp_path):
    learner = make_learner(make_config())
    save_checkpoint(
        tmp_path,
        learner.policy,
        learner.optimiser,
        TrainingState(1, 0, 0, 0.0),
        tokenizer_from=tmp_path,
        keep=1,
    )
    other = Decoder(
        DecoderConfig("qwen3", 31, 40, 48, 2, 4, 2, 8, 128, qk_norm=True), torch.float64
    ).initialise(0)
    add_adapters(other, LORA, seed=0)
    with pytest.raises(ValueError, match=r"has shape \(3, 32\), this policy needs \(3, 40\)"):
        load_adapters(other, tmp_path / "step_000001/adapter")
    save_policy(learner.policy, tmp_path / "plain")
    with pytest.raises(FileNotFoundError, match="not a PEFT folder"):
        load_adapters(learner.policy, tmp_path / "plain")


def test_activation_checkpointing_changes_nothing():
    updated = []
    for checkpointing in ("false", "true"):
        learner = make_learner(
            make_config(
                "learning.lr=1e-2", f"policy.activation_checkpointing={checkpointing}", "learning.kl_coef=0.1"
            )
        )
        learner.update(make_groups())
        learner.update(make_groups(1))
        updated.append(weights(learner.policy))
    assert all(torch.equal(tensor, updated[1][name]) for name, tensor in updated[0].items())
