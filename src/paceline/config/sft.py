"""The section `sft`: what `paceline sft` learns from before RL, and how fast.

The other sections are shared with RL: of `learning` it takes the optimiser, the micro-batches and the
precision.
"""

from typing import Literal

from pydantic import Field, model_validator

from paceline.config.section import MOST_LR, MOST_PROBLEMS, MOST_STEPS, Section


class SftConfig(Section):
    """The section `sft`: examples, passes over them, learning rate."""

    data: str = Field(
        "",
        description="a .jsonl or .parquet file of examples, or a folder that `datasets` saved; empty: the "
        "task's own demonstrations",
    )
    demonstrations: int = Field(
        0,
        ge=0,
        le=MOST_PROBLEMS,
        description="how many of the task's, where `data` is empty; 0: all of a file, 20,000 that are made",
    )
    held_out: str = Field("", description="a second file of examples for the held-out loss; empty: a share")
    held_out_share: float = Field(
        0.02, ge=0, lt=1, description="share of the examples held out, by a hash of their tokens; 0: none"
    )
    chat_template: str = Field(
        "",
        description="a Jinja file that renders messages in place of the policy's own template, and that is "
        "saved with the policy",
    )
    max_tokens: int = Field(
        0,
        ge=0,
        description="longer examples are left out, longer plain texts cut; 0: the policy's positions, and "
        "for responses of demonstrations rollout.max_tokens",
    )
    epochs: int = Field(1, ge=1, le=MOST_STEPS, description="passes over the examples")
    batch_size: int = Field(64, ge=1, description="examples per optimiser step")
    lr: float = Field(2e-5, gt=0, le=MOST_LR, description="learning rate of AdamW, after warm-up")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "cosine", description="the learning rate after warm-up"
    )
    warmup_steps: int = Field(
        20, ge=0, description="optimiser steps over which the learning rate rises; at most a tenth of all"
    )
    every: int = Field(
        0,
        ge=0,
        description="steps between evaluations of the held-out loss, each with a checkpoint; 0: an epoch",
    )

    @model_validator(mode="after")
    def _keys_apply(self) -> "SftConfig":
        if self.held_out:
            why = f"sft.held_out = {self.held_out!r} is evaluated on. Leave that out"
            self.refuse_unused("sft", ("held_out_share",), why)
        if not self.data:
            why = "sft.data is empty, so examples are the task's demonstrations. Set it"
            self.refuse_unused("sft", ("held_out", "chat_template"), why)
        else:
            why = f"sft.data = {self.data!r} holds the examples. Leave that out"
            self.refuse_unused("sft", ("demonstrations",), why)
        if self.held_out and self.held_out == self.data:
            raise ValueError(
                f"sft.held_out = {self.held_out!r} is sft.data: what is learned from would be evaluated on; "
                "name another file, or leave it out, and sft.held_out_share is held out"
            )
        return self
