"""Makes the subject of a certificate from what a person asks for: a backend, drafters and how they verify.

Errors are for the command line, and name its options.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from paceline.certify.fp8 import Fp8Subject
from paceline.certify.native import NativeSubject, ReferenceSubject, drafter_maker, widest
from paceline.certify.run import QUICK, Plan
from paceline.certify.subject import Subject
from paceline.config import Config, RolloutConfig, load_config
from paceline.drafting.recipe import drafter_overrides
from paceline.engine.sampling import Verify
from paceline.engine.settings import EngineSettings
from paceline.policy.decoder import Decoder
from paceline.types import Precision

# Keys of the recipe that the command's own arguments set, and what to do instead.
OWN_ARGUMENTS = {"policy.path": "name the policy as the first argument", "policy.dtype": "say --precision"}


@dataclass(frozen=True)
class SubjectOptions:
    """The options of `paceline certify` that say what is certified."""

    policy: str
    backend: str  # native or reference
    drafter: str  # names with commas between
    tokens: int  # proposed per step, at most if pacing is adaptive
    pacing: str  # fixed or adaptive
    verify: str  # shared-noise or rejection
    dtype: str  # of the policy; empty: the device's own
    deterministic: bool

    def __post_init__(self) -> None:
        if self.backend not in ("native", "reference"):
            raise ValueError(f"--backend {self.backend!r}: must be native or reference")
        if self.verify not in (Verify.SHARED_NOISE, Verify.REJECTION):
            raise ValueError(f"--verify {self.verify!r}: must be {Verify.SHARED_NOISE} or {Verify.REJECTION}")
        if self.pacing not in ("fixed", "adaptive"):
            raise ValueError(f"--pacing {self.pacing!r}: must be fixed or adaptive")
        if len(self.drafters) > 1 and self.pacing == "fixed":
            raise ValueError(
                f"--drafter {self.drafter!r}: fixed pacing takes one drafter; "
                "add --pacing adaptive for several"
            )

    @property
    def drafters(self) -> list[str]:
        """The names of the drafters."""
        return self.drafter.split(",")


def certified_config(options: SubjectOptions, recipe: str, overrides: Sequence[str]) -> Config:
    """Reads the recipe; raises where it says something that the options say, or that the backend cannot."""
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


def make_subject(
    options: SubjectOptions,
    rollout: RolloutConfig,
    policy: Decoder,
    prompts: Sequence[tuple[int, ...]],
    tokenizer: Tokenizer,
) -> Subject:
    """Returns the backend to certify, ready to be opened."""
    if options.backend == "reference":
        return ReferenceSubject(policy, widest(policy))
    drafters = [drafter_maker(name, policy, rollout.speculation, tokenizer) for name in options.drafters]
    settings = EngineSettings(
        deterministic=options.deterministic or rollout.deterministic,
        verify=options.verify,
        precision=rollout.precision,
        base_precision_layers=rollout.base_precision_layers,
        kv_scales_per_head=rollout.kv_scales == "head",
        trees=rollout.speculation.shape == "tree",
    )
    how = (drafters, options.tokens, settings, options.pacing == "adaptive")
    if rollout.precision is Precision.BASE:
        return NativeSubject(policy, widest(policy), *how)
    return Fp8Subject(policy, prompts, *how)


def sampling_plan(quick: bool, samples: int, seed: int) -> Plan:
    """Returns how much is sampled; `samples` of 0 is the plan's own number."""
    plan = replace(QUICK if quick else Plan(), seed=seed)
    return replace(plan, samples=samples) if samples else plan


def certificate_settings(options: SubjectOptions, rollout: RolloutConfig, policy: Decoder) -> dict[str, str]:
    """Returns what the certificate says about its subject."""
    settings = {"policy": options.policy, "precision": str(policy.dtype).removeprefix("torch.")}
    if options.backend == "native":
        if rollout.precision is not Precision.BASE:
            settings["rollout"] = rollout.precision
        settings |= {"drafter": options.drafter, "tokens": str(options.tokens)}
        settings |= {"pacing": options.pacing, "verify": options.verify}
        settings["deterministic"] = str(options.deterministic or rollout.deterministic).lower()
    settings["device"] = policy.device.type
    return settings
