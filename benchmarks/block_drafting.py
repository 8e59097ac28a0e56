"""Drafting several positions in one pass, beside the eagle head's one pass a token: what is accepted of each.

    python benchmarks/block_drafting.py POLICY [RECIPE] [section.key=value ...] --responses 1024 --steps 400

A block drafter (DFlash, DSpark, Medusa before them) runs its pass once for all positions of a draft. Position
j takes, in place of the head's own state and the drafted token, which are not there yet, what the draft began
with and a vector learned for j:

    eagle     x_j = head( x_{j-1},    embedding of drafted token j )     j = 1, 2, ... one after the other
    block     x_j = head( g_t + f_j,  embedding of token t+1  + e_j )    all j at once

Attention is the same: the text's entries, then those of the draft up to j. `--deeper N` adds N layers in
which a position looks only at those of its own draft. Both kinds learn from the same responses, in as many
steps, with the policy as the teacher, and are measured along responses apart, with the noise that sampled
them (`drafting/acceptance.py`): a draft counts up to its first disagreement.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from paceline.config import load_config
from paceline.device import learning_threads
from paceline.drafting import training
from paceline.drafting.acceptance import Acceptance, walk
from paceline.drafting.eagle_head import EagleConfig, EagleHead, config_for
from paceline.drafting.offline import held_out, initialise_head
from paceline.drafting.training import HeadTraining, drafted_tokens, teacher_states, train_offline
from paceline.drafting.unroll import DraftAttention, unroll
from paceline.kernels.noise import gumbel_of
from paceline.learning.batch import MicroBatch, pack, training_sequence
from paceline.policy.decoder import Attention, Decoder, FeedForward, RMSNorm, allocate
from paceline.rollout.responses import training_responses
from paceline.session import open_session
from paceline.types import Completion

# Candidates of a position among which the policy's choice is looked for.
CANDIDATES = 4


class DraftLayer(nn.Module):
    """A decoder layer in which a position sees its own draft alone."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        layer = config.layer
        self.attention_norm = RMSNorm(layer.hidden_size, layer.norm_eps)
        self.attention = Attention(layer)
        self.feed_forward_norm = RMSNorm(layer.hidden_size, layer.norm_eps)
        self.feed_forward = FeedForward(layer)

    def forward(
        self, x_RE: torch.Tensor, rope_R2: torch.Tensor, kept: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """`kept` are the keys and values of the draft's positions so far, by the rows that made them."""

        def attend(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            repeats = q.shape[1] // k.shape[1]
            kept.append((k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)))
            back = range(len(kept) - 1, -1, -1)
            keys, values = (
                torch.stack([pair[which].roll(i, 0) for i, pair in zip(back, kept, strict=True)])
                for which in (0, 1)
            )
            weights_SRH = ((q * keys).sum(-1) * q.shape[-1] ** -0.5).softmax(0)
            return (weights_SRH.unsqueeze(-1) * values).sum(0)

        x_RE = x_RE + self.attention(self.attention_norm(x_RE), rope_R2, 0, attend)
        return x_RE + self.feed_forward(self.feed_forward_norm(x_RE))


class BlockHead(EagleHead):
    """An eagle head whose further positions need nothing that was drafted."""

    def __init__(
        self, config: EagleConfig, depth: int, deeper: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(config, dtype, device)
        self.slots = nn.Parameter(torch.empty(depth, 2, config.layer.hidden_size, dtype=dtype, device=device))
        with torch.device("meta"):
            self.deeper = nn.ModuleList(DraftLayer(config) for _ in range(deeper))
        allocate(self.deeper, dtype, device)

    def initialise(self, policy: Decoder, seed: int) -> "BlockHead":
        """Fills all parameters; deeper layers begin as nothing."""
        super().initialise(policy, seed)
        self.slots.data.normal_(0.0, 0.02)
        for layer in self.deeper:
            layer.attention.output.weight.data.zero_()
            layer.feed_forward.down.weight.data.zero_()
        return self

    def unroll(
        self, captured: list[torch.Tensor], embedding_VE: torch.Tensor, batch: MicroBatch, steps: int
    ) -> Iterator[torch.Tensor]:
        """Yields what `unroll.unroll` yields; no position takes anything from the one before but its keys."""
        following_TE = F.embedding(batch.tokens_T.roll(-1), embedding_VE.detach())
        positions_T = batch.attention.positions_T
        entries_R = (batch.predictors_R - 1).clamp(min=0)
        attend = DraftAttention(batch, entries_R, steps)
        features_TE = self.features(captured)
        features_RE, following_RE = features_TE[entries_R], following_TE[entries_R]
        rope_R2 = self.rope_table[positions_T[entries_R]]
        kept: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in self.deeper]
        for step in range(steps):
            if step == 0:
                x_RE = self(features_TE, following_TE, positions_T, attend, entries_R)
            else:
                slot_2E = self.slots[step]
                x_RE = self(
                    features_RE.roll(step, 0) + slot_2E[0],
                    following_RE.roll(step, 0) + slot_2E[1],
                    positions_T[entries_R],
                    attend,
                )
            for layer, pairs in zip(self.deeper, kept, strict=True):
                x_RE = layer(x_RE, rope_R2, pairs)
            yield x_RE


def unroll_either(
    head: EagleHead, captured: list[torch.Tensor], embedding_VE: torch.Tensor, batch: MicroBatch, steps: int
) -> Iterator[torch.Tensor]:
    """Unrolls a head of either kind."""
    if isinstance(head, BlockHead):
        return head.unroll(captured, embedding_VE, batch, steps)
    return unroll(head, captured, embedding_VE, batch, steps)


class AutogradPass:
    """A `HeadPass` of a head of either kind, whose gradients are torch's."""

    def __init__(
        self,
        head: EagleHead,
        captured: list[torch.Tensor],
        embedding_VE: torch.Tensor,
        batch: MicroBatch,
        steps: int,
        check: Callable[[], None],
    ) -> None:
        self.states = list(unroll_either(head, captured, embedding_VE, batch, steps))
        self.states_URE = torch.stack([x_RE.detach() for x_RE in self.states])

    def backward(self, d_URE: torch.Tensor) -> None:
        """Adds the parameters' gradients, given those of the states."""
        torch.autograd.backward(self.states, list(d_URE.unbind()))


@torch.no_grad()
def ranks(policy: Decoder, head: EagleHead, completions: list[Completion], depth: int) -> list[torch.Tensor]:
    """Returns, per response and position of a draft `[N, K]`, how many candidates came before the text's.

    Row n is the draft that starts at token n; -1 where there is none.
    """
    found = []
    for completion in completions:
        batch = pack([training_sequence(completion)], policy.device)
        _, captured = teacher_states(policy, batch, head.config.captured_layers)
        rank_NK = torch.full((len(completion.tokens), depth), -1, device=policy.device)
        temperature = completion.request.sampling.temperature
        for step, x_RE in enumerate(unroll_either(head, captured, policy.embedding.weight, batch, depth)):
            tokens = drafted_tokens(batch, step).nonzero().flatten()
            places = batch.attention.positions_T[batch.predictors_R[tokens]] + 1
            seeds = torch.full_like(places, completion.request.seed)
            scores = head.logits(x_RE[tokens]) / temperature + gumbel_of(seeds, places, head.draft_to_target)
            known = head.draft_to_target == batch.targets_R[tokens].unsqueeze(1)
            own = scores.masked_fill(~known, -torch.inf).amax(1, keepdim=True)
            better = (scores > own).sum(1)
            rank_NK[tokens - step, step] = better.to(rank_NK.dtype)
        found.append(rank_NK.cpu())
    return found


def report(
    name: str, seconds: float, policy: Decoder, head: EagleHead, apart: list[Completion], depth: int
) -> None:
    """Prints a line: accept lengths of chains, then how often the choice is among the best candidates."""
    found = ranks(policy, head, apart, depth)
    lengths = []
    for k in (1, 3, depth):
        total = Acceptance.nothing(k)
        for rank_NK in found:
            walk((rank_NK[:, :k] == 0).double().tolist(), 0, total)
        lengths.append(f"{total.accept_length:8.3f}")
    # Of drafts that agree so far, by position: the share whose next choice is among the best m.
    shares = []
    for step in range(depth):
        agreeing = [rank[(rank[:, :step] == 0).all(1) & (rank[:, step] >= 0), step] for rank in found]
        rank_N = torch.cat(agreeing)
        among = [float((rank_N < m).double().mean()) if len(rank_N) else 0.0 for m in (1, CANDIDATES)]
        shares.append("/".join(f"{100 * share:.0f}" for share in among))
    size = sum(p.numel() for p in head.parameters()) / 1e6
    print(f"{name:<12}{size:8.1f}M{seconds:8.0f} s {''.join(lengths)}   {'  '.join(shares)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("policy")
    parser.add_argument("recipe", nargs="?", default="default")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--responses", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--deeper", type=int, default=2)
    parser.add_argument("--draft-vocab", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()
    config = load_config(options.recipe, [*options.overrides, f"policy.path={options.policy}"])
    session = open_session(config)
    policy = session.policy
    completions = training_responses(session.sampler, session.config, options.responses)
    session.close()
    learned, apart = held_out(completions)
    sequences = [training_sequence(completion) for completion in learned]
    shape = config_for(policy.config, (), options.draft_vocab)
    made = (policy.dtype, policy.device)
    heads = {
        "eagle": EagleHead(shape, *made),
        "block": BlockHead(shape, options.depth, 0, *made),
        f"block + {options.deeper}": BlockHead(shape, options.depth, options.deeper, *made),
    }
    settings = HeadTraining(
        steps=options.steps, lr=options.lr, unroll=options.depth, batch_sequences=options.batch
    )
    print(f"{sum(s.loss_tokens for s in sequences)} tokens to learn from, {len(apart)} responses apart")
    lengths = "".join(f"{f'k={k}':>8}" for k in (1, 3, options.depth))
    print(f"{'':<12}{'size':>9}{'time':>10} {lengths}   by position: best 1 / {CANDIDATES}, %")
    with mock.patch.object(training, "HeadPass", AutogradPass), learning_threads(session.config):
        for name, head in heads.items():
            began = time.monotonic()
            initialise_head(head, policy, sequences, settings.seed)
            train_offline(policy, head, sequences, settings)
            report(name, time.monotonic() - began, policy, head, apart, options.depth)


if __name__ == "__main__":
    main()
