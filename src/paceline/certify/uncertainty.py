"""The policy's entropy, and how far rounding moves its logits, over the texts that plain decoding wrote.

The entropy decides where to sample: sampling has most to get wrong where it is high. The effect of rounding
limits what can be known at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.certify.distribution import SPREAD_FACTOR, passes, spread_factor
from paceline.certify.subject import LOGIT_TOLERANCE, Subject, rounded_copies
from paceline.types import Completion

# One in so many of the contexts may begin samples: those that rounding moves least.
STABLE_SHARE = 4


@dataclass(frozen=True)
class ContextUncertainty:
    """The policy's entropy after one context, and how far rounding moves its logits there."""

    prompt: tuple[int, ...]
    context: tuple[int, ...]
    entropy: float
    # By each perturbed copy: the standard deviation, over the vocabulary, of what it did to the logits.
    moved: tuple[float, ...]

    @property
    def most_moved(self) -> float:
        """Returns what the copy that moved farthest did."""
        return max(self.moved, default=0.0)


@dataclass(frozen=True)
class Uncertainty:
    """All contexts of the texts that plain decoding wrote."""

    contexts: list[ContextUncertainty]

    def moved(self, share: float) -> float:
        """Returns a quantile of what rounding did, over contexts and copies."""
        moved = [moved for context in self.contexts for moved in context.moved]
        return float(torch.tensor(moved, dtype=torch.float64).quantile(share))

    @property
    def tolerance(self) -> float:
        """Returns how far rounding may move two logits apart where no copy shows it (90% of contexts)."""
        return SPREAD_FACTOR * self.moved(0.9)

    def describe(self) -> str:
        moved = ", ".join(f"{self.moved(share):.1e}" for share in (0.5, 0.9, 0.99))
        there = f"{spread_factor(len(self.contexts[0].moved)):g} times what was seen there"
        return (
            f"logits by {moved} (median, 90%, 99% of contexts); "
            f"what hangs on less than {self.tolerance:.2g}, or than {there}, is left out"
        )

    def least_certain(self, count: int) -> list[tuple[int, ...]]:
        """Returns the contexts with the highest entropy, one per prompt.

        Every sample begins in one of them, so only contexts that rounding moves little are considered.
        """
        stable = sorted(self.contexts, key=lambda context: (context.most_moved, -context.entropy))
        if stable[-1].most_moved:
            stable = stable[: -(-len(stable) // STABLE_SHARE)]
        best: dict[tuple[int, ...], ContextUncertainty] = {}
        for context in stable:
            if context.prompt not in best or context.entropy > best[context.prompt].entropy:
                best[context.prompt] = context
        ordered = sorted(best.values(), key=lambda context: -context.entropy)
        return [context.context for context in ordered[:count]]


# Factor on what float32 does to logits in a learner's pass: an engine sums in another order.
OTHER_ORDER = 20.0

# No more than this is ever put down to rounding in a wide type.
LARGEST_TOLERANCE = 5e-3


@torch.inference_mode()
def wide_tolerance(subject: Subject, completions: Sequence[Completion]) -> float:
    """Returns how far logits may be off in float32 or float64, from a learner's pass in that type."""
    texts = {c.request.prompt + c.tokens: len(c.request.prompt) for c in completions}
    spread = max(
        float((part.logits(subject.policy) - part.logits(subject.exact_policy)).std(-1).max())
        for part in passes(subject.exact_policy, texts)
    )
    least = LOGIT_TOLERANCE[subject.policy.dtype]
    return max(least, min(OTHER_ORDER * spread, LARGEST_TOLERANCE))


@torch.inference_mode()
def measure(subject: Subject, completions: Sequence[Completion]) -> Uncertainty:
    """Runs the exact policy and its rounded copies over the completions' texts."""
    texts = {
        completion.request.prompt + completion.tokens: len(completion.request.prompt)
        for completion in completions
    }
    prompts = {
        text[:end]: text[:length] for text, length in texts.items() for end in range(length, len(text) + 1)
    }
    found = []
    for part in passes(subject.exact_policy, texts):
        logits_NV = part.logits(subject.exact_policy)
        entropy_N = torch.distributions.Categorical(logits=logits_NV).entropy()
        moved_SN = [(part.logits(other) - logits_NV).std(-1).tolist() for other in rounded_copies(subject)]
        moved = list(zip(*moved_SN, strict=True)) or [()] * len(part.contexts)
        numbers = zip(part.contexts, entropy_N.tolist(), moved, strict=True)
        found += [
            ContextUncertainty(prompts[context], context, entropy, by) for context, entropy, by in numbers
        ]
    return Uncertainty(found)
