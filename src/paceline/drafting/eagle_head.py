"""The EAGLE-3 head (Li et al., arXiv 2503.01840): one decoder layer on the policy's hidden states.

    policy, three captured layers at token t      g_t = fc [ h_t^a, h_t^b, h_t^c ]             3E -> E
    head's input at t                             [ norm(embedding of token t+1), norm(g_t) ]  2E
    one decoder layer, residual stream g_t        x_t   -> norm -> head -> token t+2

A further token continues from x_t in place of g_{t+1}, which is not known yet. The embedding is the policy's
own. The head over the vocabulary is not: a drafter's update must never reach the policy's. It may cover only
`draft_vocab` of the tokens; `draft_to_target` says which. This file is the module, for learning; `eagle.py`
runs it over the engine's rows.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import nn

from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import (
    Attend,
    Attention,
    Decoder,
    FeedForward,
    RMSNorm,
    allocate,
    wide_linear,
)
from paceline.policy.rope import rope_table


@dataclass(frozen=True)
class EagleConfig:
    """The shape of an EAGLE-3 head."""

    # The shape of the one layer, of the Llama family; vocabulary and positions are the policy's.
    layer: DecoderConfig
    # i: the hidden states that enter layer i, as vLLM and transformers count.
    captured_layers: tuple[int, ...]
    # Tokens that the head can propose.
    draft_vocab: int

    def __post_init__(self) -> None:
        if not 1 <= self.draft_vocab <= self.layer.vocab_size:
            raise ValueError(
                f"a draft vocabulary of {self.draft_vocab} tokens: "
                f"the policy has {self.layer.vocab_size}, which is the most"
            )
        if not self.captured_layers or any(b <= a for a, b in pairwise((-1, *self.captured_layers))):
            raise ValueError(
                f"captured layers {self.captured_layers}: "
                "must be 0 (the embedding) or more and increase, such as 2, 14, 25"
            )

    def check_against(self, policy: DecoderConfig) -> None:
        """Raises where the head cannot have been made for this policy."""
        for key, ours, theirs in (
            ("hidden_size", self.layer.hidden_size, policy.hidden_size),
            ("vocab_size", self.layer.vocab_size, policy.vocab_size),
        ):
            if ours != theirs:
                raise ValueError(
                    f"the eagle head's {key} is {ours}, the policy's is {theirs}: "
                    "it was made for another policy"
                )
        if self.captured_layers[-1] >= policy.num_layers:
            last = policy.num_layers - 1
            raise ValueError(
                f"captured layers {self.captured_layers}: "
                f"layer i means the states that enter it, and the policy's last is {last}"
            )


def default_captured_layers(num_layers: int) -> tuple[int, ...]:
    """Returns an early, a middle and a late layer.

    The usual (2, n // 2, n - 3) degenerates below 8 layers; there they are spread evenly.
    """
    if num_layers >= 8:
        return 2, num_layers // 2, num_layers - 3
    if num_layers < 3:
        raise ValueError(
            f"an eagle head captures three different layers, and the policy has {num_layers}; "
            "say which, such as --layers 0,1"
        )
    first = 1 if num_layers > 3 else 0
    return first, (first + num_layers - 1) // 2, num_layers - 1


def config_for(
    policy: DecoderConfig, captured_layers: tuple[int, ...] = (), draft_vocab: int = 0
) -> EagleConfig:
    """Returns a head of the policy's width: its attention and feed-forward, no biases, QK-norm or experts."""
    layer = replace(
        policy,
        family="llama",
        num_layers=1,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tie_embeddings=False,
        num_experts=0,
        num_experts_per_token=0,
        expert_intermediate_size=0,
        normalise_expert_weights=False,
        dense_layers=(),
    )
    config = EagleConfig(
        layer, captured_layers or default_captured_layers(policy.num_layers), draft_vocab or policy.vocab_size
    )
    config.check_against(policy)
    return config


class EagleHead(nn.Module):
    """An EAGLE-3 head; parameters are empty until loaded or initialised."""

    def __init__(
        self, config: EagleConfig, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
    ) -> None:
        super().__init__()
        self.config = config
        layer = config.layer
        size = layer.hidden_size
        with torch.device("meta"):
            self.fc = nn.Linear(len(config.captured_layers) * size, size, bias=False)
            self.embedding_norm = RMSNorm(size, layer.norm_eps)
            self.hidden_norm = RMSNorm(size, layer.norm_eps)
            self.attention = Attention(layer)
            self.attention.qkv = nn.Linear(2 * size, self.attention.qkv.out_features, bias=False)
            self.feed_forward_norm = RMSNorm(size, layer.norm_eps)
            self.feed_forward = FeedForward(layer)
            self.norm = RMSNorm(size, layer.norm_eps)
            self.head = nn.Linear(size, config.draft_vocab, bias=False)
        allocate(self, dtype, device)
        self.register_buffer("draft_to_target", torch.arange(config.draft_vocab, device=device))
        # Up to the policy's own limit, whatever a folder's configuration claims: a clamped table would repeat
        # positions.
        self.rope_table = rope_table(layer.rope, layer.head_dim, layer.max_positions).to(device)

    def initialise(self, policy: Decoder, seed: int) -> "EagleHead":
        """Fills all parameters with those of a head that has learned nothing, and returns it.

        Attention and feed-forward write nothing at first: what random ones write disturbs for hundreds
        of updates, and how much depends on the seed. What they read is random, scaled to keep its size; the
        vocabulary's head starts as a copy of the policy's rows.
        """
        generator = torch.Generator(self.fc.weight.device).manual_seed(seed)
        for parameter in self.parameters():
            if parameter.ndim == 1:
                parameter.data.fill_(1.0)
            else:
                parameter.data.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
        self.attention.output.weight.data.zero_()
        self.feed_forward.down.weight.data.zero_()
        self.head.weight.data.copy_(policy.head.weight.data[self.draft_to_target])
        self.norm.weight.data.copy_(policy.norm.weight.data)
        return self

    def features(self, captured: list[torch.Tensor]) -> torch.Tensor:
        """Returns g_t from the policy's captured hidden states, `[T, E]` each."""
        return self.fc(torch.cat(captured, dim=-1))

    def forward(
        self,
        features_TE: torch.Tensor,
        following_TE: torch.Tensor,
        positions_T: torch.Tensor,
        attend: Attend,
        entries_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns x_t: the input of a further step in place of features, and of `logits`.

        `following_TE` are the policy's embeddings of the tokens that follow; `positions_T` are the t. With
        `entries_R` only those are returned: `attend` has seen all keys and answers for these queries alone.
        """
        x_T2 = torch.cat((self.embedding_norm(following_TE), self.hidden_norm(features_TE)), dim=-1)
        residual_RE = features_TE if entries_R is None else features_TE[entries_R]
        x_RE = residual_RE + self.attention(x_T2, self.rope_table[positions_T], 0, attend)
        return x_RE + self.feed_forward(self.feed_forward_norm(x_RE))

    def logits(self, x_TE: torch.Tensor) -> torch.Tensor:
        """Returns scores over the draft vocabulary, float32 or wider."""
        return wide_linear(self.norm(x_TE), self.head.weight)
