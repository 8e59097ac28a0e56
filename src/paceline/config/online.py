"""The recipe's `rollout.speculation.online`: how the eagle head learns during a run."""

from typing import Literal

from pydantic import Field, model_validator

from paceline.config.section import MOST_GB, MOST_LR, Section

# Keys that apply only to a head that learns.
LEARNING_KEYS = ("lr", "tokens", "batch", "unroll", "buffer_gb")


class OnlineDrafterConfig(Section):
    """The section `rollout.speculation.online`: training the eagle head during the run."""

    when: Literal["never", "drift", "always", "auto"] = Field(
        "auto",
        description="when the eagle head, where one drafts, learns from the run's own responses: "
        "auto: while updates make it better or its acceptance has fallen, in idle time and "
        "within `budget`; drift: when its acceptance has fallen; always: after every step; never",
    )
    lr: float = Field(1e-3, gt=0, le=MOST_LR, description="learning rate of the eagle head")
    tokens: int = Field(
        8192,
        ge=1,
        description="response tokens to learn from per step, drawn from the longest responses of this step "
        "and the previous one; with cluster.replicas, of each replica that trains",
    )
    batch: int = Field(
        16,
        ge=1,
        description="passages of responses per optimiser step; more on a GPU where they are short",
    )
    unroll: int = Field(
        5, ge=1, le=15, description="how many tokens of a draft are trained; 1: only the first"
    )
    budget: float = Field(
        0.01,
        gt=0,
        lt=1,
        description="auto: the share of a step's time that learning may add to it; time spent waiting for "
        "rewards is not counted",
    )
    buffer_gb: float = Field(
        0.25,
        gt=0,
        le=MOST_GB,
        description="GB of host memory for responses to learn from, with the policy's states along them",
    )

    @property
    def is_asked_for(self) -> bool:
        return any(not self.is_default(key) for key in type(self).model_fields)

    @model_validator(mode="after")
    def _keys_apply(self) -> "OnlineDrafterConfig":
        section = "rollout.speculation.online"
        when = f"{section}.when = {self.when!r}"
        if self.when == "never":
            self.refuse_unused(section, LEARNING_KEYS, f"{when}. Use when=drift, when=always or when=auto")
        if self.when != "auto":
            self.refuse_unused(section, ("budget",), f"{when}. Use when=auto")
        return self
