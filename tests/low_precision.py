"""A backend whose low precision is exact until it breaks, and `python -m tests.low_precision HARM STEP
ARGS...`: the command line with it.

So a run that falls back must equal, number for number, the run that never left base precision.
"""

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from paceline.backend import LowPrecision
from paceline.engine.reference import ReferenceBackend
from paceline.types import Completion, FinishReason, Precision


class BreakingBackend(ReferenceBackend):
    """From the step `breaks_at` on, training samples in low precision suffer the harm."""

    def __init__(self, *arguments, harm: str, breaks_at: int) -> None:
        super().__init__(*arguments)
        self.harm, self.breaks_at = harm, breaks_at
        self.in_base = False
        self.fallbacks = 0

    @property
    def precision(self) -> Precision:
        return Precision.BASE if self.in_base else Precision.FP8

    @property
    def low_precision(self) -> LowPrecision | None:
        return None if self.in_base else self

    attention_observer = None

    def kv_scales(self, layer: int) -> None:
        return None

    def in_base_precision(self) -> AbstractContextManager[None]:
        return nullcontext()

    def calibration_state(self) -> dict[str, torch.Tensor]:
        return {}

    def load_calibration_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        pass

    def fall_back_to_base_precision(self) -> None:
        self.in_base = True
        self.fallbacks += 1

    def completions(self) -> Iterator[Completion]:
        for completion in super().completions():
            broken = (
                not self.in_base
                and self.version + 1 >= self.breaks_at
                and completion.request.id.startswith("train")
            )
            yield self._harmed(completion) if broken else completion

    def _harmed(self, completion: Completion) -> Completion:
        first, *rest = completion.logprobs
        if self.harm == "nan" and completion.request.id.endswith("/1/2"):  # one sample of one group
            return replace(completion, logprobs=(math.nan, *rest))
        if self.harm == "kl":
            return replace(completion, logprobs=tuple(x + 0.5 for x in completion.logprobs))
        if self.harm == "capped":
            return replace(completion, finish_reason=FinishReason.LENGTH)
        return completion


def breaking_session(harm: str, breaks_at: int):
    """A stand-in for `session.make_backend`."""
    return lambda policy, tokenizer, config, plan=None: BreakingBackend(
        policy, config.rollout.max_running, tokenizer, harm=harm, breaks_at=breaks_at
    )


if __name__ == "__main__":
    from paceline import session
    from paceline.cli.main import main
    from paceline.tasks.running_sums import RunningSums
    from tests.length_reward import pay_for_length

    RunningSums.score = pay_for_length
    session.make_backend = breaking_session(sys.argv[1], int(sys.argv[2]))
    sys.argv[1:3] = []
    main()
