"""How well heads draft along the newest responses: what is compared before one replaces another."""

from collections.abc import Mapping, Sequence

import torch

from paceline.drafting.eagle_head import EagleHead
from paceline.drafting.examples import Example, ExampleBuffer, passages
from paceline.drafting.publishing import restore
from paceline.drafting.slices import SlicedLearning
from paceline.drafting.training import compare_rows
from paceline.policy.decoder import Decoder

# Passages along which two versions of a head are compared.
COMPARED_PASSAGES = 8


class HeadJudge:
    """Compares heads along passages of the newest step whose texts have states."""

    def __init__(self, policy: Decoder, learning: SlicedLearning, buffer: ExampleBuffer) -> None:
        self.policy = policy
        self.learning = learning
        self.buffer = buffer

    @torch.no_grad()
    def quality(
        self, head: EagleHead, count: int = COMPARED_PASSAGES, makes_states: bool = False
    ) -> float | None:
        """Returns the mean overlap of drafts' first tokens with the policy, in `count` passages.

        None where no text of the newest step has states: the head may have learned from older ones. With
        `makes_states` a pass of the policy makes those of a few texts then.
        """
        newest = max((e.step for e in self.buffer), default=0)
        texts = [e for e in self.buffer if e.step == newest]
        if makes_states and texts and all(e.states is None for e in texts):
            self.learning.compute_states(self._with_passages(texts, count))
        ready = [e for e in texts if e.states is not None]
        chosen = [p for e in ready for p in passages(e, self.learning.passage_rows)]
        sums = [
            compare_rows(self.policy, head, *self.learning.inputs(part))
            for part in self.learning.cut(chosen[:count])
        ]
        tokens = sum(tokens for _, tokens in sums)
        return sum(total for total, _ in sums) / tokens if tokens else None

    def _with_passages(self, texts: Sequence[Example], count: int) -> list[Example]:
        """Returns the first texts that together have `count` passages."""
        chosen: list[Example] = []
        for text in texts:
            if count <= 0:
                break
            chosen.append(text)
            count -= len(passages(text, self.learning.passage_rows))
        return chosen

    def quality_of(
        self,
        head: EagleHead,
        weights: Mapping[str, torch.Tensor],
        count: int = COMPARED_PASSAGES,
        makes_states: bool = False,
    ) -> float | None:
        """Returns the quality of the head with these weights; its own are restored afterwards."""
        present = {name: p.detach().clone() for name, p in head.named_parameters()}
        restore(head, weights)
        try:
            return self.quality(head, count, makes_states)
        finally:
            restore(head, present)
