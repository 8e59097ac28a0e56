"""The FP8 certificate: its oracle agrees with a sound engine; wrong scales and biased rules are caught."""

import json
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from paceline.certify.certificate import Certificate, Check
from paceline.certify.distribution import expected_tokens
from paceline.certify.fp8 import Fp8Subject
from paceline.certify.fp8_policy import Fp8Policy, Fp8Recipe, in_blocks, in_groups, nearest_e4m3
from paceline.certify.frequencies import FrequencyPlan, check_frequencies
from paceline.certify.native import disturbed, widest
from paceline.certify.parity import check_logprobs
from paceline.certify.plan import Plan
from paceline.certify.power import Power
from paceline.certify.requests import SETTINGS
from paceline.certify.run import certify
from paceline.certify.subject import Opening
from paceline.certify.uncertainty import measure
from paceline.cli.main import app
from paceline.drafting.draft_model import DraftModel
from paceline.engine import sampling
from paceline.engine.settings import EngineSettings
from paceline.kernels import paged_attention
from paceline.kernels.fp8_format import BlockMatrix, QuantisedRows
from paceline.kernels.fp8_quantise import quantise_blocks_reference, quantise_rows_reference
from paceline.paged import forward
from paceline.paged.cache import KVCache
from paceline.policy.attention import PackedAttention
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.precision import kv_scales
from paceline.precision.weights import QuantisedWeights
from paceline.types import Completion, FinishReason, Request, SamplingParams

SHAPES = {
    "biases": dict(family="qwen2", qkv_bias=True, output_bias=True, mlp_bias=True),
    "qk_norm": dict(family="qwen3", qk_norm=True, tie_embeddings=True),
    "experts": dict(
        family="qwen3_moe",
        qk_norm=True,
        num_experts=4,
        num_experts_per_token=2,
        expert_intermediate_size=40,
        dense_layers=(1,),
        normalise_expert_weights=True,
    ),
}
_rng = random.Random(0)
PROMPTS = [tuple(_rng.randrange(1, 24) for _ in range(_rng.randint(3, 9))) for _ in range(16)]
SMALL = Plan(samples=2, tokens=8, scenes=(), frequencies=None)


def mixed_requests(prompts: list[tuple[int, ...]], count: int, max_tokens: int) -> list[Request]:
    """Returns requests of every setting and length."""
    return [
        Request(
            f"mixed/{i}",
            prompts[i % len(prompts)],
            1000 + i,
            replace(SETTINGS[i % len(SETTINGS)], max_tokens=1 + 7 * i % max_tokens, ignore_eos=True),
        )
        for i in range(count)
    ]


def make_policy(kind: str, dtype: torch.dtype = torch.float32, layers: int = 2) -> Decoder:
    """No size is a multiple of 128, and every number counts."""
    sizes = dict(
        vocab_size=24,
        hidden_size=160,
        intermediate_size=144,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=24,
        max_positions=128,
    )
    config = DecoderConfig(**sizes, eos_token_ids=(0,), **SHAPES[kind])
    policy = Decoder(config)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in policy.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = (
            noise * (0.1 if "layers" in name else 0.3)
            if parameter.ndim > 1
            else 0.2 * noise + (0 if name.endswith("bias") else 1)
        )
    if config.tie_embeddings:
        policy.head.weight = policy.embedding.weight
    return policy.to(dtype)


@pytest.fixture(scope="module")
def policies() -> dict[str, Decoder]:
    return {kind: make_policy(kind) for kind in SHAPES}


def make_subject(policy: Decoder, tokens: int = 2, precision: str = "fp8+kv", **settings) -> Fp8Subject:
    model = disturbed(policy, 0.2)
    return Fp8Subject(
        policy,
        PROMPTS,
        [lambda _: DraftModel(model)],
        tokens,
        EngineSettings(precision=precision, **settings),
    )


def failed(certificate: Certificate) -> list[str]:
    return [check.name for check in certificate.checks if check.promised and not check.passed]


def parity(subject: Fp8Subject) -> Check:
    done = subject.open(Opening()).run(mixed_requests(PROMPTS, 16, 24))
    return check_logprobs(subject, done, "{}")[0]


# -- the oracle ------------------------------------------------------------------------------------


def test_nearest_e4m3_is_torchs():
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[every.isfinite()].sort().values
    between = (every[1:] + every[:-1]) / 2
    x = torch.cat(
        (
            every,
            between,
            between.nextafter(every[1:]),
            between.nextafter(every[:-1]),
            torch.randn(10000) * torch.logspace(-4, 3, 10000),
        )
    )
    assert torch.equal(nearest_e4m3(x), x.clamp(-448, 448).to(torch.float8_e4m3fn).float())


def test_fp8_policy_scales_as_the_kernels_do():
    weight = torch.randn(3, 150, 200) * torch.logspace(-3, 3, 200)
    x = torch.randn(9, 200) * torch.logspace(-12, 3, 9).unsqueeze(1)
    matrix = BlockMatrix.poisoned(weight.shape, weight.device)
    quantise_blocks_reference(weight, matrix)
    assert torch.equal(in_blocks(weight).float(), matrix.dequantise()[..., :200])
    assert torch.equal(in_groups(x), quantise_rows_reference(x).dequantise()[:, :200])


def test_fp8_policy_without_fp8_is_the_decoder(policies):
    """Every layer in base precision, and K and V too; in float64 nothing is rounded."""
    for policy in policies.values():
        exact = widest(policy)
        oracle = Fp8Policy(exact, Fp8Recipe(base_layers=1))
        packed = PackedAttention([7, 9], policy.device)
        tokens_T = torch.arange(3, 19)
        with torch.no_grad():
            hidden_TE, expected_TE = (
                model(tokens_T, packed.positions_T, packed) for model in (oracle, exact)
            )
        torch.testing.assert_close(oracle.logits(hidden_TE), exact.logits(expected_TE), rtol=1e-9, atol=1e-9)


def test_perturbed_moves_equal_beginnings_alike_and_copies_differently(policies):
    oracle = Fp8Policy(policies["experts"], Fp8Recipe())
    packed = PackedAttention([9, 6], torch.device("cpu"))
    tokens_T = torch.tensor([*range(3, 12), *range(3, 9)])
    with torch.no_grad():
        still, one, other = (
            model(tokens_T, packed.positions_T, packed)
            for model in (oracle, oracle.perturbed(0), oracle.perturbed(1))
        )
    torch.testing.assert_close(one[:6], one[9:])
    assert not torch.equal(one, still) and not torch.equal(one, other)


@pytest.mark.parametrize(
    "kind, precision, dtype, settings",
    [
        pytest.param("biases", "fp8+kv", torch.float32, {}, marks=pytest.mark.slow),
        pytest.param("qk_norm", "fp8", torch.float32, {"base_precision_layers": 1}, marks=pytest.mark.slow),
        ("qk_norm", "fp8+kv", torch.bfloat16, {"kv_scales_per_head": True}),
        pytest.param(
            "experts", "fp8+kv", torch.bfloat16, {"base_precision_layers": 1}, marks=pytest.mark.slow
        ),
        pytest.param("experts", "fp8", torch.float32, {}, marks=pytest.mark.slow),
        pytest.param("biases", "kv", torch.float32, {"kv_scales_per_head": True}, marks=pytest.mark.slow),
        pytest.param("qk_norm", "kv", torch.bfloat16, {}, marks=pytest.mark.slow),
    ],
)
def test_fp8_policy_agrees_with_a_sound_engine(kind, precision, dtype, settings):
    subject = make_subject(make_policy(kind, dtype, 3), 0, precision, **settings)
    check = parity(subject)
    assert check.passed, check.detail
    assert all(own.passed for own in subject.own_checks()) and len(subject.own_checks()) == (
        precision != "fp8"
    )


@pytest.mark.slow
def test_fp8_policy_knows_layers_that_failed_validation(policies, monkeypatch):
    monkeypatch.setattr(kv_scales, "MAX_ERROR", 0.025)
    with pytest.warns(RuntimeWarning, match="stay in torch.float32"):
        subject = make_subject(policies["qk_norm"], 0)
    assert 0 < len(subject.recipe.kv_base_layers) < 2
    check = parity(subject)
    assert check.passed, check.detail
    subject.exact_policy.recipe = replace(subject.recipe, kv_base_layers=frozenset())
    subject.perturbed = [subject.exact_policy.perturbed(seed) for seed in range(8)]
    assert not parity(subject).passed, "an oracle that does not know it is found out"


def test_logprobs_that_are_no_numbers_are_caught(policies):
    subject = make_subject(policies["biases"], 0)
    done = subject.open(Opening()).run(mixed_requests(PROMPTS, 8, 12))
    done = [replace(completion, logprobs=(math.nan,) * len(completion.tokens)) for completion in done]
    assert not check_logprobs(subject, done, "{}")[0].passed


class Fixed:
    """A policy whose logits depend on the last token alone."""

    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, logits_VV: torch.Tensor) -> None:
        self.logits_VV = logits_VV
        self.config = SimpleNamespace(vocab_size=len(logits_VV))

    def moved(self, seed: int, by: float = 0.15) -> "Fixed":
        return Fixed(
            self.logits_VV
            + by * torch.randn(self.logits_VV.shape, generator=torch.Generator().manual_seed(seed))
        )

    def __call__(self, tokens_T, positions_T, attend, capture=None, replay=None):
        return tokens_T

    def logits(self, tokens_T):
        return self.logits_VV[tokens_T]

    def run(self, requests: list[Request]) -> list[Completion]:
        """One token each, drawn from these logits."""
        logprobs_NV = self.logits_VV[[request.prompt[-1] for request in requests]].log_softmax(-1)
        tokens_N1 = torch.multinomial(logprobs_NV.exp(), 1, generator=torch.Generator().manual_seed(0))
        drawn = zip(
            requests,
            tokens_N1.flatten().tolist(),
            logprobs_NV.gather(1, tokens_N1).flatten().tolist(),
            strict=True,
        )
        return [
            Completion(request, (token,), (logprob,), FinishReason.LENGTH, ())
            for request, token, logprob in drawn
        ]


def opened_for(backend: Fixed) -> SimpleNamespace:
    pauses = SimpleNamespace(pause=lambda: None)
    return SimpleNamespace(run=backend.run, step_starts={}, proposals={}, backend=pauses)


def test_backend_that_is_one_more_perturbed_copy_passes():
    exact = Fixed(torch.randn(6, 6, generator=torch.Generator().manual_seed(0)))
    backend = exact.moved(100)
    prompts = [(i, j) for i in range(6) for j in range(6)]
    sampling = SamplingParams(max_tokens=1)
    for perturbed in ([exact.moved(seed) for seed in range(8)], [exact]):  # the second shows no rounding
        subject = SimpleNamespace(policy=exact, exact_policy=exact, perturbed=perturbed, tokens=0)
        opened = opened_for(backend)
        requests = [Request(str(i), prompt, i, sampling) for i, prompt in enumerate(prompts)]
        (logprobs,) = check_logprobs(subject, backend.run(requests), "{}")
        ((frequencies,), _) = check_frequencies(subject, opened, prompts, 500, sampling, 0, 0.0)
        assert logprobs.passed == (len(perturbed) > 1), logprobs.detail
        assert (frequencies.p_value > 0.001) == (len(perturbed) > 1), frequencies.detail


@pytest.mark.parametrize(
    "sampling, expected",
    [
        (SamplingParams(1.0, max_tokens=1), [True, True, True]),
        # The second and the third change places.
        (SamplingParams(1.0, max_tokens=1, top_k=2), [True, False, False]),
        # 60% lies between; or the second and the third change places.
        (SamplingParams(1.0, max_tokens=1, top_p=0.6), [False, True, False]),
        (SamplingParams(0.0, max_tokens=1), [True, True, False]),
    ],
)
def test_certain_cut_holds_where_rounding_cannot_change_it(sampling, expected):
    policy = Fixed(torch.tensor([[0.598, 0.3, 0.102], [0.7, 0.16, 0.14], [0.34, 0.335, 0.325]]).log())
    requests = [Request(str(last), (last,), 0, sampling) for last in range(3)]
    assert expected_tokens(policy, policy.run(requests), sampling, 0.2).certain_N.tolist() == expected
    assert expected_tokens(policy, policy.run(requests), sampling, 1e-4).certain_N.all()


def test_rounding_of_logits_to_the_backends_type_makes_no_token_impossible():
    """A single copy explains little, so hardly a token that rounding kept may be left in the test."""
    exact = Fixed(torch.randn(400, 400, generator=torch.Generator().manual_seed(0)))
    sampling = SamplingParams(1.5, max_tokens=1, top_k=5)
    # Each context's last kept token.
    kept_by_backend_VV = exact.moved(1, 0.02).logits_VV.argsort(descending=True)[:, 4:5]
    completions = [
        Completion(Request(str(v), (v,), 0, sampling), (t,), (0.0,), FinishReason.LENGTH, ())
        for v, (t,) in enumerate(kept_by_backend_VV.tolist())
    ]

    def ruled_out(*copies: Fixed) -> int:
        tokens = expected_tokens(exact, completions, sampling, 0.01, copies)
        return int((tokens.observed_N[tokens.certain_N] >= 5).sum())

    assert ruled_out() > 0
    assert ruled_out(exact.moved(2, 0.02)) == 0
    assert (
        expected_tokens(exact, completions, sampling, 0.01, [exact.moved(2, 0.02)]).certain_N.float().mean()
        > 0.1
    )


def test_sampling_that_rounding_decides_is_not_certified():
    exact = Fixed(torch.zeros(6, 6))  # every token as likely as any other
    subject = SimpleNamespace(policy=exact, exact_policy=exact, perturbed=[], tokens=0)
    opened = opened_for(exact)
    for kind in (SamplingParams(0.0, max_tokens=1), SamplingParams(1.0, max_tokens=1, top_k=3)):
        ((check,), _) = check_frequencies(subject, opened, [(1, 2)], 20, kind, 0, 1e-4)
        assert not check.promised and check.passed is None and "decides all 20 tokens" in check.detail


def test_least_certain_contexts_are_unsure_and_unmoved_by_rounding():
    logits_VV = torch.tensor([[9.0, 0, 0], [1, 0, 0], [0, 0, 0]])
    # After token 2, where it is least sure.
    moved_VV = logits_VV + torch.tensor([0.0, 0.0, 0.5]) * torch.tensor([[0.0], [0], [1]])
    completion = Completion(
        Request("a", (0,), 0, SamplingParams()), (0, 2, 1), (0.0,) * 3, FinishReason.LENGTH, ()
    )
    subject = SimpleNamespace(policy=Fixed(logits_VV), exact_policy=Fixed(logits_VV), perturbed=[])
    assert measure(subject, [completion]).least_certain(1) == [(0, 0, 2)]
    subject.perturbed = [Fixed(logits_VV), Fixed(moved_VV)]
    moved = measure(subject, [completion])
    assert moved.least_certain(1) == [(0, 0, 2, 1)]
    assert moved.moved(0.5) == 0 and moved.moved(1.0) == pytest.approx(
        float(torch.tensor([0.0, 0.0, 0.5]).std())
    )
    assert 0 < moved.tolerance < 2 * moved.moved(1.0)


# -- the certificate -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, verify",
    [("qk_norm", "shared-noise"), pytest.param("experts", "rejection", marks=pytest.mark.slow)],
)
def test_sound_fp8_engine_passes(policies, kind, verify):
    plan = replace(SMALL, frequencies=FrequencyPlan(samples=100, settings=(SamplingParams(1.0),)))
    certificate = certify(make_subject(policies[kind], verify=verify), PROMPTS, plan, {})
    assert certificate.passed, certificate.table()
    names = [check.name for check in certificate.checks]
    place = "all settings: first of a step" if verify == "shared-noise" else "frequencies, T 1: first"
    assert {"KV scales", "what rounding moves", "logprobs of the FP8 policy", place} <= set(names)
    (distance,) = [check for check in certificate.checks if check.name == "distance to the learner"]
    assert not distance.promised, "told, not promised"


@pytest.mark.slow
def test_speculation_that_verifies_in_another_precision_is_caught(policies, monkeypatch):
    """Steps with several queries a row multiply by the policy's own weights: near, but not the FP8 policy."""
    sound = forward.PagedForward.decode

    def wide(self, tokens_RQ, *rest):
        quantised = self.quantised
        self.quantised = None if tokens_RQ.shape[1] > 1 else self.quantised
        try:
            return sound(self, tokens_RQ, *rest)
        finally:
            self.quantised = quantised

    monkeypatch.setattr(forward.PagedForward, "decode", wide)
    names = failed(certify(make_subject(policies["qk_norm"]), PROMPTS, SMALL, {}))
    assert "2 proposed" in names and "logprobs of the FP8 policy" not in names


def wrong_key_scale(monkeypatch):
    """Attention reads keys with a scale 5% larger than they were written with."""
    sound = forward.attend_reference
    monkeypatch.setattr(
        forward, "attend_reference", lambda *case: sound(*case[:-2], 1.05 * case[-2], case[-1])
    )


def wrong_cache_scale(monkeypatch):
    """One layer is written and read with another scale than calibration gave, so it only rounds otherwise."""
    sound = KVCache.scales
    monkeypatch.setattr(
        KVCache,
        "scales",
        lambda self, layer: [scale * (1.3 if layer == 1 else 1.0) for scale in sound(self, layer)],
    )


def wrong_weight_scale(monkeypatch):
    """One block of one matrix is 10% too large."""
    sound = QuantisedWeights.sync

    def sync(self):
        sound(self)
        matrix = self.matrices[4]
        matrix.scales.view(-1)[0] *= 1.1
        matrix.wide.copy_(matrix.dequantise())

    monkeypatch.setattr(QuantisedWeights, "sync", sync)


def wide_activations(monkeypatch):
    """What attention hands over is not quantised: closer to the learner, and not the FP8 policy."""

    class PlainRows(QuantisedRows):
        def dequantise(self):
            return torch.nn.functional.pad(self.values_MK, (0, -self.values_MK.shape[1] % 128))

    for module in (forward, paged_attention):  # after a prompt, after a decoding step
        monkeypatch.setattr(
            module, "quantise_rows", lambda x_MK: PlainRows(x_MK, None, len(x_MK), x_MK.dtype)
        )


@pytest.mark.parametrize("plant", [wrong_key_scale, pytest.param(wrong_weight_scale, marks=pytest.mark.slow)])
def test_wrong_scale_fails_the_certificate(policies, monkeypatch, plant):
    plant(monkeypatch)
    certificate = certify(make_subject(policies["qk_norm"], 0), PROMPTS, SMALL, {})
    assert "logprobs of the FP8 policy" in failed(certificate), certificate.table()


@pytest.mark.parametrize("plant", [wrong_cache_scale, wide_activations])
def test_logprobs_reveal_another_rounding(policies, monkeypatch, plant):
    plant(monkeypatch)
    check = parity(make_subject(policies["qk_norm"], 0))
    assert not check.passed, check.detail


def test_wrong_calibration_is_caught(policies, monkeypatch):
    monkeypatch.setattr(kv_scales, "MARGIN", 2.2)
    (check,) = make_subject(policies["qk_norm"], 0).own_checks()
    assert check.name == "KV scales" and not check.passed


@pytest.mark.slow
def test_tokens_that_truncation_forbids_are_caught(policies, monkeypatch):
    """More of them than rounding can explain."""
    sound = sampling.sample_truncated
    monkeypatch.setattr(sampling, "sample_truncated", lambda *case: sound(*case[:4], case[4] + 1, *case[5:]))
    plan = replace(SMALL, samples=24, settings=(SamplingParams(1.5, top_k=3),))
    certificate = certify(make_subject(policies["qk_norm"], 0), PROMPTS, plan, {})
    (check,) = [check for check in certificate.checks if check.name == "T 1.5, top-k 3"]
    assert not check.passed, certificate.table()
    assert "that rounding decides" in check.detail, "where it may, nothing is held against the engine"


# -- the command -----------------------------------------------------------------------------------


def test_certify_command_uses_the_recipes_precision(monkeypatch):
    """The recipe's precision, layers and scales reach every engine."""
    seen = []

    def record(parts, prompts, settings, **_):
        seen.append((parts, settings))
        power = (Power("any", "first", 1, 0.9),)
        return Certificate.of("", {}, [Check("any", True, "", power=power)], 0.0)

    monkeypatch.setattr("paceline.certify.run.certify_parts", record)
    recipe = [
        "rollout.precision=fp8+kv",
        "rollout.base_precision_layers=1",
        "rollout.kv_scales=head",
        "rollout.deterministic=true",
    ]
    result = CliRunner().invoke(
        app,
        ["certify", "builtin", *recipe, "--drafter", "eagle,history", "--pacing", "adaptive"],
        catch_exceptions=False,
    )
    assert result.exit_code == 0
    ((parts, settings),) = seen
    assert [part.title for part in parts] == [
        f"{verify}, eagle,history, fp8+kv" for verify in ("shared noise", "rejection")
    ]
    subject = parts[0].subject
    engine = subject.open(Opening(3, 4)).backend
    assert (
        engine.precision == "fp8+kv"
        and engine.settings.base_precision_layers == 1
        and engine.settings.deterministic
    )
    assert (
        torch.equal(engine.rollout_precision.kv.scales_L2H, subject.recipe.kv_scales_L2H)
        and len(subject.recipe.kv_scales_L2H[0, 0].unique()) == 2
    )
    assert subject.exact_policy.in_fp8 == [False, True, True, True, True, False]
    assert (
        set(engine.drafters) == {"eagle", "history"} and subject.adaptive and settings["rollout"] == "fp8+kv"
    )
    with pytest.raises(ValueError, match="needs --backend native"):
        CliRunner().invoke(
            app,
            ["certify", "builtin", "rollout.precision=fp8", "--backend", "reference"],
            catch_exceptions=False,
        )
    with pytest.raises(ValueError, match="fixed pacing takes one drafter"):
        CliRunner().invoke(app, ["certify", "--drafter", "eagle,history"], catch_exceptions=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy, drafter, verify, sampled",
    [
        ("builtin", "eagle", "shared-noise", "all settings: first of a step"),
        ("builtin-moe", "disturbed", "rejection", "frequencies, all settings: first"),
    ],
)
def test_builtin_policies_are_certified_in_fp8(tmp_path, policy, drafter, verify, sampled):
    arguments = [
        "certify",
        policy,
        "rollout.precision=fp8+kv",
        "--drafter",
        drafter,
        "--verify",
        verify,
        "--quick",
        "--json",
        str(tmp_path / "c.json"),
    ]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    names = {check["name"]: check for check in json.loads((tmp_path / "c.json").read_text())["checks"]}
    assert names["KV scales"]["passed"] and names[sampled]["passed"]
