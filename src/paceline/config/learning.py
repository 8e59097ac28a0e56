"""The recipe's `learning`: algorithm, optimiser, batches. What each algorithm sets is here; what it computes
in `learning/algorithms`.
"""

from typing import Any, Literal

from pydantic import Field, model_validator

from paceline.config.correction import CorrectionConfig
from paceline.config.section import Section

# What each algorithm's paper sets, where that differs from the defaults below; a key that a recipe names
# beside it wins. docs/algorithms.md has the sources.
ALGORITHM_DEFAULTS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dapo": {"clip_high": 0.28, "overlong_share": 0.2, "dynamic_sampling_rounds": 10},
    "dr_grpo": {"loss_mean": "constant"},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "loss_mean": "sequence"},
    "reinforce++": {"kl_coef": 0.01},
}


class LearningConfig(Section):
    algorithm: Literal["grpo", "dapo", "dr_grpo", "gspo", "reinforce++"] = "grpo"
    lr: float = Field(1e-6, gt=0)
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.99, ge=0, lt=1)
    max_grad_norm: float = Field(1.0, gt=0)
    clip_low: float = Field(
        0.2, gt=0, lt=1, description="the probability ratio is clipped to [1 - clip_low, 1 + clip_high]"
    )
    clip_high: float = Field(0.2, gt=0)
    kl_coef: float = Field(
        0.0,
        ge=0,
        description="weight of the KL to the starting policy; above 0 a reference copy is kept (none with LoRA)",
    )
    loss_mean: Literal["token", "sequence", "constant"] = Field(
        "token",
        description="token: every token counts the same; sequence: every response; constant: a token is 1 / (responses x rollout.max_tokens)",
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
        description="times a step may draw prompts until rollout.prompts_per_step groups scored unevenly; 0: take groups as they come",
    )
    epochs: int = Field(1, ge=1, description="passes over the step's samples")
    minibatches: int = Field(1, ge=1, description="optimiser steps per pass")
    micro_batch_tokens: int = Field(
        2048, ge=64, description="tokens per forward and backward pass; halved when memory runs out"
    )
    correction: CorrectionConfig = CorrectionConfig()

    @model_validator(mode="before")
    @classmethod
    def _algorithm_defaults(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return ALGORITHM_DEFAULTS.get(str(given.get("algorithm", "grpo")), {}) | given
