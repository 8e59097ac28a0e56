"""The recipe's `rollout`: how much is generated, and with which speculation, precision and memory."""

from typing import Literal

from pydantic import Field, model_validator

from paceline.config.modes import ModeKeys
from paceline.config.online import OnlineDrafterConfig
from paceline.config.section import MOST_GB, MOST_SAMPLES, Section, Temperature
from paceline.config.vllm import VllmConfig, vllm_problem
from paceline.types import Precision

# The key that names each drafter's folder.
DRAFTER_FOLDERS = {"eagle": "eagle_path", "draft_model": "draft_model_path"}

# Tokens of a KV pool at most: dozens of terabytes for any policy.
MOST_KV_TOKENS = 1_000_000_000

# Names a new eagle head in place of a folder.
FRESH = "fresh"


class SpeculationConfig(Section):
    """The section `rollout.speculation`: drafters and how their proposals are used."""

    drafters: list[Literal["history", "eagle", "draft_model", "ngram", "suffix", "mtp", "dflash"]] = Field(
        default_factory=list,
        description="what may propose tokens; completions are the same with any of them; "
        "empty: no speculation; the last four are vLLM's (rollout.backend=vllm)",
    )
    pacing: Literal["adaptive", "fixed"] = Field(
        "adaptive",
        description="adaptive: the fastest strategy at the moment, which may be no speculation; "
        "fixed: always the same",
    )
    shape: Literal["chain", "tree"] = Field(
        "chain",
        description="how proposed tokens hang together; chain: one continuation; tree: several, which share "
        "their beginnings and are verified at once; completions are the same",
    )
    tokens: int = Field(
        7,
        ge=1,
        le=15,
        description="proposed tokens per step, a tree's nodes: at most (adaptive), or exactly (fixed)",
    )
    max_running: int = Field(
        0, ge=0, description="fixed: speculate while at most this many requests run; 0: always"
    )
    eagle_path: str = Field(
        "auto",
        description="the eagle head's folder (see `paceline drafter`); auto: the shipped head where it fits "
        "the policy, else none; fresh: a new head, which learns in the run (online.share)",
    )
    eagle_precision: Literal["base", "fp8"] = Field(
        "base",
        description="what the eagle head proposes in; base: the policy's own type; fp8: FP8, which "
        "halves what a pass reads; completions are the same",
    )
    draft_model_path: str = Field(
        "", description="the draft model's Hugging Face folder; it must have the policy's tokenizer"
    )
    verify: Literal["shared-noise", "rejection"] = Field(
        "shared-noise",
        description="shared-noise: bit-exact; rejection: classical rejection sampling, the same distribution "
        "but tokens that depend on the drafter; for comparison",
    )
    online: OnlineDrafterConfig = Field(
        OnlineDrafterConfig(), description="training of the eagle head during the run"
    )

    @property
    def asks_to_learn(self) -> bool:
        """Whether the recipe sets how the head learns; by default it takes no memory from the run."""
        return self.online.is_asked_for or self.eagle_path == FRESH

    @model_validator(mode="after")
    def _pacing_fits(self) -> "SpeculationConfig":
        if len(set(self.drafters)) < len(self.drafters):
            raise ValueError(f"rollout.speculation.drafters = {self.drafters}: each drafter once")
        if self.pacing == "fixed" and len(self.drafters) > 1:
            raise ValueError(
                f"rollout.speculation.drafters = {self.drafters}: pacing = 'fixed' takes one drafter; "
                "use pacing=adaptive for several"
            )
        if self.pacing == "adaptive" and self.max_running:
            raise ValueError(
                f"rollout.speculation.max_running = {self.max_running} applies to pacing = 'fixed' only; "
                "leave it out"
            )
        return self

    @model_validator(mode="after")
    def _keys_apply(self) -> "SpeculationConfig":
        drafters = f"rollout.speculation.drafters = {self.drafters}"
        own = [*DRAFTER_FOLDERS.items(), ("eagle", "eagle_precision")]
        for drafter, key in own:
            if drafter not in self.drafters:
                self.refuse_unused(
                    "rollout.speculation", (key,), f"{drafters} lacks {drafter!r}. Add it there"
                )
        if "eagle" not in self.drafters and self.online.share:
            self.online.refuse_unused(
                "rollout.speculation.online",
                ("share", "lr"),
                f"{drafters} lacks 'eagle', the one that can learn. Add it there",
            )
        if not self.drafters:
            why = "rollout.speculation.drafters is empty, so nothing is verified. Name a drafter"
            self.refuse_unused("rollout.speculation", ("verify", "shape"), why)
        if self.shape == "tree" and self.verify == "rejection":
            raise ValueError(
                "rollout.speculation.shape = 'tree' needs rollout.speculation.verify = 'shared-noise': "
                "rejection verifies chains only. Leave one of the two out"
            )
        return self


class SentinelConfig(Section):
    """The section `rollout.sentinel`: when low-precision rollouts fall back to the policy's own dtype."""

    kl: float = Field(0.1, ge=0, description="fall back when mismatch/kl exceeds this; 0: it is not watched")
    lost_signal: float = Field(
        0.1,
        ge=0,
        le=1,
        description="act when more than this share of the advantages is lost to the mismatch "
        "(policy/lost_signal, mean of three steps); 0: it is not watched",
    )
    on_lost_signal: Literal["warn", "fall_back"] = Field(
        "warn", description="what is done then; warn: once, with the keys that help"
    )
    capped_steps: int = Field(
        2,
        ge=0,
        description="fall back when all responses of this many steps in a row reach max_tokens; "
        "0: it is not watched",
    )


class RolloutConfig(ModeKeys):
    """The section `rollout`: what is sampled at each step, and how the engine runs."""

    backend: Literal["native", "reference", "vllm"] = Field(
        "native",
        description="native: the engine; reference: a plain generator, the engine's test oracle; "
        "vllm: vLLM in a process of its own (docs/vllm.md)",
    )
    vllm: VllmConfig = Field(VllmConfig(), description="vLLM's environment and options")
    samples_per_prompt: int = Field(
        8, ge=1, le=MOST_SAMPLES, description="responses sampled per prompt: the group's size"
    )
    temperature: Temperature = Field(1.0, description="sampling temperature; 0: the most likely token")
    max_tokens: int = Field(288, ge=1, description="tokens of a response at most")
    max_running: int = Field(256, ge=1, le=65536, description="requests decoded together at most")
    kv_tokens: int = Field(
        0,
        ge=0,
        le=MOST_KV_TOKENS,
        description="tokens the KV pool holds; 0: enough for every running request at full length, "
        "or what fits the GPU",
    )
    prefill_tokens: int = Field(16384, ge=1, description="prompt tokens per prefill batch")
    admission: Literal["fifo", "longest"] = Field(
        "fifo",
        description="order in which waiting requests start; longest: by the lengths of earlier responses to "
        "their prompts, of siblings or earlier epochs",
    )
    speculation: SpeculationConfig = Field(SpeculationConfig(), description="speculative decoding")
    graph_memory_gb: float = Field(
        2.0,
        gt=0,
        le=MOST_GB,
        description="GB for CUDA graphs of captured steps; limits the proposed tokens of a large batch",
    )
    sentinel: SentinelConfig = Field(
        SentinelConfig(), description="when low-precision rollouts fall back to the policy's own type"
    )
    deterministic: bool = Field(
        False, description="GPU: a completion's bits do not depend on its batch; on a CPU they never do"
    )
    precision: Precision = Field(
        Precision.BASE,
        description="base: the policy's own type; fp8: layer weights and activations in FP8; "
        "fp8+kv: and the KV cache; kv: the KV cache alone",
    )
    base_precision_layers: int = Field(
        0,
        ge=0,
        description="with FP8: the first and last n layers keep their weights in the policy's own type",
    )
    kv_scales: Literal["layer", "head"] = Field(
        "layer", description="with fp8+kv and kv: what shares a scale"
    )
    router_replay: bool = Field(
        False,
        description="MoE policies: the learner routes each token to the experts that the rollout chose",
    )

    @property
    def head_may_learn(self) -> bool:
        """Whether an eagle head learns during the run, if one drafts for the policy.

        How much it learns depends on measured times. Unless asked for, it does not learn in an otherwise
        repeatable run whose samples depend on the drafts.
        """
        speculation = self.speculation
        if not speculation.online.share or "eagle" not in speculation.drafters:
            return False
        over_tokens = speculation.verify == "rejection" and self.backend == "native"
        over_groups = self.mode in ("partial", "oversample")
        decide = speculation.pacing == "fixed" and (over_tokens or over_groups)
        return speculation.asks_to_learn or not decide

    @model_validator(mode="after")
    def _precision_keys_apply(self) -> "RolloutConfig":
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
        if self.backend == "reference" and self.admission == "longest":
            raise ValueError(
                "rollout.admission = 'longest' needs rollout.backend = 'native': the reference runs requests "
                "in the order they come; use rollout.admission=fifo, or leave it out"
            )
        if self.backend == "reference" and self.precision is not Precision.BASE:
            raise ValueError(
                f"precision = {self.precision.value!r} needs backend: native; the reference computes in the "
                "policy's own type only"
            )
        online = self.speculation.online
        if self.backend == "reference" and online.is_asked_for and online.share:
            raise ValueError(
                f"rollout.speculation.online.share = {online.share:g}: rollout.backend = 'reference' never "
                "speculates, so no eagle head drafts and none can learn; use rollout.backend=native, or "
                "leave rollout.speculation.online out"
            )
        if self.router_replay and self.backend != "native":
            raise ValueError(
                f"rollout.router_replay = True: rollout.backend = {self.backend!r} does not record which "
                "experts it chose; use rollout.backend=native, or leave router_replay out"
            )
        return self

    @model_validator(mode="after")
    def _vllm_can(self) -> "RolloutConfig":
        problem = vllm_problem(self)
        if problem:
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _mode_can(self) -> "RolloutConfig":
        if self.on_update == "keep" and self.precision.fp8_kv:
            raise ValueError(
                f"rollout.on_update = 'keep': with rollout.precision = {self.precision.value!r} the scales "
                "change with the weights, and a cache would hold two; use on_update=recompute, or "
                f"precision={self.precision.without_fp8_kv}"
            )
        if self.on_update == "keep" and self.backend != "native":
            raise ValueError(
                f"rollout.on_update = 'keep': rollout.backend = {self.backend!r} always computes its cache "
                "again; use rollout.backend=native, or on_update=recompute"
            )
        if self.mode == "async" and self.precision.fp8_kv:
            raise ValueError(
                f"rollout.mode = 'async': with rollout.precision = {self.precision.value!r} scales are "
                "measured in the learner's forward passes, and generation runs in another process; use "
                f"precision={self.precision.without_fp8_kv}, or mode=partial"
            )
        return self
