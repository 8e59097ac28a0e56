"""The recipe's `policy`: the model, its type, and whether its weights or LoRA adapters are trained."""

from typing import Literal, get_args

from pydantic import Field, model_validator

from paceline.config.section import Section

# Projections that can have an adapter.
LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoraConfig(Section):
    """The section `policy.lora`: low-rank adapters that are trained instead of the weights."""

    rank: int = Field(
        0, ge=0, le=16384, description="rank of the adapters; 0: no adapters, the weights are trained"
    )
    alpha: float = Field(32.0, gt=0, le=1e6, description="the adapters' product is scaled by alpha / rank")
    targets: list[LoraTarget] = Field(
        list(get_args(LoraTarget)), min_length=1, description="projections that get an adapter"
    )
    path: str = Field(
        "", description="PEFT folder to start from; empty: fresh adapters, which change nothing at first"
    )

    @model_validator(mode="after")
    def _keys_apply(self) -> "LoraConfig":
        if not self.rank:
            why = "policy.lora.rank is 0, so the weights are trained and there are no adapters. Set a rank"
            self.refuse_unused("policy.lora", ("path", "alpha", "targets"), why)
        return self


class PolicyConfig(Section):
    """The section `policy`: the model that is trained."""

    path: str = Field(
        "builtin",
        description="a Hugging Face folder, or the shipped `builtin`, `builtin-moe` or `builtin-countdown`",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = Field(
        "auto", description="type of the weights; auto: float32 on a CPU, bfloat16 on a GPU"
    )
    widen: str = Field(
        "",
        description="for measuring: computes the folder's function at the cost of a named shape, "
        "such as 8b; see `paceline models widen`",
    )
    activation_checkpointing: bool | Literal["auto"] = Field(
        "auto",
        description="recompute layers in the backward pass: less memory, more time; auto: as few of them as "
        "the GPU's memory asks for, on a CPU none",
    )
    lora: LoraConfig = Field(LoraConfig(), description="low-rank adapters")
