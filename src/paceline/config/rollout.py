"""The recipe's `rollout`: how much is generated, and how fast: speculation, precision, memory."""

from typing import Literal

from pydantic import Field, model_validator

from paceline.config.section import Section
from paceline.types import Precision

DRAFTER_FOLDERS = {
    "eagle": "eagle_path",
    "draft_model": "draft_model_path",
}  # the key that names a drafter's folder
FRESH = "fresh"  # in place of an eagle head's folder


class OnlineDrafterConfig(Section):
    when: Literal["never", "drift", "always"] = Field(
        "never",
        description="the eagle head learns from the run's own responses: when its acceptance has fallen, or after every step",
    )
    lr: float = Field(3e-4, gt=0)
    tokens: int = Field(
        8192,
        ge=1,
        description="response tokens to learn from per step, the longest responses of it and of the one before first",
    )
    batch: int = Field(16, ge=1, description="responses per optimiser step")
    unroll: int = Field(
        5, ge=1, le=15, description="how many tokens of a draft are trained; 1: only the first"
    )

    @model_validator(mode="after")
    def _keys_apply(self) -> "OnlineDrafterConfig":
        for key in ("lr", "tokens", "batch", "unroll"):
            if self.when == "never" and not self.is_default(key):
                named = f"rollout.speculation.online.{key} = {getattr(self, key)!r}"
                raise ValueError(
                    f"{named} does not apply: rollout.speculation.online.when = 'never'. Use when=drift or "
                    "when=always, or leave it out"
                )
        return self


class SpeculationConfig(Section):
    drafters: list[Literal["history", "eagle", "draft_model"]] = Field(
        default_factory=list,
        description="who may propose tokens; completions are the same whoever does; empty: no speculation",
    )
    pacing: Literal["adaptive", "fixed"] = Field(
        "adaptive", description="adaptive: whatever is fastest now, or no speculation; fixed: always the same"
    )
    tokens: int = Field(
        7, ge=1, le=15, description="proposed per step: at most (adaptive), or exactly (fixed)"
    )
    max_running: int = Field(
        0, ge=0, description="fixed: speculate while at most this many requests run; 0: always"
    )
    eagle_path: str = Field(
        "auto",
        description="the eagle head's folder; auto: the shipped head, where the policy has its shape, else nobody; see `paceline drafter`; "
        "fresh: a new one, which learns in the run (online.when=always)",
    )
    draft_model_path: str = Field(
        "", description="the draft model's Hugging Face folder; it must have the policy's tokenizer"
    )
    verify: Literal["shared-noise", "rejection"] = Field(
        "shared-noise",
        description="rejection: classical, the same distribution but tokens that depend on the drafter; for comparison",
    )

    online: OnlineDrafterConfig = OnlineDrafterConfig()

    @model_validator(mode="after")
    def _pacing_fits(self) -> "SpeculationConfig":
        if len(set(self.drafters)) < len(self.drafters):
            raise ValueError(f"rollout.speculation.drafters = {self.drafters}: each drafter once")
        if self.pacing == "fixed" and len(self.drafters) > 1:
            raise ValueError(
                f"rollout.speculation.drafters = {self.drafters}: pacing = 'fixed' takes one drafter; use "
                "pacing=adaptive for several"
            )
        if self.pacing == "adaptive" and self.max_running:
            raise ValueError(
                f"rollout.speculation.max_running = {self.max_running} applies to pacing = 'fixed' only; "
                "leave it out"
            )
        return self

    @model_validator(mode="after")
    def _keys_apply(self) -> "SpeculationConfig":
        """A key that nobody would read is a mistake."""
        for drafter, key in DRAFTER_FOLDERS.items():
            if drafter not in self.drafters and not self.is_default(key):
                named, default = f"rollout.speculation.{key}", type(self).model_fields[key].default
                raise ValueError(
                    f"{named} = {getattr(self, key)!r} does not apply: rollout.speculation.drafters = "
                    f"{self.drafters} lacks {drafter!r}. "
                    f"Add it there, or leave the path out ({named}={default})"
                )
        if self.online.when != "never" and "eagle" not in self.drafters:
            raise ValueError(
                f"rollout.speculation.online.when = {self.online.when!r} does not apply: "
                f"rollout.speculation.drafters = {self.drafters} lacks "
                "'eagle', the one that can learn. Add it there, or leave it out "
                "(rollout.speculation.online.when=never)"
            )
        if self.eagle_path == FRESH and self.online.when != "always":
            raise ValueError(
                f"rollout.speculation.eagle_path = {FRESH!r} starts from nothing, and "
                f"rollout.speculation.online.when = {self.online.when!r}: "
                "nobody would teach it. Use online.when=always, or name the folder of a trained head"
            )
        if not self.drafters and not self.is_default("verify"):
            raise ValueError(
                f"rollout.speculation.verify = {self.verify!r} does not apply: rollout.speculation.drafters "
                "is empty, so nothing is verified. "
                "Name a drafter, or leave it out (rollout.speculation.verify=shared-noise)"
            )
        return self


class SentinelConfig(Section):
    kl: float = Field(
        0.1, ge=0, description="low-precision rollouts end when mismatch/kl exceeds this; 0: not watched"
    )
    capped_steps: int = Field(
        2,
        ge=0,
        description="... or when all responses of this many steps in a row reach max_tokens; 0: not watched",
    )


class RolloutConfig(Section):
    backend: Literal["native", "reference"] = Field(
        "native", description="reference: a plain generator, the engine's test oracle"
    )
    prompts_per_step: int = Field(16, ge=1)
    samples_per_prompt: int = Field(8, ge=1)
    temperature: float = Field(1.0, ge=0.0)
    max_tokens: int = Field(288, ge=1)
    max_running: int = Field(256, ge=1, le=65536, description="requests decoded together at most")
    kv_tokens: int = Field(
        0,
        ge=0,
        description="tokens the KV pool holds; 0: room for every running request at full length, or what fits the GPU",
    )
    prefill_tokens: int = Field(16384, ge=1, description="prompt tokens computed at a time")
    admission: Literal["fifo", "longest"] = Field(
        "fifo", description="longest: requests expected to be long go first"
    )
    speculation: SpeculationConfig = SpeculationConfig()
    graph_memory_gb: float = Field(
        2.0, gt=0, description="for captured steps; limits how much a large batch may have proposed"
    )
    sentinel: SentinelConfig = SentinelConfig()
    deterministic: bool = Field(
        False, description="GPU: a completion's bits do not depend on its batch; on a CPU they never do"
    )
    precision: Precision = Field(
        Precision.BASE,
        description="base: the policy's own type; fp8: layer weights and activations in FP8; "
        "fp8+kv: and the KV cache",
    )
    base_precision_layers: int = Field(
        0,
        ge=0,
        description="with FP8: the first and last n layers keep their weights in the policy's own type",
    )
    kv_scales: Literal["layer", "head"] = Field("layer", description="with fp8+kv: what shares a scale")
    router_replay: bool = Field(
        False,
        description="policies with experts: the learner sends each token to the experts that the rollout chose",
    )

    @model_validator(mode="after")
    def _precision_keys_apply(self) -> "RolloutConfig":
        """A key that this precision would ignore is a mistake."""
        needed = {
            "base_precision_layers": [precision for precision in Precision if precision.fp8_weights],
            "kv_scales": [precision for precision in Precision if precision.fp8_kv],
        }
        for key, precisions in needed.items():
            if self.precision not in precisions and not self.is_default(key):
                raise ValueError(
                    f"rollout.{key} = {getattr(self, key)!r} does not apply to rollout.precision = "
                    f"{self.precision.value!r}, "
                    f"only to {', '.join(precisions)}; change that, or leave it out "
                    f"(rollout.{key}={type(self).model_fields[key].default})"
                )
        return self

    @model_validator(mode="after")
    def _backend_can(self) -> "RolloutConfig":
        if self.backend == "reference" and self.precision is not Precision.BASE:
            raise ValueError(
                f"precision = {self.precision.value!r} needs backend: native; the reference computes in the "
                "policy's own type only"
            )
        if self.router_replay and self.backend != "native":
            raise ValueError(
                f"rollout.router_replay = True: rollout.backend = {self.backend!r} does not record which "
                "experts it chose; "
                "use rollout.backend=native, or leave router_replay out"
            )
        return self
