"""The recipe's `learning`: algorithm, optimiser, batches.

The settings that belong to each algorithm are here; what it computes is in `learning/algorithms`.
"""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from paceline.config.correction import CorrectionConfig
from paceline.config.distill import DistillConfig
from paceline.config.section import MOST_LR, MOST_STEPS, Section

# The settings of each algorithm's paper, where they differ from the defaults below; a key that a recipe names
# beside the algorithm wins. docs/algorithms.md has the sources.
ALGORITHM_DEFAULTS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dapo": {"clip_high": 0.28, "overlong_share": 0.2, "dynamic_sampling_rounds": 10},
    "dr_grpo": {"loss_mean": "constant"},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "loss_mean": "sequence"},
    "reinforce++": {"kl_coef": 0.01},
    "rloo": {"kl_coef": 0.05, "loss_mean": "sequence"},
    "cispo": {"clip_high": 4.0},
    "distill": {},
    "sft": {},
}

# A ratio is never clipped in practice where this is `clip_high`; float32 ends at 3e38.
NO_CLIP = 1e9


class LearningConfig(Section):
    """The section `learning`: the policy's update."""

    algorithm: Literal[
        "grpo", "dapo", "dr_grpo", "gspo", "reinforce++", "rloo", "cispo", "distill", "sft"
    ] = Field(
        "grpo",
        description="advantages and loss; also sets the keys that its paper sets (docs/algorithms.md); sft: "
        "what `paceline sft` does, whatever the recipe says",
    )
    lr: float = Field(1e-6, gt=0, le=MOST_LR, description="learning rate of AdamW, after warm-up")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="the learning rate after warm-up; linear and cosine fall to 0 over run.steps x epochs x "
        "minibatches optimiser steps, of which skipped updates are none",
    )
    warmup_steps: int = Field(0, ge=0, description="optimiser steps over which the learning rate rises to lr")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay, on matrices only")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of AdamW's first moment")
    beta2: float = Field(0.99, ge=0, lt=1, description="decay of AdamW's second moment")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are scaled down to this norm")
    clip_low: float = Field(
        0.2, gt=0, lt=1, description="the probability ratio is clipped to [1 - clip_low, 1 + clip_high]"
    )
    clip_high: float = Field(0.2, gt=0, description="see clip_low")
    optimiser_state: Literal["device", "8bit", "host"] = Field(
        "device",
        description="AdamW's state; device: float32 masters and moments; 8bit: moments of eight bits; "
        "host: all of it in host memory, copied through at every step",
    )
    kl_coef: float = Field(
        0.0,
        ge=0,
        description="weight of the KL to the starting policy; above 0 a reference copy is kept "
        "(none with LoRA)",
    )
    loss_mean: Literal["token", "sequence", "constant"] = Field(
        "token",
        description="token: every token counts the same; sequence: every response; "
        "constant: a token is 1 / (responses x rollout.max_tokens)",
    )
    overlong_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="within this last share of rollout.max_tokens the reward falls by up to 1; 0: never",
    )
    dynamic_sampling_rounds: int = Field(
        0,
        ge=0,
        le=MOST_STEPS,
        description="times a step may draw prompts until rollout.prompts_per_step groups have unequal "
        "rewards; 0: take groups as they come",
    )
    epochs: int = Field(1, ge=1, le=MOST_STEPS, description="passes over the step's samples")
    minibatches: int = Field(
        1, ge=1, description="optimiser steps per pass; must divide rollout.prompts_per_step"
    )
    micro_batch_tokens: int = Field(
        2048, ge=64, description="tokens per forward and backward pass; halved when memory runs out"
    )
    precision: Literal["base", "fp8"] = Field(
        "base",
        description="products with the layers' projections, forward and backward; fp8: blockwise, quantised "
        "as rollout.precision=fp8 does (rollout.base_precision_layers stay out)",
    )
    numerics: Literal["fast", "exact"] = Field(
        "fast",
        description="exact: the forward pass runs the rollout's own kernels, so that on the same weights its "
        "logprobs are the rollout's, bit for bit; on a GPU with rollout.deterministic",
    )
    skip_zero_advantages: bool = Field(
        True,
        description="responses whose advantage is zero do not pass through the policy, where the update is "
        "the same without them (docs/algorithms.md); metrics are then means over the others",
    )
    deterministic: bool = Field(
        True,
        description="on a GPU: attention adds gradients up in a fixed order, so that the same samples give "
        "the same weights; false is faster",
    )
    distill: DistillConfig = Field(DistillConfig(), description="algorithm distill: its teacher")
    correction: CorrectionConfig = Field(
        CorrectionConfig(), description="correction for samples of a policy that is not the learner's"
    )

    @field_validator("clip_high")
    @classmethod
    def _clip_is_a_float32(cls, clip_high: float) -> float:
        if clip_high > NO_CLIP:
            raise ValueError(f"must be at most {NO_CLIP:.0f}; 1e6 or more clips no ratio in practice")
        return clip_high

    @model_validator(mode="after")
    def _teacher_is_there(self) -> "LearningConfig":
        distils = self.algorithm == "distill"
        if distils and not self.distill.teacher:
            raise ValueError(
                "learning.algorithm = 'distill' needs a teacher: name its folder, or the http:// address of "
                "a server (learning.distill.teacher)"
            )
        if self.distill.teacher and not distils and self.algorithm != "sft":
            raise ValueError(
                f"learning.distill.teacher = {self.distill.teacher!r} does not apply to learning.algorithm = "
                f"{self.algorithm!r}; use learning.algorithm=distill, or leave the teacher out"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _algorithm_defaults(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return ALGORITHM_DEFAULTS.get(str(given.get("algorithm", "grpo")), {}) | given
