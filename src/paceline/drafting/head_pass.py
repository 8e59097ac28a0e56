"""An eagle head along a text, several draft steps deep, and its gradients written out.

    forward     captured ──fc──▶ g ──▶ layer ──▶ x_0 ──shifted──▶ layer ──▶ x_1 ──▶ ..      states, by step
    backward                     ◀────── d x_0 ◀───────────────── d x_1 ◀── ..

What a step computes is what `unroll.py` says. With a few thousand rows a GPU needs less time for most of it
than torch needs to launch it, so learning costs by the operation: written out, a slice of five steps makes
some 400 of them where autograd makes 700 of `unroll`. Inputs that all steps share are projected once, and a
weight's gradient is one product over all steps, whose sum is rounded once.

The backward pass of step j leaves gradients for the keys of earlier steps, so it runs from the last one to
the first. Shape letters as in `unroll.py` and `draft_attention.py`; U steps, N columns of the packed qkv.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from paceline.drafting.draft_attention import Prefix, attend, make_prefixes
from paceline.drafting.eagle_head import EagleHead
from paceline.kernels.draft_diagonal import join_diagonal_backward
from paceline.kernels.norm_training import fork_norm, rms_norm_backward
from paceline.kernels.rope_training import rotate_qk, rotate_qk_backward
from paceline.kernels.swiglu_training import silu_multiply_backward, silu_multiply_forward
from paceline.learning.batch import MicroBatch
from paceline.policy.decoder import RMSNorm


@dataclass
class _Step:
    """What the backward pass needs of one step."""

    prefix: Prefix
    residual_RE: torch.Tensor
    q_RHD: torch.Tensor
    out_RHD: torch.Tensor
    lse_RH: torch.Tensor
    total_RE: torch.Tensor  # the residual after attention
    normed_RE: torch.Tensor  # what enters the feed-forward
    hidden_RE: torch.Tensor | None = None  # the normed residual that enters qkv; the first step's is by token


class HeadPass:
    """One pass of a head along a batch: the states of all steps, then the gradients of its parameters."""

    @torch.no_grad()
    def __init__(
        self,
        head: EagleHead,
        captured: list[torch.Tensor],
        embedding_VE: torch.Tensor,
        batch: MicroBatch,
        steps: int,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`check` is called after every step, in both directions; what it raises ends the pass."""
        self.head = head
        self.check = check
        layer = head.config.layer
        self.heads, self.kv_heads = layer.num_heads, layer.num_kv_heads
        positions_T = batch.attention.positions_T
        self.entries_R = (batch.predictors_R - 1).clamp(min=0)
        self.rope_T2C = head.rope_table[positions_T]
        self.rope_R2C = self.rope_T2C[self.entries_R]
        self.prefixes = make_prefixes(
            batch.attention,
            batch.response_lengths,
            positions_T[self.entries_R],
            steps,
            head.fc.weight.dtype,
        )
        self._project_texts(captured, F.embedding(batch.tokens_T.roll(-1), embedding_VE.detach()))
        rows, dtype = len(self.entries_R), head.fc.weight.dtype
        own = (steps - 1, rows, self.kv_heads, layer.head_dim)
        # Keys and values that steps after the first make, before they are shifted.
        self.own_k_URKD = self.k_TKD.new_empty(own)
        self.own_v_URKD = self.k_TKD.new_empty(own)
        self.gate_up_UR2F = self.k_TKD.new_empty(steps, rows, 2 * layer.intermediate_size)
        self.inner_URF = self.k_TKD.new_empty(steps, rows, layer.intermediate_size)
        self.states_URE = torch.empty(steps, rows, layer.hidden_size, dtype=dtype, device=self.k_TKD.device)
        self.steps: list[_Step] = []
        for step in range(steps):
            if step:
                self._run_further(step)
            else:
                self._run_first()
            self.check()

    def _project_texts(self, captured: list[torch.Tensor], following_TE: torch.Tensor) -> None:
        """Computes the first step's inputs: queries, keys and values of all tokens."""
        head = self.head
        self.following_TE = following_TE
        self.captured_TC = torch.cat(captured, dim=-1)
        self.features_TE = F.linear(self.captured_TC, head.fc.weight)
        self.embedded_TE = _norm(following_TE, head.embedding_norm)
        hidden_TE = _norm(self.features_TE, head.hidden_norm)
        self.inputs_T2E = torch.cat((self.embedded_TE, hidden_TE), dim=-1)
        qkv_TN = F.linear(self.inputs_T2E, head.attention.qkv.weight)
        self.q_THD, self.k_TKD, self.v_TKD = self._rotated(qkv_TN, self.rope_T2C)

    def _rotated(self, qkv_RN: torch.Tensor, rope_R2C: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q_RHD, k_RKD = rotate_qk(qkv_RN, rope_R2C, self.heads, self.kv_heads, None, None, 0.0)
        return q_RHD, k_RKD, qkv_RN.unflatten(1, (-1, q_RHD.shape[-1]))[:, self.heads + self.kv_heads :]

    def _run_first(self) -> None:
        self._finish(0, self.features_TE[self.entries_R], self.q_THD[self.entries_R])
        del self.q_THD
        # Of the packed weight [ for embeddings | for features ], what further steps add to.
        self.embedded_RE = self.embedded_TE[self.entries_R]
        self.embedding_part_RN = F.linear(self.embedded_RE, self._qkv_weights()[0])

    def _qkv_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.head.attention.qkv.weight.chunk(2, dim=1)

    def _run_further(self, step: int) -> None:
        residual_RE = self.states_URE[step - 1].roll(1, 0)
        hidden_RE = _norm(residual_RE, self.head.hidden_norm)
        qkv_RN = torch.addmm(self.embedding_part_RN, hidden_RE, self._qkv_weights()[1].t())
        q_RHD, k_RKD, v_RKD = self._rotated(qkv_RN, self.rope_R2C)
        self.own_k_URKD[step - 1] = k_RKD
        self.own_v_URKD[step - 1] = v_RKD
        self._finish(step, residual_RE, q_RHD, hidden_RE)

    def _finish(
        self,
        step: int,
        residual_RE: torch.Tensor,
        q_RHD: torch.Tensor,
        hidden_RE: torch.Tensor | None = None,
    ) -> None:
        """Computes attention and feed-forward of a step, and keeps what they leave."""
        head, prefix = self.head, self.prefixes[step]
        own = self.own_k_URKD[:step], self.own_v_URKD[:step]
        out_RHD, lse_RH = attend(prefix, q_RHD, self.k_TKD, self.v_TKD, *own)
        attended_RE = F.linear(out_RHD.flatten(1), head.attention.output.weight)
        norm = head.feed_forward_norm
        normed_RE, total_RE = fork_norm(attended_RE, residual_RE, norm.weight, norm.eps)
        gate_up_R2F, inner_RF = self.gate_up_UR2F[step], self.inner_URF[step]
        torch.mm(normed_RE, head.feed_forward.gate_up.weight.t(), out=gate_up_R2F)
        silu_multiply_forward(gate_up_R2F, inner_RF)
        torch.addmm(total_RE, inner_RF, head.feed_forward.down.weight.t(), out=self.states_URE[step])
        self.steps.append(_Step(prefix, residual_RE, q_RHD, out_RHD, lse_RH, total_RE, normed_RE, hidden_RE))

    @torch.no_grad()
    def backward(self, d_URE: torch.Tensor) -> None:
        """Adds the parameters' gradients, given those of the states, which are written over; works once."""
        self.d_URE = d_URE
        self.d_own_k_URKD = torch.zeros_like(self.own_k_URKD, dtype=self.steps[0].lse_RH.dtype)
        self.d_own_v_URKD = torch.zeros_like(self.d_own_k_URKD)
        d_k_TKD, d_v_TKD = torch.zeros_like(self.k_TKD), torch.zeros_like(self.k_TKD)
        d_totals: list[torch.Tensor] = []  # from the last step to the first, as the next one
        d_projected: list[torch.Tensor] = []
        for step in reversed(range(len(self.steps))):
            d_total_RE = self._feed_forward_backward(step)
            d_totals.append(d_total_RE)
            d_q_RHD, d_k, d_v = self._attention_backward(step, d_total_RE)
            d_k_TKD += d_k  # every step's queries attend to the text's keys
            d_v_TKD += d_v
            if step:
                d_projected.append(self._projection_backward(step, d_q_RHD, d_total_RE))
            self.check()
        self._products_backward(d_totals[::-1])
        del self.gate_up_UR2F, self.inner_URF  # what comes next holds as much
        d_qkv_TN = self._first_backward(d_q_RHD, d_k_TKD, d_v_TKD)
        self._texts_backward(d_qkv_TN, d_totals[-1], d_projected)

    def _feed_forward_backward(self, step: int) -> torch.Tensor:
        """Returns the gradient of the residual after attention."""
        head, kept = self.head, self.steps[step]
        d_inner_RF = self.d_URE[step] @ head.feed_forward.down.weight
        d_gate_up_R2F = silu_multiply_backward(d_inner_RF, self.gate_up_UR2F[step], in_place=True)
        d_normed_RE = d_gate_up_R2F @ head.feed_forward.gate_up.weight
        return norm_backward(d_normed_RE, self.d_URE[step], kept.total_RE, head.feed_forward_norm)

    def _attention_backward(self, step: int, d_total_RE: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the gradients of the queries, and of the text's keys and values by way of this step."""
        kept = self.steps[step]
        d_RHD = (d_total_RE @ self.head.attention.output.weight).view_as(kept.out_RHD)
        d_q_RHD, d_k_TKD, d_v_TKD = kept.prefix.backward(
            d_RHD, kept.q_RHD, self.k_TKD, self.v_TKD, kept.out_RHD, kept.lse_RH
        )
        if step:
            own = self.own_k_URKD[:step], self.own_v_URKD[:step]
            d_own = self.d_own_k_URKD[:step], self.d_own_v_URKD[:step]
            join_diagonal_backward(d_RHD, kept.q_RHD, *own, kept.out_RHD, kept.lse_RH, d_q_RHD, *d_own)
        return d_q_RHD, d_k_TKD, d_v_TKD

    def _projection_backward(
        self, step: int, d_q_RHD: torch.Tensor, d_total_RE: torch.Tensor
    ) -> torch.Tensor:
        """Adds to the gradient of the state before; returns that of this step's qkv."""
        # Later steps have added what they take of this one's key and value.
        d_k_RKD, d_v_RKD = self.d_own_k_URKD[step - 1], self.d_own_v_URKD[step - 1]
        d_qkv_RN = rotate_qk_backward(d_q_RHD, d_k_RKD, d_v_RKD, None, self.rope_R2C, None, None, 0.0)[0]
        d_hidden_RE = d_qkv_RN @ self._qkv_weights()[1]
        residual_RE = self.steps[step].residual_RE
        d_residual_RE = norm_backward(d_hidden_RE, d_total_RE, residual_RE, self.head.hidden_norm)
        self.d_URE[step - 1] += d_residual_RE.roll(-1, 0)
        return d_qkv_RN

    def _first_backward(
        self, d_q_RHD: torch.Tensor, d_k_TKD: torch.Tensor, d_v_TKD: torch.Tensor
    ) -> torch.Tensor:
        """Returns the gradient of all tokens' qkv."""
        d_q_THD = d_q_RHD.new_zeros(len(self.rope_T2C), *d_q_RHD.shape[1:])
        d_q_THD.index_add_(0, self.entries_R, d_q_RHD)
        return rotate_qk_backward(d_q_THD, d_k_TKD, d_v_TKD, None, self.rope_T2C, None, None, 0.0)[0]

    def _texts_backward(
        self, d_qkv_TN: torch.Tensor, d_total_RE: torch.Tensor, d_projected: list[torch.Tensor]
    ) -> None:
        """Adds the gradients of fc, of qkv and of both norms before it."""
        head = self.head
        for_embeddings, for_features = self._qkv_weights()
        gradient = d_qkv_TN.t() @ self.inputs_T2E
        d_embedded_TE = d_qkv_TN @ for_embeddings
        if d_projected:
            hidden = torch.cat([kept.hidden_RE for kept in self.steps[:0:-1]])
            of_embeddings, of_features = gradient.chunk(2, dim=1)
            of_features += torch.cat(d_projected).t() @ hidden
            d_summed_RN = torch.stack(d_projected).sum(0)
            of_embeddings += d_summed_RN.t() @ self.embedded_RE
            d_embedded_TE.index_add_(0, self.entries_R, d_summed_RN @ for_embeddings)
        add_gradient(head.attention.qkv.weight, gradient)
        norm_backward(d_embedded_TE, None, self.following_TE, head.embedding_norm)
        d_residual_TE = d_total_RE.new_zeros(self.features_TE.shape)
        d_residual_TE.index_add_(0, self.entries_R, d_total_RE)
        d_hidden_TE = d_qkv_TN @ for_features
        d_features_TE = norm_backward(d_hidden_TE, d_residual_TE, self.features_TE, head.hidden_norm)
        add_gradient(head.fc.weight, d_features_TE.t() @ self.captured_TC)

    def _products_backward(self, d_totals: list[torch.Tensor]) -> None:
        """Adds the gradients of the products that every step makes."""
        head = self.head
        normed = torch.cat([kept.normed_RE for kept in self.steps])
        outs = torch.cat([kept.out_RHD.flatten(1) for kept in self.steps])
        for weight, d_outputs, inputs in (
            (head.feed_forward.down.weight, self.d_URE.flatten(0, 1), self.inner_URF.flatten(0, 1)),
            (head.feed_forward.gate_up.weight, self.gate_up_UR2F.flatten(0, 1), normed),
            (head.attention.output.weight, torch.cat(d_totals), outs),
        ):
            add_gradient(weight, d_outputs.t() @ inputs)


def _norm(x_RE: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    return fork_norm(x_RE, None, norm.weight, norm.eps)[0]


def norm_backward(
    d_normed_RE: torch.Tensor, d_total_RE: torch.Tensor | None, total_RE: torch.Tensor, norm: RMSNorm
) -> torch.Tensor:
    """Adds the norm's gradient; returns that of what was normed, with what reached it otherwise."""
    d_RE, d_weight_E = rms_norm_backward(d_normed_RE, d_total_RE, total_RE, norm.weight, norm.eps)
    add_gradient(norm.weight, d_weight_E)
    return d_RE


def add_gradient(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    """Adds to a parameter's gradient; a first one is kept as it is."""
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
