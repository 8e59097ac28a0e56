"""Where a policy is unsure, and how far rounding may move it there: over the texts that plain decoding wrote.

The first says where to sample: sampling has most to get wrong there. The second says what can be known at
all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.certify.distribution import APART, apart, passes
from paceline.certify.subject import Subject, rounded_copies
from paceline.types import Completion

CALM = 4  # of the contexts, one in so many may begin samples: those that rounding moves least


@dataclass(frozen=True)
class Place:
    prompt: tuple[int, ...]
    context: tuple[int, ...]
    entropy: float
    moved: tuple[
        float, ...
    ]  # by each shaken copy: the standard deviation, over the vocabulary, of what it did to the logits

    @property
    def most_moved(self) -> float:
        return max(self.moved, default=0.0)


@dataclass(frozen=True)
class Uncertainty:
    places: list[Place]

    def moved(self, share: float) -> float:
        """Over contexts and copies."""
        return float(
            torch.tensor(
                [moved for place in self.places for moved in place.moved], dtype=torch.float64
            ).quantile(share)
        )

    @property
    def tolerance(self) -> float:
        """How far apart rounding may take two logits where no copy shows it: as far as in nine contexts of
        ten.
        """
        return APART * self.moved(0.9)

    def describe(self) -> str:
        moved = ", ".join(f"{self.moved(share):.1e}" for share in (0.5, 0.9, 0.99))
        there = f"{apart(len(self.places[0].moved)):g} times what was seen there"
        return f"logits by {moved} (median, 90%, 99% of contexts); what hangs on less than {self.tolerance:.2g}, or than {there}, is left out"

    def contested(self, count: int) -> list[tuple[int, ...]]:
        """Contexts in which the policy is least sure, one per prompt; every sample begins there, so rounding
        must not move them much.
        """
        calm = sorted(self.places, key=lambda place: (place.most_moved, -place.entropy))
        if calm[-1].most_moved:
            calm = calm[: -(-len(calm) // CALM)]
        best: dict[tuple[int, ...], Place] = {}
        for place in calm:
            if place.prompt not in best or place.entropy > best[place.prompt].entropy:
                best[place.prompt] = place
        return [place.context for place in sorted(best.values(), key=lambda place: -place.entropy)[:count]]


@torch.inference_mode()
def measure(subject: Subject, completions: Sequence[Completion]) -> Uncertainty:
    texts = {
        completion.request.prompt + completion.tokens: len(completion.request.prompt)
        for completion in completions
    }
    prompts = {
        text[:end]: text[:length] for text, length in texts.items() for end in range(length, len(text) + 1)
    }
    places = []
    for part in passes(subject.exact_policy, texts):
        logits_NV = part.logits(subject.exact_policy)
        entropy_N = torch.distributions.Categorical(logits=logits_NV).entropy()
        moved_SN = [(part.logits(other) - logits_NV).std(-1).tolist() for other in rounded_copies(subject)]
        moved = list(zip(*moved_SN, strict=True)) or [()] * len(part.contexts)
        numbers = zip(part.contexts, entropy_N.tolist(), moved, strict=True)
        places += [Place(prompts[context], context, entropy, by) for context, entropy, by in numbers]
    return Uncertainty(places)
