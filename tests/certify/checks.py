"""Small certificates, each a few seconds on a policy of two small layers: what mutants are run against.

A key names what is run: nothing but every setting ("tokens"), or one scene besides, on the native engine with
shared noise; "rejection" and "fp8" the same there, "kernels" the kernels alone.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch

from paceline.certify.certificate import Certificate
from paceline.certify.fp8 import Fp8Subject
from paceline.certify.frequencies import FrequencyPlan
from paceline.certify.kernels_alone import kernel_checks
from paceline.certify.native import NativeSubject, ReferenceSubject, disturbed, widest
from paceline.certify.plan import Plan
from paceline.certify.run import certify
from paceline.certify.subject import Subject
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.history import HistoryDrafter
from paceline.engine.settings import EngineSettings
from paceline.models.source import policy_folder
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.policy.tokenizer import load_tokenizer
from paceline.types import SamplingParams

PROMPTS = [tuple(1 + (7 * i + 3 * j) % 47 for j in range(5 + 4 * i)) for i in range(9)]
TOKENS = 2


@cache
def small_policy(kind: str = "dense") -> Decoder:
    """Returns a policy with logits that say something, with the built-in policy's vocabulary."""
    experts = dict(
        family="qwen3_moe",
        qk_norm=True,
        num_experts=4,
        num_experts_per_token=2,
        expert_intermediate_size=40,
        normalise_expert_weights=True,
    )
    own = experts if kind == "experts" else dict(family="llama")
    # FP8 has a scale per 128 columns: two of them in the wide one.
    hidden, inner = (160, 144) if kind == "wide" else (32, 48)
    sizes = dict(vocab_size=48, hidden_size=hidden, intermediate_size=inner, num_layers=2, num_heads=4)
    config = DecoderConfig(**sizes, num_kv_heads=2, head_dim=16, max_positions=176, eos_token_ids=(0,), **own)
    policy = Decoder(config).initialise(0)
    generator = torch.Generator().manual_seed(1)
    for parameter in policy.parameters():
        if parameter.ndim > 1:
            scale = 1.4 * parameter.shape[-1] ** -0.5
            parameter.data = torch.randn(parameter.shape, generator=generator) * scale
    policy.head.weight.data.mul_(3)
    return policy


@cache
def tokenizer():
    return load_tokenizer(policy_folder("builtin"))


def native(
    verify: str = "shared-noise",
    drafter: str = "disturbed",
    kind: str = "dense",
    tokens: int = TOKENS,
    **settings,
) -> NativeSubject:
    policy = small_policy(kind)
    model = disturbed(policy, 0.15)
    makers = [lambda _: HistoryDrafter() if drafter == "history" else DraftModel(model)]
    settings = EngineSettings(verify=verify, **settings)
    return NativeSubject(policy, widest(policy), makers, tokens, settings, tokenizer=tokenizer())


def fp8() -> Fp8Subject:
    policy = small_policy("wide")
    model = disturbed(policy, 0.15)
    settings = EngineSettings(precision="fp8+kv")
    return Fp8Subject(policy, PROMPTS, [lambda _: DraftModel(model)], TOKENS, settings, tokenizer=tokenizer())


def small_plan(*names: str, samples: int = 4, frequencies: FrequencyPlan | None = None) -> Plan:
    return Plan(samples=samples, tokens=8, scenes=names, frequencies=frequencies)


def run(subject: Subject, plan: Plan) -> Certificate:
    return certify(subject, PROMPTS, plan, {})


def kernels() -> Certificate:
    checks = kernel_checks(24, torch.device("cpu"), 0)
    return Certificate.of("kernels", {}, checks, 0.0)


SMALL_FREQUENCIES = FrequencyPlan(samples=300, settings=(SamplingParams(1.0),))

CHECKS: dict[str, Callable[[], Certificate]] = {
    "kernels": kernels,
    "tokens": lambda: run(native(), small_plan(samples=5)),
    **{
        name: (lambda name=name: run(native(), small_plan(name, samples=2)))
        for name in (
            "preempted",
            "chunks",
            "continued",
            "weights",
            "endings",
            "limit",
            "asleep",
            "aborted",
            "long",
        )
    },
    "drawn": lambda: run(native(), replace(small_plan("drawn", samples=2), drawn=2)),
    "experts": lambda: run(native(kind="experts"), small_plan(samples=2)),
    "rejection": lambda: run(native("rejection"), small_plan(samples=5)),
    "rejection, history": lambda: run(native("rejection", "history"), small_plan(samples=4)),
    "trees": lambda: run(native(tokens=7, trees=True), small_plan(samples=3)),
    "fp8": lambda: run(fp8(), small_plan(samples=2)),
    "fp8, weights": lambda: run(fp8(), small_plan("weights", samples=2)),
    "reference": lambda: run(
        ReferenceSubject(small_policy(), widest(small_policy()), tokenizer()), small_plan()
    ),
    "reference, weights": lambda: run(
        ReferenceSubject(small_policy(), widest(small_policy()), tokenizer()),
        small_plan("weights", samples=2),
    ),
}
