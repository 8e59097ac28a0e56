"""The FP8 policy by its formula: what an engine that rolls out in FP8 should sample from.

    stored tensors                   wide arithmetic, rounded to the policy's own type: the outputs of
                                     products, norms, SwiGLU, attention, residual additions
    rows before a product in FP8     groups of 128 columns: scale = max(largest magnitude, 1e-10) / 448,
                                     E4M3(x / scale) x scale
    weights of such products         the same in blocks of 128 x 128, scale up to the next power of two
    K and V, with an FP8 cache       the same with the scale that calibration gave their layer and head;
                                     queries stay as they are
    embeddings, norms, router, head  as they are

It is written without the engine's code. Sums run in float64 (float32 on a GPU). Rounding what is stored
belongs to the policy: in bf16, E4M3 of a number that was not rounded to bf16 first is often another one, and
leaving that out puts this policy twenty times as far from the engine.

E4M3 is coarse, so a sum that differs in its last digits can fall on the other side of a rounding boundary; a
key that did stays in the cache and moves every later token. No arithmetic is the right one there. `perturbed`
bounds that: the same policy with whatever is stored moved by about what the engine's arithmetic
may be off. Noise depends on the position and not on the text, so that texts with a common beginning are moved
alike, as they are in an engine that computes it once.

Shape letters: T tokens, H heads, D head dimension, E hidden size, N and K a matrix's rows and columns, X
experts.
"""

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from paceline.policy.decoder import Attend, Attention, Capture, Decoder, ExpertFeedForward, RMSNorm
from paceline.policy.replay import RouterReplay
from paceline.policy.rope import rotate

# The largest number of E4M3.
LARGEST = 448.0

# The smallest magnitude that a scale is taken from.
SMALLEST_AMAX = 1e-10

# Columns of a group, rows and columns of a block: what shares a scale.
GROUP = 128

# Stored tensors that are sums of many products.
SUMS = ("qkv", "attention", "output", "gate_up", "down")

# All tensors of a layer that are stored.
STORED = (*SUMS, "attention_norm", "rope", "feed_forward_norm", "swiglu")


@dataclass(frozen=True)
class Fp8Recipe:
    """What is in FP8, and the scales of the KV cache."""

    base_layers: int = 0  # at either end, whose products are not in FP8
    kv_scales_L2H: torch.Tensor | None = None  # None: K and V keep the policy's type
    kv_base_layers: frozenset[int] = frozenset()  # whose K and V do, after a failed validation


def arithmetic_error(tensor: str, depth: int, device: torch.device, fp8_cache: bool) -> float:
    """Returns how far an engine's stored tensor may be off before it is rounded, relative to its row.

    Elementwise: a few roundings in float32. That is enough to decide ties, and ties occur: weights that came
    from bf16 make them. Sums on a CPU: float32, sqrt(depth) roundings (Higham and Mary 2019,
    doi:10.1137/18M1226312). On a GPU: a tensor core keeps about 14 bits of an E4M3 sum (arXiv 2412.19437,
    section 3.3.2), and the weights of attention have the 11 bits of float16 with an E4M3 cache, else the 8 of
    bf16.
    """
    if tensor not in SUMS:
        return 2.0**-22
    if device.type == "cpu":
        return 2.0**-24 * depth**0.5
    if tensor != "attention":
        return 2.0**-12
    return 2.0**-11 if fp8_cache else 2.0**-9


class Fp8Policy:
    """A policy in FP8, called as a `Decoder` is."""

    def __init__(self, policy: Decoder, recipe: Fp8Recipe) -> None:
        self.policy = policy
        self.recipe = recipe
        self.config = policy.config
        self.device = policy.device
        self.wide = torch.float64 if policy.device.type == "cpu" else torch.float32
        fp8_layers = range(recipe.base_layers, len(policy.layers) - recipe.base_layers)
        self.in_fp8 = [index in fp8_layers for index in range(len(policy.layers))]
        self.weights = [self._weights_of(index) for index in range(len(policy.layers))]
        self.head_VE = policy.head.weight.detach().to(self.wide)
        self.seed: int | None = None  # of the noise; None: not perturbed

    def perturbed(self, seed: int) -> "Fp8Policy":
        """Returns a copy whose stored tensors are moved by about what an engine's arithmetic may be off."""
        other = copy.copy(self)
        other.seed = seed
        return other

    def _weights_of(self, index: int) -> dict[str, torch.Tensor]:
        layer = self.policy.layers[index]
        experts = isinstance(layer.feed_forward, ExpertFeedForward)
        gate_up, down = (
            (m if experts else m.weight) for m in (layer.feed_forward.gate_up, layer.feed_forward.down)
        )
        own = {
            "qkv": layer.attention.qkv.weight,
            "output": layer.attention.output.weight,
            "gate_up": gate_up,
            "down": down,
        }
        return {
            name: (in_blocks(weight.detach()) if self.in_fp8[index] else weight.detach()).to(self.wide)
            for name, weight in own.items()
        }

    def __call__(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        attend: Attend,
        capture: Capture | None = None,
        replay: RouterReplay | None = None,
    ) -> torch.Tensor:
        assert capture is None, "the FP8 policy does not capture states"
        assert replay is None, "the FP8 policy routes for itself"
        x_TE = self.policy.embedding(tokens_T).to(self.wide)
        for index, layer in enumerate(self.policy.layers):
            normed_TE = self._stored(
                self._norm(x_TE, layer.attention_norm), positions_T, index, "attention_norm"
            )
            x_TE = self._rounded(
                x_TE + self._attention(index, layer.attention, normed_TE, positions_T, attend)
            )
            normed_TE = self._stored(
                self._norm(x_TE, layer.feed_forward_norm), positions_T, index, "feed_forward_norm"
            )
            feed_forward = (
                self._experts if isinstance(layer.feed_forward, ExpertFeedForward) else self._feed_forward
            )
            x_TE = self._rounded(x_TE + feed_forward(index, layer.feed_forward, normed_TE, positions_T))
        return self._rounded(self._norm(x_TE, self.policy.norm))

    def logits(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden_TE, self.head_VE)

    def _attention(
        self, index: int, module: Attention, x_TE: torch.Tensor, positions_T: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        qkv_THD = self._linear(index, "qkv", x_TE, positions_T, module.qkv.bias).unflatten(
            -1, (-1, module.head_dim)
        )
        q, k, v = qkv_THD.split((module.heads, module.kv_heads, module.kv_heads), dim=1)
        if module.q_norm is not None:
            q = self._norm(q, module.q_norm)
            k = self._norm(k, module.k_norm)
        rope_T2R = self.policy.rope_table[positions_T]
        rotated_THD = rotate(torch.cat((q, k), dim=1), rope_T2R)
        q, k = self._stored(rotated_THD, positions_T, index, "rope").split(
            (module.heads, module.kv_heads), dim=1
        )
        if self.recipe.kv_scales_L2H is not None and index not in self.recipe.kv_base_layers:
            k, v = (
                _scaled(x, scale_H.unsqueeze(1))
                for x, scale_H in zip((k, v), self.recipe.kv_scales_L2H[index], strict=True)
            )
        depth = module.head_dim + int(positions_T.max()) + 1
        out_TE = self._stored(attend(index, q, k, v).flatten(1), positions_T, index, "attention", depth)
        return self._linear(index, "output", out_TE, positions_T, module.output.bias)

    def _feed_forward(
        self, index: int, module: torch.nn.Module, x_TE: torch.Tensor, positions_T: torch.Tensor
    ) -> torch.Tensor:
        gate, up = self._linear(index, "gate_up", x_TE, positions_T, module.gate_up.bias).chunk(2, dim=-1)
        inner_TF = self._stored(F.silu(gate) * up, positions_T, index, "swiglu")
        return self._linear(index, "down", inner_TF, positions_T, module.down.bias)

    def _experts(
        self, index: int, module: ExpertFeedForward, x_TE: torch.Tensor, positions_T: torch.Tensor
    ) -> torch.Tensor:
        scores_TX = F.linear(x_TE, module.router.weight.to(self.wide))
        weights_TK, experts_TK = scores_TX.softmax(-1).topk(module.experts_per_token)
        if module.normalise:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        weights_TK = self._rounded(weights_TK)
        out_TE = torch.zeros_like(x_TE)
        for expert in experts_TK.unique().tolist():
            token_S, choice_S = (experts_TK == expert).nonzero(as_tuple=True)
            positions_S = positions_T[token_S]
            gate, up = self._linear(index, "gate_up", x_TE[token_S], positions_S, expert=expert).chunk(
                2, dim=-1
            )
            inner_SF = self._stored(F.silu(gate) * up, positions_S, index, "swiglu")
            out_SE = self._linear(index, "down", inner_SF, positions_S, expert=expert)
            out_TE.index_add_(0, token_S, out_SE * weights_TK[token_S, choice_S].unsqueeze(1))
        return self._rounded(out_TE)

    def _linear(
        self,
        index: int,
        name: str,
        x_TK: torch.Tensor,
        positions_T: torch.Tensor,
        bias_N: torch.Tensor | None = None,
        expert: int | None = None,
    ) -> torch.Tensor:
        weight = self.weights[index][name]
        out_TN = F.linear(
            in_groups(x_TK) if self.in_fp8[index] else x_TK, weight if expert is None else weight[expert]
        )
        out_TN = self._stored(out_TN, positions_T, index, name, x_TK.shape[1])
        return out_TN if bias_N is None else self._rounded(out_TN + bias_N.to(self.wide))

    def _norm(self, x: torch.Tensor, module: RMSNorm) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.eps) * module.weight.to(self.wide)

    def _stored(
        self, x: torch.Tensor, positions_T: torch.Tensor, index: int, tensor: str, depth: int = 1
    ) -> torch.Tensor:
        """Rounds a tensor to the policy's type; a perturbed copy moves it first."""
        if self.seed is not None:
            error = arithmetic_error(tensor, depth, self.device, self.recipe.kv_scales_L2H is not None)
            generator = torch.Generator(self.device).manual_seed(
                (self.seed << 20) + index * len(STORED) + STORED.index(tensor)
            )
            shape = int(positions_T.max()) + 1, *x.shape[1:]
            noise = 2 * torch.rand(shape, generator=generator, dtype=self.wide, device=self.device) - 1
            x = x + error * noise[positions_T] * (x.abs() + x.pow(2).mean(-1, keepdim=True).sqrt())
        return self._rounded(x)

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.policy.dtype).to(self.wide)


def nearest_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Rounds to E4M3 by arithmetic: three bits behind the leading one, ties to even.

    The leading bit's exponent is -6 at least, the magnitude 448 at most.
    """
    x = x.clamp(-LARGEST, LARGEST)
    exponent = (torch.frexp(x).exponent - 1).clamp(min=-6)
    spacing = torch.ldexp(torch.ones_like(x), exponent - 3)
    return (x / spacing).round() * spacing


def in_groups(x_TK: torch.Tensor) -> torch.Tensor:
    """Returns rows as a product in FP8 sees them."""
    groups_TGC = F.pad(x_TK, (0, -x_TK.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    return _scaled(groups_TGC, _scale(groups_TGC.abs().amax(-1, keepdim=True))).flatten(1)[:, : x_TK.shape[1]]


def in_blocks(weight: torch.Tensor) -> torch.Tensor:
    """Returns a weight `[..., N, K]` as a product in FP8 sees it, in float64."""
    width, depth = weight.shape[-2:]
    padded = F.pad(weight.double(), (0, -depth % GROUP, 0, -width % GROUP))
    # [..., blocks of N, 128, blocks of K, 128]
    blocks = padded.unflatten(-1, (-1, GROUP)).unflatten(-3, (-1, GROUP))
    scaled = _scaled(blocks, next_scale(blocks.abs().amax((-3, -1), keepdim=True)))
    return scaled.flatten(-4, -3).flatten(-2, -1)[..., :width, :depth]


def _scale(amax: torch.Tensor) -> torch.Tensor:
    return amax.float().clamp(min=SMALLEST_AMAX) / LARGEST


def next_scale(amax: torch.Tensor) -> torch.Tensor:
    """Returns the smallest power of two that is at least that scale."""
    fraction, exponent = torch.frexp(_scale(amax))
    return torch.ldexp(torch.ones_like(fraction), exponent - (fraction == 0.5).int())


def _scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Returns x rounded to E4M3 at a scale; the formula divides in float32, the result has x's type."""
    return nearest_e4m3(x.float() / scale).to(x.dtype) * scale.to(x.dtype)
