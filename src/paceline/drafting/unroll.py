"""The head unrolled along a known text: what drafts of several tokens compute, in parallel over their starts.

A draft that starts after the policy's states up to t takes its first step from true features, g_0 .. g_t, and
each further one from the head's own states. Where the drafted tokens are the text's own, the draft's step j
is at entry t + j and sees

    entries            0  1  ..  t    t+1   t+2  ..  t+j
    made by step       0  0  ..  0     1     2   ..   j        keys and values of the head's own layer

So a query of step j at entry q sees step 0's keys up to q - j, and of each step i = 1 .. j the one key at q -
j + i. This is EAGLE-3's "training-time test" (arXiv 2503.01840, section 3.2), and the way to measure
acceptance: a draft is followed only as long as it agrees with the text.

Entry q is made of g_q and token q + 1, and predicts token q + 2. The first step makes keys and values of all
tokens T; everything else is computed for the entries R alone that predict a response's tokens, so what a text
costs before the part that is learned from is a key, a value and their inputs. What a sequence's first rows
take from before their sequence is meaningless; `training.drafted_tokens` says which rows are valid, and no
valid row reads one that is not.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from paceline.drafting.draft_attention import Prefix, PrefixAndDiagonal, make_prefixes
from paceline.drafting.eagle_head import EagleHead
from paceline.learning.batch import MicroBatch


def unroll(
    head: EagleHead, captured: list[torch.Tensor], embedding_VE: torch.Tensor, batch: MicroBatch, steps: int
) -> Iterator[torch.Tensor]:
    """Yields x_RE of each step.

    Row r of step j is the state that predicts response token r, of the draft that began j tokens before.
    """
    following_TE = F.embedding(batch.tokens_T.roll(-1), embedding_VE.detach())
    positions_T = batch.attention.positions_T
    entries_R = (batch.predictors_R - 1).clamp(min=0)
    following_RE = following_TE[entries_R]
    positions_R = positions_T[entries_R]
    attend = DraftAttention(batch, entries_R, steps)
    x_RE = head(head.features(captured), following_TE, positions_T, attend, entries_R)
    yield x_RE
    for _ in range(1, steps):
        x_RE = head(x_RE.roll(1, 0), following_RE, positions_R, attend)
        yield x_RE


class DraftAttention:
    """An `attend` for the head, called once per step, in order; it answers for the entries R alone."""

    def __init__(self, batch: MicroBatch, entries_R: torch.Tensor, steps: int) -> None:
        self.batch = batch
        self.entries_R = entries_R
        self.steps = steps
        self.prefixes: Sequence[Prefix] = ()
        self.true_keys_TKD: torch.Tensor | None = None
        self.true_values_TKD: torch.Tensor | None = None
        self.own_keys: list[torch.Tensor] = []
        self.own_values: list[torch.Tensor] = []

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Returns the attention of this step's queries, and keeps the keys and values for the next ones."""
        if self.true_keys_TKD is None:
            self.true_keys_TKD, self.true_values_TKD = k, v
            self.prefixes = self._make_prefixes(q.dtype)
            q = q[self.entries_R]
        else:
            self.own_keys.append(k)
            self.own_values.append(v)
        return PrefixAndDiagonal.apply(
            self.prefixes[len(self.own_keys)],
            q.contiguous(),
            self.true_keys_TKD,
            self.true_values_TKD,
            _stacked(self.own_keys, k),
            _stacked(self.own_values, v),
        )

    def _make_prefixes(self, dtype: torch.dtype) -> Sequence[Prefix]:
        tokens, num_rows = self.batch.attention, self.batch.response_lengths
        return make_prefixes(tokens, num_rows, tokens.positions_T[self.entries_R], self.steps, dtype)


def _stacked(own: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.stack(own) if own else like.new_empty(0, *like.shape)
