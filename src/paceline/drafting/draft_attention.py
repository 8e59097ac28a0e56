"""Attention of a draft's own steps, along whole texts, in memory that grows with their length alone.

A query of step j at entry q sees two kinds of keys (`unroll.py` says why):

    a prefix       step 0's keys up to entry q - j, thousands of them
    a diagonal     of each step i = 1 .. j the one key at entry q - j + i; step 0 has none

Each is attended to by itself, and their results are joined by their sums of exponentials. The prefix is
causal attention between the last rows of a sequence and its first entries, so a flash kernel computes it; the
backward pass hands that kernel the result and the log-sum-exp of the whole, which is all that it needs to
know about the keys that it does not see (as ring attention does, arXiv 2310.01889). Elsewhere the prefix is
computed a block of queries at a time, and computed again in the backward pass.

In names, R runs over the queries of all sequences, K over the keys that the prefix keeps of them, S over the
draft's own steps so far.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from paceline.policy.attention import PackedAttention, deterministic_flash
from paceline.policy.states import to_device

# Scores that a block of queries holds at once, where there is no flash kernel: 64 MiB in float32.
BLOCK_SCORES = 1 << 24

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Prefix(Protocol):
    """Attention of one step's queries to the keys of step 0 that they see."""

    def forward(
        self, q_RHD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the result `[R, H, D]`, and the log-sum-exp of the scores `[R, H]`: -inf without keys."""
        ...

    def backward(
        self,
        grad_RHD: torch.Tensor,
        q_RHD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        out_RHD: torch.Tensor,
        lse_RH: torch.Tensor,
    ) -> Gradients:
        """Returns the gradients of q, k and v, given result and log-sum-exp over all keys of each query."""
        ...


def make_prefix(
    tokens: PackedAttention, rows: PackedAttention, positions_R: torch.Tensor, step: int, dtype: torch.dtype
) -> Prefix:
    """Returns the prefix attention of a step; `rows` packs the queries and `tokens` the keys."""
    if has_flash(positions_R.device.type, dtype):
        return FlashPrefix(tokens.lengths, rows.lengths, step, positions_R.device)
    return BlockedPrefix(tokens, rows, positions_R, step)


def has_flash(device: str, dtype: torch.dtype) -> bool:
    """Returns whether the prefix is computed by a flash kernel, which needs no padding."""
    return device != "cpu" and dtype in (torch.bfloat16, torch.float16)


class FlashPrefix:
    """The variable-length flash kernel, whose causal mask is aligned to the ends of queries and keys.

    The last query of a sequence of n tokens is at entry n - 3, so it sees the keys up to n - 3 - step.
    """

    def __init__(
        self, lengths: Sequence[int], num_rows: Sequence[int], step: int, device: torch.device
    ) -> None:
        # In numpy: a step of every draft makes these, and tensors of a few numbers take longer.
        lengths_B, rows_B = np.array(lengths), np.array(num_rows)
        kept_B = np.maximum(lengths_B - 2 - step, 0)
        starts_B = np.cumsum(lengths_B) - lengths_B
        ends_B = lengths_B - 2
        self.keys_K = to_device(_ranges(starts_B, starts_B + kept_B), device)
        self.sees_R1 = to_device(_ranges(ends_B - rows_B, ends_B) >= step, device).unsqueeze(-1)
        bounds = [to_device(_boundaries(counts_B), device) for counts_B in (rows_B, kept_B)]
        self.shape = [*bounds, int(rows_B.max()), int(kept_B.max())]
        self.random: tuple[torch.Tensor, ...] = ()  # states of a generator that is not used

    def forward(
        self, q_RHD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Prefix`."""
        k_KHD, v_KHD = k_THD[self.keys_K], v_THD[self.keys_K]
        out_RHD, lse_HR, *random, _ = torch.ops.aten._flash_attention_forward(
            q_RHD, k_KHD, v_KHD, *self.shape, 0.0, True, False, scale=q_RHD.shape[-1] ** -0.5
        )
        self.random = tuple(random)
        sees_R11 = self.sees_R1.unsqueeze(-1)
        return torch.where(sees_R11, out_RHD, 0.0), torch.where(self.sees_R1, lse_HR.t(), -torch.inf)

    def backward(
        self,
        grad_RHD: torch.Tensor,
        q_RHD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        out_RHD: torch.Tensor,
        lse_RH: torch.Tensor,
    ) -> Gradients:
        """See `Prefix`."""
        with deterministic_flash(True):
            grads = torch.ops.aten._flash_attention_backward(
                grad_RHD.contiguous(),
                q_RHD,
                k_THD[self.keys_K],
                v_THD[self.keys_K],
                out_RHD,
                lse_RH.t().contiguous(),
                *self.shape,
                0.0,
                True,
                *self.random,
                scale=q_RHD.shape[-1] ** -0.5,
            )
        grad_q_RHD = torch.where(self.sees_R1.unsqueeze(-1), grads[0], 0.0)
        grad_k, grad_v = (torch.zeros_like(k_THD).index_copy(0, self.keys_K, grad) for grad in grads[1:])
        return grad_q_RHD, grad_k, grad_v


def _ranges(starts_B: np.ndarray, stops_B: np.ndarray) -> torch.Tensor:
    parts = [np.arange(start, stop) for start, stop in zip(starts_B, stops_B, strict=True)]
    return torch.from_numpy(np.concatenate(parts))


def _boundaries(counts_B: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(([0], np.cumsum(counts_B))).astype(np.int32))


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
        self, q_RHD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Prefix`."""
        k_BHLD, v_BHLD = self.tokens.pad(k_THD), self.tokens.pad(v_THD)
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
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        out_RHD: torch.Tensor,
        lse_RH: torch.Tensor,
    ) -> Gradients:
        """See `Prefix`."""
        k_BHLD, v_BHLD = self.tokens.pad(k_THD), self.tokens.pad(v_THD)
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
        return (
            self.rows.unpad(torch.cat(grads_q, 2)),
            self.tokens.unpad(grad_k_BHLD),
            self.tokens.unpad(grad_v_BHLD),
        )

    def _blocks(self, q_BHLD: torch.Tensor) -> list[tuple[slice, torch.Tensor]]:
        size = max(1, BLOCK_SCORES // (q_BHLD.shape[0] * q_BHLD.shape[1] * self.tokens.longest))
        starts = range(0, q_BHLD.shape[2], size)
        return [(slice(start, start + size), q_BHLD[:, :, start : start + size]) for start in starts]

    def _scores(self, rows: slice, q_BHQD: torch.Tensor, k_BHLD: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(q_BHQD.dtype, torch.float32)
        scores_BHQL = (q_BHQD @ k_BHLD.transpose(-1, -2)).to(wide) * q_BHQD.shape[-1] ** -0.5
        hidden_B1QL = self.keys_L > self.positions_B1L1[:, :, rows] - self.step
        return scores_BHQL.masked_fill(hidden_B1QL, -torch.inf)


class PrefixAndDiagonal(torch.autograd.Function):
    """Attention to a prefix and to the diagonal of own keys, joined."""

    @staticmethod
    def forward(
        ctx,
        prefix: Prefix,
        q_RHD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        own_k_SRHD: torch.Tensor,
        own_v_SRHD: torch.Tensor,
    ) -> torch.Tensor:
        """Returns the result `[R, H, D]`."""
        prefix_RHD, prefix_lse_RH = prefix.forward(q_RHD, k_THD, v_THD)
        own_SRH = (q_RHD * own_k_SRHD).sum(-1).to(prefix_lse_RH.dtype) * q_RHD.shape[-1] ** -0.5
        lse_RH = torch.logaddexp(prefix_lse_RH, own_SRH.logsumexp(0))
        # Without any key the result is zero, not 0 / 0.
        lse_RH = lse_RH.masked_fill(lse_RH == -torch.inf, 0.0)
        own_weights_SRH = (own_SRH - lse_RH).exp()
        share_RH1 = (prefix_lse_RH - lse_RH).exp().unsqueeze(-1)
        own_RHD = (own_weights_SRH.unsqueeze(-1) * own_v_SRHD).sum(0)
        out_RHD = (share_RH1 * prefix_RHD + own_RHD).to(q_RHD.dtype)
        ctx.prefix = prefix
        ctx.save_for_backward(q_RHD, k_THD, v_THD, own_k_SRHD, own_v_SRHD, own_weights_SRH, out_RHD, lse_RH)
        return out_RHD

    @staticmethod
    def backward(ctx, grad_RHD: torch.Tensor):
        """Returns the gradients of q, the prefix's k and v, and the own ones."""
        q_RHD, k_THD, v_THD, own_k_SRHD, own_v_SRHD, own_weights_SRH, out_RHD, lse_RH = ctx.saved_tensors
        grad_q, grad_k, grad_v = ctx.prefix.backward(grad_RHD, q_RHD, k_THD, v_THD, out_RHD, lse_RH)
        whole_RH = (grad_RHD * out_RHD).sum(-1).to(lse_RH.dtype)
        grad_weights_SRH = (grad_RHD * own_v_SRHD).sum(-1).to(lse_RH.dtype)
        grad_scores_SRH = own_weights_SRH * (grad_weights_SRH - whole_RH) * q_RHD.shape[-1] ** -0.5
        scores_SRH1 = grad_scores_SRH.to(q_RHD.dtype).unsqueeze(-1)
        grad_q = grad_q + (scores_SRH1 * own_k_SRHD).sum(0)
        grad_own_v = own_weights_SRH.to(q_RHD.dtype).unsqueeze(-1) * grad_RHD
        return None, grad_q, grad_k, grad_v, scores_SRH1 * q_RHD, grad_own_v
