"""How much of an eagle head's drafts the policy accepts, measured along texts that the policy wrote.

A draft counts up to its first disagreement with the text, and until there its own tokens are the text's. So
one pass over the text with the head unrolled (`unroll.py`) gives, for every start and step, the chance that
the drafted token is accepted:

    shared noise   1 if argmax(logits / T + gumbel(seed, place, ·)) of the head is the text's token, else 0
    rejection      min(1, q(token) / p(token)): given that the policy's token came out, the chance that it was
                   the drafted one

A walk over the response, from each step's first token to the next one's, then gives what a rollout at a fixed
k would do: exactly for shared noise, in expectation for rejection. Nothing is generated.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.drafting.eagle_head import EagleHead
from paceline.drafting.training import MICRO_BATCH_TOKENS, drafted_tokens, rows_per_chunk, teacher_states
from paceline.drafting.unroll import unroll
from paceline.kernels.noise import gumbel_of
from paceline.learning.batch import MicroBatch, pack, training_sequence
from paceline.policy.decoder import Decoder
from paceline.types import Completion


@dataclass
class Acceptance:
    """Sums over the steps of walks; with rejection they are expectations."""

    # The policy's steps, and the tokens that they emitted.
    steps: float = 0.0
    tokens: int = 0
    # Drafts whose first i + 1 tokens were all accepted.
    accepted_at: list[float] = field(default_factory=list)
    # Drafts whose first i tokens were, and whose response continued.
    tried_at: list[float] = field(default_factory=list)

    @property
    def accept_length(self) -> float:
        """Tokens emitted per step of the policy, its own included; a response's end cuts a step short."""
        return self.tokens / max(1e-9, self.steps)

    def rate_at(self, place: int) -> float:
        """Returns the share of the tokens at `place` that were accepted, of those that were tried."""
        return self.accepted_at[place] / max(1e-9, self.tried_at[place])

    @classmethod
    def nothing(cls, depth: int) -> "Acceptance":
        """Returns the sums over no steps, for drafts of `depth` tokens."""
        return cls(accepted_at=[0.0] * depth, tried_at=[0.0] * depth)


@dataclass(frozen=True)
class Measured:
    """The acceptance under both verification rules, over a number of responses."""

    shared_noise: Acceptance
    rejection: Acceptance
    responses: int


@torch.no_grad()
def measure_acceptance(
    policy: Decoder,
    head: EagleHead,
    completions: Sequence[Completion],
    depth: int,
    known: int = 0,
) -> Measured:
    """Measures drafts of `depth` tokens along the completions.

    The first draft of a response is made when `known` of its tokens exist already.
    """
    shared = Acceptance.nothing(depth)
    rejection = Acceptance.nothing(depth)
    completions = [completion for completion in completions if completion.tokens]
    for part in _parts(completions, MICRO_BATCH_TOKENS[policy.device.type]):
        batch = pack([training_sequence(completion) for completion in part], policy.device)
        lengths = [len(completion.tokens) for completion in part]
        shared_RK, rejection_RK = _chances(policy, head, batch, part, depth)
        for shared_NK in shared_RK.split(lengths):
            walk(shared_NK.tolist(), known, shared)
        for rejection_NK in rejection_RK.split(lengths):
            walk(rejection_NK.tolist(), known, rejection)
    return Measured(shared, rejection, len(completions))


def _parts(completions: Sequence[Completion], token_budget: int) -> list[list[Completion]]:
    """Batches completions, those of similar length together: packed attention is laid out by the longest."""
    parts: list[list[Completion]] = []
    left = 0
    for completion in sorted(completions, key=lambda c: len(c.request.prompt) + len(c.tokens)):
        size = len(completion.request.prompt) + len(completion.tokens)
        if size > left:
            parts.append([])
            left = token_budget
        parts[-1].append(completion)
        left -= size
    return parts


def _chances(
    policy: Decoder, head: EagleHead, batch: MicroBatch, completions: Sequence[Completion], depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the chances for both rules, `[R, K]` by start and step; row r starts at response token r."""
    device = batch.tokens_T.device
    temperature_R = torch.tensor([c.request.sampling.temperature for c in completions], device=device)[
        batch.sequence_R
    ]
    seed_R = torch.tensor([c.request.seed for c in completions], device=device)[batch.sequence_R]
    hidden_TE, captured = teacher_states(policy, batch, head.config.captured_layers)
    shared_RK, rejection_RK = torch.zeros(2, len(seed_R), depth, dtype=torch.float64, device=device)
    chunk = rows_per_chunk(policy)
    for step, x_RE in enumerate(unroll(head, captured, policy.embedding.weight, batch, depth)):
        for tokens in drafted_tokens(batch, step).nonzero().flatten().split(chunk):
            predictors = batch.predictors_R[tokens]
            places = batch.attention.positions_T[predictors] + 1
            shared, rejection = accepted(
                head,
                policy.logits(hidden_TE[predictors]),
                head.logits(x_RE[tokens]),
                batch.targets_R[tokens],
                temperature_R[tokens],
                gumbel_of(seed_R[tokens], places, head.draft_to_target),
            )
            shared_RK[tokens - step, step], rejection_RK[tokens - step, step] = shared, rejection
    return shared_RK, rejection_RK


def accepted(
    head: EagleHead,
    logits_RV: torch.Tensor,
    draft_RD: torch.Tensor,
    token_R: torch.Tensor,
    temperature_R: torch.Tensor,
    noise_RD: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the chance that each token is drafted and accepted, for both rules; the same if greedy."""
    greedy_R = temperature_R == 0
    scale_R1 = torch.where(greedy_R, 1.0, temperature_R).unsqueeze(-1)
    scores_RD = draft_RD / scale_R1 + torch.where(greedy_R.unsqueeze(-1), 0.0, noise_RD)
    shared_R = (head.draft_to_target[scores_RD.argmax(-1)] == token_R).double()
    logp_R = (logits_RV / scale_R1).log_softmax(-1).gather(-1, token_R.unsqueeze(-1)).squeeze(-1)
    full_RV = torch.full_like(logits_RV, -torch.inf).index_copy(
        1, head.draft_to_target, (draft_RD / scale_R1).log_softmax(-1).to(logits_RV.dtype)
    )
    logq_R = full_RV.gather(-1, token_R.unsqueeze(-1)).squeeze(-1)
    rejection_R = (logq_R - logp_R).clamp(max=0.0).exp().double()
    return shared_R, torch.where(greedy_R, shared_R, rejection_R)


def walk(chances_NK: list[list[float]], known: int, total: Acceptance) -> None:
    """Adds to `total` the steps that generate one response."""
    count, depth = len(chances_NK), len(chances_NK[0])
    # How likely a step starts at each token.
    visits = [0.0] * (count + depth + 1)
    visits[known if known < count else -1] = 1.0
    for start in range(known, count):
        reached = visits[start]
        total.steps += reached
        for step in range(min(depth, count - start)):
            accepted = reached * chances_NK[start][step]
            total.tried_at[step] += reached
            total.accepted_at[step] += accepted
            # The policy's own token in its place.
            visits[start + step + 1] += reached - accepted
            reached = accepted
        # All accepted, and one more; past the end it does not matter.
        visits[start + depth + 1] += reached
    total.tokens += max(0, count - known)
