"""The section `learning.distill`: the teacher of `learning.algorithm: distill`, and what it teaches."""

from typing import Literal

from pydantic import Field, model_validator

from paceline.config.section import Section

# How the name of a teacher behind a server begins.
ENDPOINTS = ("http://", "https://")


class DistillConfig(Section):
    """On-policy distillation: the policy samples, a teacher scores the same tokens."""

    teacher: str = Field(
        "",
        description="a Hugging Face folder with the policy's tokenizer, such as an earlier checkpoint's, or "
        "the http:// address of a server with /inference/v1/generate",
    )
    kl: Literal["reverse", "forward", "mixed"] = Field(
        "reverse",
        description="reverse: KL(policy, teacher), the policy keeps to what the teacher finds likely; "
        "forward: KL(teacher, policy); mixed: half of each to their mean (Jensen-Shannon)",
    )
    top_k: int = Field(
        0,
        ge=0,
        description="compare the teacher's k likeliest tokens, and all others as one; 0: whole distributions",
    )
    reward_weight: float = Field(
        0.0,
        ge=0,
        le=1e6,
        description="weight of the task's rewards beside the teacher, as GRPO learns from them",
    )

    @property
    def by_endpoint(self) -> bool:
        """Whether the teacher is a server, which tells the logprobs of the sampled tokens alone."""
        return self.teacher.startswith(ENDPOINTS)

    @model_validator(mode="after")
    def _endpoint_can(self) -> "DistillConfig":
        if not self.teacher:
            why = "learning.distill.teacher is empty. Name one"
            self.refuse_unused("learning.distill", ("kl", "top_k", "reward_weight"), why)
        if self.by_endpoint:
            why = f"learning.distill.teacher = {self.teacher!r} tells the logprobs of sampled tokens alone"
            self.refuse_unused("learning.distill", ("kl", "top_k"), f"{why}. Name a folder")
        return self
