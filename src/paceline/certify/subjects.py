"""Makes the subject of a certificate from the command's options: a backend, drafters and how they verify.

Errors are for the command line, and name its options.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from paceline.certify.fp8 import Fp8Subject
from paceline.certify.frequencies import FrequencyPlan
from paceline.certify.native import NativeSubject, ReferenceSubject, drafter_maker, widest
from paceline.certify.plan import FURTHER, QUICK, QUICK_LEAVES_OUT, Plan
from paceline.certify.run import Part
from paceline.certify.subject import Subject
from paceline.config import Config, RolloutConfig, load_config
from paceline.drafting.factory import drafter_names
from paceline.drafting.recipe import drafter_overrides
from paceline.engine.sampling import Verify
from paceline.engine.settings import EngineSettings
from paceline.policy.decoder import Decoder
from paceline.types import Precision

# `--verify` of a certificate that covers both ways.
BOTH = "both"

# Keys of the recipe that the command's own arguments set, and what to do instead.
OWN_ARGUMENTS = {"policy.path": "name the policy as the first argument", "policy.dtype": "say --precision"}


@dataclass(frozen=True)
class SubjectOptions:
    """The options of `paceline certify` that select what is certified."""

    policy: str
    backend: str  # native or reference
    drafter: str  # names with commas between
    tokens: int  # proposed per step, at most if pacing is adaptive
    pacing: str  # fixed or adaptive
    verify: str  # shared-noise, rejection or both
    dtype: str  # of the policy; empty: the device's own
    deterministic: bool

    def __post_init__(self) -> None:
        if self.backend not in ("native", "reference"):
            raise ValueError(f"--backend {self.backend!r}: must be native, reference or vllm")
        if self.verify not in (BOTH, Verify.SHARED_NOISE, Verify.REJECTION):
            choices = f"{BOTH}, {Verify.SHARED_NOISE} or {Verify.REJECTION}"
            raise ValueError(f"--verify {self.verify!r}: must be {choices}")
        if self.pacing not in ("fixed", "adaptive"):
            raise ValueError(f"--pacing {self.pacing!r}: must be fixed or adaptive")
        if len(self.drafters) > 1 and self.pacing == "fixed":
            raise ValueError(
                f"--drafter {self.drafter!r}: fixed pacing takes one drafter; "
                "add --pacing adaptive for several"
            )

    @property
    def drafters(self) -> list[str]:
        return self.drafter.split(",")

    @property
    def verifies(self) -> list[Verify]:
        return [Verify.SHARED_NOISE, Verify.REJECTION] if self.verify == BOTH else [Verify(self.verify)]


def certified_config(options: SubjectOptions, recipe: str, overrides: Sequence[str]) -> Config:
    """Reads the recipe; raises where it sets what the options set, or what the backend cannot do."""
    native = options.backend == "native"
    chosen = drafter_overrides(list(overrides), options.drafters if native else [])
    for override in chosen:
        instead = OWN_ARGUMENTS.get(override.partition("=")[0])
        if instead is not None:
            raise ValueError(
                f"{override}: the command's own arguments say which policy is certified, and in which type; "
                f"{instead}"
            )
    own = [f"policy.path={options.policy}", f"policy.dtype={options.dtype or 'auto'}"]
    config = load_config(recipe, [*chosen, *own])
    if not native and config.rollout.precision is not Precision.BASE:
        raise ValueError(
            f"rollout.precision = {config.rollout.precision.value!r} needs --backend native; "
            "the reference computes in the policy's own type only"
        )
    return config


@dataclass(frozen=True)
class Effort:
    """The options of `paceline certify` that set how much is done."""

    quick: bool = False
    full: bool = False
    samples: int = 0  # completions per setting; 0: the plan's own number
    minutes: float = 0.0  # to spend on more samples; 0: none
    seed: int = 0

    def __post_init__(self) -> None:
        if self.quick and (self.full or self.minutes):
            raise ValueError("--quick: leave out --full and --budget, which ask for more")

    @property
    def plan(self) -> Plan:
        """How much is done with the first subject."""
        plan = replace(QUICK if self.quick else Plan(), seed=self.seed, seconds=60 * self.minutes)
        return replace(plan, samples=self.samples) if self.samples else plan

    @property
    def further_plan(self) -> Plan:
        """How much is done with each further subject, which shares most of its code with the first."""
        plan = QUICK if self.quick else FURTHER
        return replace(plan, seed=self.seed, samples=self.samples or plan.samples)


def make_parts(
    options: SubjectOptions,
    rollout: RolloutConfig,
    policy: Decoder,
    prompts: Sequence[tuple[int, ...]],
    tokenizer: Tokenizer,
    effort: Effort,
) -> list[Part]:
    """Returns what is certified, the default first: both ways to verify; in full every drafter and FP8."""
    if options.backend == "reference":
        return [Part("", ReferenceSubject(policy, widest(policy), tokenizer), effort.plan)]
    verifies = _verifies(options, rollout)
    kinds = [(verify, options.drafter, rollout.precision) for verify in verifies]
    if effort.full:
        others = [name for name in _fitting_drafters(rollout, policy) if name not in options.drafters]
        kinds += [(verify, name, rollout.precision) for name in others for verify in verifies]
        if rollout.precision is Precision.BASE:
            lower = (Precision.FP8, Precision.FP8_KV, Precision.KV)
            kinds += [(Verify.SHARED_NOISE, options.drafter, precision) for precision in lower]
    parts = []
    for verify, drafter, precision in kinds:
        title = f"{verify.replace('-', ' ')}, {drafter}"
        title += "" if precision is Precision.BASE else f", {precision}"
        how = replace(options, verify=verify, drafter=drafter)
        computed = rollout.model_copy(update={"precision": precision})
        subject = make_subject(how, computed, policy, prompts, tokenizer)
        plan = effort.further_plan if parts else effort.plan
        if effort.full and subject.rejects:
            plan = replace(plan, frequencies=FrequencyPlan(drawn=3))
        parts.append(Part(title, subject, plan))
    return parts


def leaves_out(options: SubjectOptions, rollout: RolloutConfig, policy: Decoder, effort: Effort) -> str:
    """Returns what is no part of the certificate that the options ask for; empty: nothing."""
    if options.backend == "reference":
        return QUICK_LEAVES_OUT if effort.quick else ""
    out = [QUICK_LEAVES_OUT] if effort.quick else []
    out += [] if effort.full else ["other drafters and FP8, which --full adds"]
    if effort.full and rollout.precision is Precision.BASE:
        out.append("FP8 verified by rejection")
    if effort.full:
        missing = {"history", "eagle", "draft_model"} - {
            *_fitting_drafters(rollout, policy),
            *options.drafters,
        }
        out += [f"{name}, of which there is none for this policy" for name in sorted(missing)]
    out += [f"verification by {verify}" for verify in Verify if verify not in _verifies(options, rollout)]
    return "; ".join(out)


def _verifies(options: SubjectOptions, rollout: RolloutConfig) -> list[Verify]:
    """Returns the ways to verify that are certified: of trees, shared noise is the only one."""
    if rollout.speculation.shape != "tree":
        return options.verifies
    if options.verify == Verify.REJECTION:
        raise ValueError(
            f"--verify {options.verify}: rollout.speculation.shape = 'tree' is verified by shared noise "
            "alone; use --verify shared-noise, or rollout.speculation.shape=chain"
        )
    return [Verify.SHARED_NOISE]


def _fitting_drafters(rollout: RolloutConfig, policy: Decoder) -> list[str]:
    """Returns the drafters that need nothing but this policy."""
    every = rollout.speculation.model_copy(update={"drafters": ["history", "eagle"]})
    return drafter_names(every, policy.config)


def make_subject(
    options: SubjectOptions,
    rollout: RolloutConfig,
    policy: Decoder,
    prompts: Sequence[tuple[int, ...]],
    tokenizer: Tokenizer,
) -> Subject:
    """Returns one native engine to certify, ready to be opened."""
    drafters = [drafter_maker(name, policy, rollout.speculation, tokenizer) for name in options.drafters]
    adaptive = options.pacing == "adaptive"
    settings = EngineSettings(
        deterministic=options.deterministic or rollout.deterministic,
        verify=options.verify,
        precision=rollout.precision,
        base_precision_layers=rollout.base_precision_layers,
        kv_scales_per_head=rollout.kv_scales == "head",
        trees=rollout.speculation.shape == "tree",
    )
    how = (drafters, options.tokens, settings, adaptive, tokenizer)
    if rollout.precision is Precision.BASE:
        return NativeSubject(policy, widest(policy), *how)
    return Fp8Subject(policy, prompts, *how)


def certificate_settings(
    options: SubjectOptions, rollout: RolloutConfig, policy: Decoder, seed: int
) -> dict[str, str]:
    settings = {"policy": options.policy, "precision": str(policy.dtype).removeprefix("torch.")}
    settings["seed"] = str(seed)
    if options.backend == "native":
        if rollout.precision is not Precision.BASE:
            settings["rollout"] = rollout.precision
        settings |= {"drafter": options.drafter, "tokens": str(options.tokens)}
        verifies = ", ".join(_verifies(options, rollout))
        settings |= {"pacing": options.pacing, "shape": rollout.speculation.shape, "verify": verifies}
        settings["deterministic"] = str(options.deterministic or rollout.deterministic).lower()
    settings["device"] = policy.device.type
    return settings
