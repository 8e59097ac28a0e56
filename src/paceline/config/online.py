"""The recipe's `rollout.speculation.online`: how the eagle head learns during a run."""

from pydantic import Field, model_validator

from paceline.config.section import MOST_LR, Section


class OnlineDrafterConfig(Section):
    """The section `rollout.speculation.online`: training the eagle head during the run."""

    share: float = Field(
        0.01,
        ge=0,
        le=1,
        description="the share of a step's time that the eagle head, where one drafts, learns for; the "
        "second step tells how many updates that is; 0: it never learns",
    )
    lr: float = Field(1e-3, gt=0, le=MOST_LR, description="learning rate of the eagle head")

    @property
    def is_asked_for(self) -> bool:
        return any(not self.is_default(key) for key in type(self).model_fields)

    @model_validator(mode="after")
    def _keys_apply(self) -> "OnlineDrafterConfig":
        if not self.share:
            why = "rollout.speculation.online.share = 0: it never learns. Use share=0.01"
            self.refuse_unused("rollout.speculation.online", ("lr",), why)
        return self
