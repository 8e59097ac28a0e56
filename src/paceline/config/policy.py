"""The recipe's `policy`: which model, in which type, whole or through adapters."""

from typing import Literal, get_args

from pydantic import Field

from paceline.config.section import Section

LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoraConfig(Section):
    rank: int = Field(
        0,
        ge=0,
        description="of the low-rank adapters that are trained instead of the weights; 0: train the weights",
    )
    alpha: float = Field(32.0, gt=0, description="the adapters' product is scaled by alpha / rank")
    targets: list[LoraTarget] = Field(
        list(get_args(LoraTarget)), min_length=1, description="projections that get an adapter"
    )
    dropout: Literal[0] = Field(
        0, description="always 0: with dropout the learner's policy would not be the one that sampled"
    )
    path: str = Field(
        "", description="a PEFT folder to start from; empty: fresh adapters, which change nothing at first"
    )


class PolicyConfig(Section):
    path: str = Field(
        "builtin",
        description="a Hugging Face folder, or `builtin` or `builtin-moe` for a shipped starting checkpoint",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = Field(
        "auto", description="auto: float32 on a CPU, bfloat16 on a GPU"
    )
    widen: str = Field(
        "",
        description="for measuring: the folder's function at the cost of a named shape, such as 8b; see `models widen`",
    )
    activation_checkpointing: bool = False
    lora: LoraConfig = LoraConfig()
