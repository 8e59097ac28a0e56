"""A drafter's logits of the next token: of all of the policy's tokens, or of those it may propose."""

from dataclasses import dataclass

import torch

from paceline.kernels.candidates import best_candidates
from paceline.kernels.rejection import Truncation

# Temperatures, seeds and the positions that are sampled, `[R]` each.
Noise = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class DraftLogits:
    """Scores `[T, N]`, and the tokens that they are of."""

    scores_TN: torch.Tensor
    # None: all of the policy's, in order.
    vocabulary_N: torch.Tensor | None = None
    # How many the policy has; needed where the drafter has fewer.
    vocab_size: int = 0

    def full(self) -> torch.Tensor:
        """Returns scores of all of the policy's tokens, `[T, V]`; -inf outside the drafter's vocabulary."""
        if self.vocabulary_N is None:
            return self.scores_TN
        full_TV = self.scores_TN.new_full((len(self.scores_TN), self.vocab_size), -torch.inf)
        return full_TV.index_copy_(1, self.vocabulary_N, self.scores_TN)

    def best(
        self, noise: Noise, count: int, truncation: Truncation | None = None, width: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns tokens and scores of the best candidates, as `best_candidates` does."""
        if truncation is not None:
            return best_candidates(self.full(), *noise, count, truncation, width)
        return best_candidates(self.scores_TN, *noise, count, width=width, vocabulary_V=self.vocabulary_N)
