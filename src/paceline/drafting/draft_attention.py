"""Attention of a draft's own steps, along whole texts, in memory that grows with their length alone.

A query of step j at entry q sees two kinds of keys (`unroll.py` says why):

    a prefix       step 0's keys up to entry q - j, thousands of them
    a diagonal     of each step i = 1 .. j the one key at entry q - j + i; step 0 has none

Each is attended to by itself, and their results are joined by their sums of exponentials. The prefix is
causal attention between the last rows of a sequence and its first entries, so a flash kernel computes it; the
backward pass gives that kernel the result and the log-sum-exp of the whole, which is all that it needs to
know about the keys that it does not see (as ring attention does, arXiv 2310.01889). Elsewhere the prefix is
computed a block of queries at a time, and computed again in the backward pass.

In names, R runs over the queries of all sequences, P over those with others between, S over the draft's own
steps so far; queries have H heads, keys and values K of them, each for G of the queries'.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from paceline.kernels.draft_diagonal import join_diagonal, join_diagonal_backward
from paceline.policy.attention import PackedAttention, deterministic_flash
from paceline.policy.states import to_device

# Scores that a block of queries holds at once, where there is no flash kernel: 64 MiB in float32.
BLOCK_SCORES = 1 << 24

# The variable-length flash kernels, with grouped heads.
flash_forward = torch.ops.aten._flash_attention_forward
flash_backward = torch.ops.aten._flash_attention_backward

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Prefix(Protocol):
    """Attention of one step's queries to the keys of step 0 that they see."""

    def forward(
        self, q_RHD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the result `[R, H, D]`, and the log-sum-exp of the scores `[R, H]`: -inf without keys."""
        ...

    def backward(
        self,
        grad_RHD: torch.Tensor,
        q_RHD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        out_RHD: torch.Tensor,
        lse_RH: torch.Tensor,
    ) -> Gradients:
        """Returns the gradients of q, k and v, given result and log-sum-exp over all keys of each query."""
        ...


def make_prefixes(
    tokens: PackedAttention,
    num_rows: Sequence[int],
    positions_R: torch.Tensor,
    steps: int,
    dtype: torch.dtype,
) -> Sequence[Prefix]:
    """Returns the prefix attention of each step; `tokens` packs the keys, `num_rows` are their queries."""
    if has_flash(positions_R.device.type, dtype):
        return flash_prefixes(tokens.lengths, num_rows, steps, positions_R.device)
    rows = PackedAttention(list(num_rows), positions_R.device)
    return [BlockedPrefix(tokens, rows, positions_R, step) for step in range(steps)]


def has_flash(device: str, dtype: torch.dtype) -> bool:
    """Returns whether the prefix is computed by a flash kernel, which needs no padding."""
    return device != "cpu" and dtype in (torch.bfloat16, torch.float16)


@dataclass
class FlashPrefix:
    """The variable-length flash kernel, whose causal mask is aligned to the ends of queries and keys.

    The last query of a sequence of n tokens is at entry n - 3, so it sees the keys up to n - 3 - step. With 2
    + step queries of zeros behind its own a sequence has this mask, and its keys stay where they are.
    """

    places_R: torch.Tensor  # of the queries, among those with zeros
    blind_R1: torch.Tensor | None  # whether there is no key; None: each of them has one
    query_bounds: torch.Tensor
    key_bounds: torch.Tensor
    num_places: int
    longest: tuple[int, int]  # of queries and of keys
    random: tuple[torch.Tensor, ...] = ()  # states of a generator that is not used

    def forward(
        self, q_RHD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out_PHD, lse_HP, *random, _ = flash_forward(
            self._spread(q_RHD),
            k_TKD,
            v_TKD,
            self.query_bounds,
            self.key_bounds,
            *self.longest,
            0.0,
            True,
            False,
            scale=q_RHD.shape[-1] ** -0.5,
        )
        self.random = tuple(random)
        lse_RH = lse_HP.t().contiguous()[self.places_R]
        if self.blind_R1 is not None:
            lse_RH.masked_fill_(self.blind_R1, -torch.inf)
        return self._gather(out_PHD), lse_RH

    def backward(
        self,
        grad_RHD: torch.Tensor,
        q_RHD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        out_RHD: torch.Tensor,
        lse_RH: torch.Tensor,
    ) -> Gradients:
        """The gradient of the added rows is zero, so they contribute none."""
        # Before the kernel's setting, under which torch would sort places that are all different.
        grad_PHD, q_PHD, out_PHD = map(self._spread, (grad_RHD, q_RHD, out_RHD))
        lse_HP = self._spread(lse_RH).t().contiguous()
        with deterministic_flash(True):
            grad_q_PHD, grad_k_TKD, grad_v_TKD = flash_backward(
                grad_PHD,
                q_PHD,
                k_TKD,
                v_TKD,
                out_PHD,
                lse_HP,
                self.query_bounds,
                self.key_bounds,
                *self.longest,
                0.0,
                True,
                *self.random,
                scale=q_RHD.shape[-1] ** -0.5,
            )
        return self._gather(grad_q_PHD), grad_k_TKD, grad_v_TKD

    def _spread(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns queries, or what belongs to them, with zeros between."""
        return rows.new_zeros(self.num_places, *rows.shape[1:]).index_copy_(0, self.places_R, rows)

    def _gather(self, x_PHD: torch.Tensor) -> torch.Tensor:
        """Undoes `_spread`; zeros for queries without a key."""
        x_RHD = x_PHD[self.places_R]
        return x_RHD if self.blind_R1 is None else x_RHD.masked_fill_(self.blind_R1.unsqueeze(-1), 0.0)


def flash_prefixes(
    lengths: Sequence[int], num_rows: Sequence[int], steps: int, device: torch.device
) -> list[FlashPrefix]:
    """Returns the prefix of each step, for sequences of so many tokens with queries at their ends."""
    # In numpy, and one copy for all steps: tensors of a few numbers take longer than their use.
    lengths_B, rows_B = np.array(lengths), np.array(num_rows)
    sequences_R = np.repeat(np.arange(len(rows_B)), rows_B)
    entries_R = np.concatenate([np.arange(n - 2 - r, n - 2) for n, r in zip(lengths, num_rows, strict=True)])
    added = 2 + np.arange(steps)  # queries of zeros, by step
    places_UR = np.arange(len(sequences_R)) + added[:, None] * sequences_R
    places = to_device(torch.from_numpy(places_UR), device).unbind()
    blind_UR = entries_R < np.arange(steps)[:, None]
    blind = to_device(torch.from_numpy(blind_UR), device).unsqueeze(-1) if blind_UR.any() else None
    bounds = [_boundaries(lengths_B), *(_boundaries(rows_B + more) for more in added)]
    keys, *queries = to_device(torch.from_numpy(np.stack(bounds)), device).unbind()
    return [
        FlashPrefix(
            places[step],
            None if blind is None else blind[step],
            queries[step],
            keys,
            num_places=int(rows_B.sum() + more * len(rows_B)),
            longest=(int(rows_B.max() + more), int(lengths_B.max())),
        )
        for step, more in enumerate(added)
    ]


def _boundaries(counts_B: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(counts_B))).astype(np.int32)


class BlockedPrefix:
    """Plain products over padded sequences, a block of queries at a time."""

    def __init__(
        self, tokens: PackedAttention, rows: PackedAttention, positions_R: torch.Tensor, step: int
    ) -> None:
        self.tokens = tokens
        self.rows = rows
        self.step = step
        self.positions_B1L1 = rows.pad(positions_R[:, None, None])
        self.keys_L = torch.arange(tokens.longest, device=positions_R.device)

    def forward(
        self, q_RHD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k_BHLD, v_BHLD = (self.tokens.pad(_for_heads(x_TKD, q_RHD)) for x_TKD in (k_TKD, v_TKD))
        outs, sums = [], []
        for rows, q_BHQD in self._blocks(self.rows.pad(q_RHD)):
            scores_BHQL = self._scores(rows, q_BHQD, k_BHLD)
            lse_BHQ1 = scores_BHQL.logsumexp(-1, keepdim=True)
            weights_BHQL = (scores_BHQL - torch.where(lse_BHQ1.isinf(), 0.0, lse_BHQ1)).exp()
            outs.append(weights_BHQL.to(q_RHD.dtype) @ v_BHLD)
            sums.append(lse_BHQ1)
        return self.rows.unpad(torch.cat(outs, 2)), self.rows.unpad(torch.cat(sums, 2)).squeeze(-1)

    def backward(
        self,
        grad_RHD: torch.Tensor,
        q_RHD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        out_RHD: torch.Tensor,
        lse_RH: torch.Tensor,
    ) -> Gradients:
        k_BHLD, v_BHLD = (self.tokens.pad(_for_heads(x_TKD, q_RHD)) for x_TKD in (k_TKD, v_TKD))
        grad_BHLD, lse_BHL1 = self.rows.pad(grad_RHD), self.rows.pad(lse_RH.unsqueeze(-1))
        own_BHL1 = self.rows.pad((grad_RHD * out_RHD).sum(-1, keepdim=True).to(lse_RH.dtype))
        grads_q = []
        grad_k_BHLD, grad_v_BHLD = torch.zeros_like(k_BHLD), torch.zeros_like(v_BHLD)
        scale = q_RHD.shape[-1] ** -0.5
        for rows, q_BHQD in self._blocks(self.rows.pad(q_RHD)):
            weights_BHQL = (self._scores(rows, q_BHQD, k_BHLD) - lse_BHL1[:, :, rows]).exp()
            grad_BHQD = grad_BHLD[:, :, rows]
            grad_v_BHLD += weights_BHQL.to(q_RHD.dtype).transpose(-1, -2) @ grad_BHQD
            grad_weights = (grad_BHQD @ v_BHLD.transpose(-1, -2)).to(weights_BHQL.dtype)
            grad_scores = (weights_BHQL * (grad_weights - own_BHL1[:, :, rows]) * scale).to(q_RHD.dtype)
            grads_q.append(grad_scores @ k_BHLD)
            grad_k_BHLD += grad_scores.transpose(-1, -2) @ q_BHQD
        grad_k_TKD, grad_v_TKD = (
            self.tokens.unpad(grad_BHLD).unflatten(1, (k_TKD.shape[1], -1)).sum(2)
            for grad_BHLD in (grad_k_BHLD, grad_v_BHLD)
        )
        return self.rows.unpad(torch.cat(grads_q, 2)), grad_k_TKD, grad_v_TKD

    def _blocks(self, q_BHLD: torch.Tensor) -> list[tuple[slice, torch.Tensor]]:
        size = max(1, BLOCK_SCORES // (q_BHLD.shape[0] * q_BHLD.shape[1] * self.tokens.longest))
        starts = range(0, q_BHLD.shape[2], size)
        return [(slice(start, start + size), q_BHLD[:, :, start : start + size]) for start in starts]

    def _scores(self, rows: slice, q_BHQD: torch.Tensor, k_BHLD: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(q_BHQD.dtype, torch.float32)
        scores_BHQL = (q_BHQD @ k_BHLD.transpose(-1, -2)).to(wide) * q_BHQD.shape[-1] ** -0.5
        hidden_B1QL = self.keys_L > self.positions_B1L1[:, :, rows] - self.step
        return scores_BHQL.masked_fill(hidden_B1QL, -torch.inf)


def attend(
    prefix: Prefix,
    q_RHD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    own_k_SRKD: torch.Tensor,
    own_v_SRKD: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the result `[R, H, D]` and the log-sum-exp `[R, H]` of a step's queries.

    Own keys and values lie as their steps made them: the diagonal is taken out of them here. Without any key
    the result is zero, and so is the log-sum-exp, which makes gradients of zero of it.
    """
    prefix_RHD, prefix_lse_RH = prefix.forward(q_RHD, k_TKD, v_TKD)
    if not len(own_k_SRKD):
        return prefix_RHD, prefix_lse_RH.masked_fill(prefix_lse_RH == -torch.inf, 0.0)
    return join_diagonal(prefix_RHD, prefix_lse_RH, q_RHD, own_k_SRKD, own_v_SRKD)


class PrefixAndDiagonal(torch.autograd.Function):
    """`attend` as an autograd function."""

    @staticmethod
    def forward(
        ctx,
        prefix: Prefix,
        q_RHD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        own_k_SRKD: torch.Tensor,
        own_v_SRKD: torch.Tensor,
    ) -> torch.Tensor:
        """Returns the result `[R, H, D]`."""
        ctx.prefix = prefix
        out_RHD, lse_RH = attend(prefix, q_RHD, k_TKD, v_TKD, own_k_SRKD, own_v_SRKD)
        ctx.save_for_backward(q_RHD, k_TKD, v_TKD, own_k_SRKD, own_v_SRKD, out_RHD, lse_RH)
        return out_RHD

    @staticmethod
    def backward(ctx, grad_RHD: torch.Tensor):
        """Returns the gradients of q, the prefix's k and v, and the own ones."""
        q_RHD, k_TKD, v_TKD, own_k_SRKD, own_v_SRKD, out_RHD, lse_RH = ctx.saved_tensors
        grad_RHD = grad_RHD.contiguous()
        grad_q, grad_k, grad_v = ctx.prefix.backward(grad_RHD, q_RHD, k_TKD, v_TKD, out_RHD, lse_RH)
        grads_own = [torch.zeros_like(own, dtype=lse_RH.dtype) for own in (own_k_SRKD, own_v_SRKD)]
        if len(own_k_SRKD):
            join_diagonal_backward(
                grad_RHD, q_RHD, own_k_SRKD, own_v_SRKD, out_RHD, lse_RH, grad_q, *grads_own
            )
        return None, grad_q, grad_k, grad_v, *(grad.to(own_k_SRKD.dtype) for grad in grads_own)


def _for_heads(x_TKD: torch.Tensor, q_RHD: torch.Tensor) -> torch.Tensor:
    return x_TKD.repeat_interleave(q_RHD.shape[1] // x_TKD.shape[1], 1)
