"""Several ranks make the update of a single process: weights up to float noise, metrics the same."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
import torch

from paceline.config import ConfigError, LoraConfig
from paceline.learning.balance import cut
from paceline.learning.distributed.group import DecidedElsewhere, RankGroup
from paceline.learning.distributed.rank_learner import RankLearner, check_ranks
from paceline.learning.distributed.sharding import local, whole
from paceline.learning.learner import Learner
from paceline.learning.mismatch import Mismatch
from paceline.learning.sentinel import UnsafeRollouts
from paceline.policy import decoder, feed_forward
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.policy.lora import add_adapters
from paceline.types import Group, Sample, Score
from tests.learning import test_fused
from tests.learning.rank_processes import run_ranks
from tests.learning.samples import CONFIG, make_config, make_groups
from tests.learning.test_exact import roll_out

# Sums over ranks are added up in another order: units in the last place, times what AdamW makes of them.
FLOAT64_NOISE = 1e-10
# Of a step of 1e-3: where a gradient is nearly zero, its sign may be noise.
FLOAT32_NOISE = 2e-4
BFLOAT16_NOISE = 1e-2

MOE = test_fused.SHAPES["qwen3_moe"]
TIED = replace(CONFIG, tie_embeddings=True)
LORA = LoraConfig(rank=3, alpha=6, targets=["q_proj", "v_proj", "gate_proj", "down_proj"])


@dataclass(frozen=True)
class Case:
    """A recipe on a policy."""

    overrides: tuple[str, ...] = ()
    shape: DecoderConfig = CONFIG
    dtype: torch.dtype = torch.float64
    lora: LoraConfig | None = None
    kernels: bool = False  # the path of a GPU, on the kernels' references
    noise: float = FLOAT64_NOISE
    steps: int = field(default=2)

    def policy(self) -> Decoder:
        policy = Decoder(self.shape, self.dtype).initialise(0)
        if self.lora is not None:
            add_adapters(policy, self.lora, seed=7)
        return policy

    def groups(self, step: int) -> list[Group]:
        return make_groups(seed=2 * step) + make_groups(seed=2 * step + 1)

    def config(self):
        return make_config(
            "learning.lr=1e-3",
            "learning.micro_batch_tokens=64",
            "rollout.prompts_per_step=4",
            *self.overrides,
        )


CASES = {
    "dense": Case(),
    "clipped": Case(("learning.max_grad_norm=0.05", "learning.weight_decay=0.1")),
    "minibatches": Case(("learning.minibatches=4", "learning.correction.mode=decoupled")),
    "normalised": Case(("learning.correction.preset=seq-tis", "learning.correction.normalise=true"), steps=1),
    "reference": Case(("learning.kl_coef=0.1", "learning.loss_mean=sequence")),
    "reward KL": Case(("learning.algorithm=reinforce++", "learning.kl_coef=0.1")),
    "tied, recomputed": Case(("policy.activation_checkpointing=true",), shape=TIED),
    "experts": Case(shape=MOE),
    "adapters": Case(lora=LORA),
    "adapters and reference": Case(("learning.kl_coef=0.1",), lora=LORA),
    "adapters, recomputed": Case(("policy.activation_checkpointing=true",), shape=MOE, lora=test_fused.LORA),
    "kernels": Case(kernels=True),
    "kernels, experts, recomputed": Case(("policy.activation_checkpointing=true",), shape=MOE, kernels=True),
    "kernels, adapters": Case(("learning.kl_coef=0.1",), shape=MOE, lora=test_fused.LORA, kernels=True),
    "float32": Case(dtype=torch.float32, noise=FLOAT32_NOISE),
    "host": Case(("learning.optimiser_state=host",), dtype=torch.float32, noise=FLOAT32_NOISE),
    "bfloat16": Case(dtype=torch.bfloat16, noise=BFLOAT16_NOISE, steps=1),
    "bfloat16, adapters": Case(dtype=torch.bfloat16, lora=LORA, noise=BFLOAT16_NOISE, steps=1),
    "fp8": Case(("rollout.precision=fp8",), dtype=torch.float32, noise=FLOAT32_NOISE, steps=1),
    "exact": Case(("learning.numerics=exact", "learning.kl_coef=0.1")),
    "exact, adapters": Case(
        ("learning.numerics=exact", "learning.kl_coef=0.1", "policy.activation_checkpointing=true"),
        shape=MOE,
        lora=test_fused.LORA,
    ),
    "all responses": Case(("learning.skip_zero_advantages=false",)),
}


def take_kernels(wanted: bool) -> Callable[[torch.Tensor], bool]:
    return lambda x: wanted


@contextmanager
def path_of(case: Case) -> Iterator[None]:
    """Runs a case's path, with kernels or without, whatever the tensors are."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (decoder, feed_forward, test_fused.logprobs):
            patch.setattr(module, "takes_kernels", take_kernels(case.kernels))
        yield


def updated_on(group: RankGroup, cases: dict[str, Case]) -> dict[str, tuple[dict, dict]]:
    """Returns the weights and the metrics of every case's last step."""
    found = {}
    for name, case in cases.items():
        policy = case.policy()
        learner = RankLearner(policy, case.config(), group)
        held = sum(local(p).numel() for p in policy.parameters())
        share = 1.6 / group.count if group.count > 1 else 1.0
        assert held <= share * sum(p.numel() for p in policy.parameters()), "a rank holds its share"
        with path_of(case):
            metrics = [learner.update(case.groups(step)) for step in range(case.steps)]
        found[name] = ({key: whole(p) for key, p in policy.named_parameters()}, metrics)
    return found


def updated_alone(case: Case, ranks: int) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """The same on one process, with the micro-batches that so many ranks would have."""
    policy = case.policy()
    learner = Learner(policy, case.config())
    learner.cut = lambda sequences: [
        [part]
        for parts in cut(sequences, learner.token_budget, ranks, learner.cost)
        for part in parts
        if part
    ]
    with path_of(case):
        metrics = [learner.update(case.groups(step)) for step in range(case.steps)]
    return {key: p.detach() for key, p in policy.named_parameters()}, metrics


def compare(cases: dict[str, Case], ranks: int, folder) -> None:
    results = run_ranks(ranks, updated_on, folder, cases)
    for name, case in cases.items():
        weights, metrics = updated_alone(case, ranks)
        start = dict(case.policy().named_parameters())
        trained = [key for key in weights if start[key].requires_grad]
        assert any(not torch.equal(weights[key], start[key]) for key in trained), name
        for result in results:
            found, found_metrics = result[name]
            for key, expected in weights.items():
                torch.testing.assert_close(
                    found[key], expected, rtol=0, atol=case.noise, msg=lambda m, k=key: f"{name}: {k}: {m}"
                )
            # On the first step every forward pass sees the same bits.
            first, expected_first = found_metrics[0], metrics[0]
            assert first.keys() == expected_first.keys(), name
            updates = case.config().learning.minibatches
            for key, value in expected_first.items():
                if updates == 1 and key != "policy/gradient_norm":
                    assert first[key] == value, (name, key)
                else:
                    assert first[key] == pytest.approx(value, rel=1e3 * case.noise, abs=case.noise), (
                        name,
                        key,
                    )
            assert found_metrics == results[0][name][1], f"{name}: the same on every rank"


def exact_on(group: RankGroup, groups: list[Group]) -> dict[str, float]:
    policy = test_fused.make_policy("qwen3", None, torch.float32)
    config = make_config("learning.numerics=exact", "learning.micro_batch_tokens=128")
    return RankLearner(policy, config, group).update(groups)


@pytest.mark.slow
def test_exact_numerics_stay_exact_on_several_ranks(tmp_path):
    policy = test_fused.make_policy("qwen3", None, torch.float32)
    completions = [c for c in roll_out(policy, 16) if len(c.tokens) > 1]
    samples = tuple(Sample(c, Score(float(i % 3), correct=False)) for i, c in enumerate(completions))
    for metrics in run_ranks(2, exact_on, tmp_path, [Group("0", samples)]):
        assert metrics["mismatch/kl"] == 0.0 and metrics["policy/largest_logprob_delta"] == 0.0
        assert metrics["policy/gradient_norm"] > 0


def vetoed_on(group: RankGroup) -> tuple[str, bool, float]:
    """An update that the first rank vetoes, and the next one, which it lets pass."""
    case = CASES["dense"]
    policy = case.policy()
    learner = RankLearner(policy, case.config(), group)
    before = {name: local(p).clone() for name, p in policy.named_parameters()}
    asked: list[float] = []

    def veto(mismatch: Mismatch) -> None:
        asked.append(mismatch.tokens)
        raise UnsafeRollouts("too far apart")

    with pytest.raises((UnsafeRollouts, DecidedElsewhere), match="too far apart") as raised:
        learner.update(case.groups(0), veto)
    same = all(torch.equal(local(p), before[name]) for name, p in policy.named_parameters())
    assert bool(asked) == (group.rank == 0)
    norm = learner.update(case.groups(0))["policy/gradient_norm"]
    again = RankLearner(case.policy(), case.config(), group)
    assert again.update(case.groups(0))["policy/gradient_norm"] == norm
    repeated = zip(policy.parameters(), again.policy.parameters(), strict=True)
    assert all(torch.equal(local(a), local(b)) for a, b in repeated), "the same inputs, the same weights"
    return raised.typename, same, norm


@pytest.mark.slow
def test_vetoed_update_leaves_every_rank_as_it_was(tmp_path):
    norm = updated_alone(CASES["dense"], 2)[1][0]["policy/gradient_norm"]
    first, second = run_ranks(2, vetoed_on, tmp_path)
    assert first == ("UnsafeRollouts", True, pytest.approx(norm, rel=1e-9))
    assert second == ("DecidedElsewhere", True, pytest.approx(norm, rel=1e-9))


def test_check_ranks_refuses_what_several_ranks_cannot_do():
    with pytest.raises(ConfigError, match=r"learning.optimiser_state = 8bit.*2 learner ranks.*host"):
        check_ranks(make_config("learning.optimiser_state=8bit"), 2)
    check_ranks(make_config("learning.optimiser_state=8bit"), 1)


QUICK = ("clipped", "tied, recomputed", "kernels, adapters", "bfloat16")


def test_two_ranks_make_the_update_of_one(tmp_path):
    compare({name: CASES[name] for name in QUICK}, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_make_the_update_of_one_with_every_recipe(ranks, tmp_path):
    compare(CASES, ranks, tmp_path)
