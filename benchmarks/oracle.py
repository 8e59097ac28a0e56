"""A drafter with known acceptance: it knows the answers of an earlier plain run, and spoils some of them.

On random weights, or before a drafter has been trained, real acceptance means nothing; this one is right with
the probability it is given for each depth, and costs what reading weights of a given size once per token
costs. For benchmarks of pacing only.
"""

from collections.abc import Iterable, Sequence

import torch

from paceline.drafting.base import Drafter, DrafterContext
from paceline.types import Completion, Request

# An odd 62-bit constant: a multiplicative hash over the integers modulo 2^64.
MIX = 0x2545F4914F6CDD1D
LEVELS = 1 << 20  # steps in which a probability is expressed


class OracleDrafter(Drafter):
    """Proposes the recorded answer or another token, by a hash of the position."""

    name = "oracle"
    max_tokens = 15

    def __init__(
        self, requests: Sequence[Request], acceptance: Sequence[float], weight_bytes: int = 0, seed: int = 0
    ) -> None:
        """Takes `acceptance` by depth, the last one repeated, and the bytes read per proposed token."""
        self.acceptance = [*acceptance, *[acceptance[-1]] * (self.max_tokens - len(acceptance))]
        self.number = {request.id: i for i, request in enumerate(requests)}
        self.longest = max(request.sampling.max_tokens for request in requests)
        self.weight_bytes = weight_bytes
        self.seed = seed

    def bind(self, context: DrafterContext) -> None:
        super().bind(context)
        slots = context.rows.length.shape[0]
        device = context.rows.length.device
        self.answers_NW = torch.zeros(
            len(self.number), self.longest + self.max_tokens + 1, dtype=torch.int64, device=device
        )
        self.request_S = torch.zeros(slots, dtype=torch.int64, device=device)
        self.prompt_length_S = torch.zeros(slots, dtype=torch.int64, device=device)
        self.level_K = torch.tensor([int(a * LEVELS) for a in self.acceptance], device=device)
        self.offset_K = torch.arange(self.max_tokens, device=device)
        self.weights = torch.zeros(max(1, self.weight_bytes // 2), dtype=torch.bfloat16, device=device)

    def learn(self, completions: Iterable[Completion]) -> None:
        for completion in completions:
            tokens = torch.tensor(completion.tokens, dtype=torch.int64)
            self.answers_NW[self.number[completion.request.id], : len(tokens)] = tokens.to(
                self.answers_NW.device
            )

    def observe_enter(self, slot: int, request: Request, handover: torch.Tensor | None) -> None:
        self.request_S[slot] = self.number[request.id]
        self.prompt_length_S[slot] = len(request.prompt)

    def propose(self, slots_R: torch.Tensor, count: int, truncates: bool) -> None:
        if self.weight_bytes:
            for _ in range(count):
                self.weights.sum(dtype=torch.float32)
        request_R1 = self.request_S[slots_R].unsqueeze(1)
        generated_R = self.context.rows.length[slots_R] - self.prompt_length_S[slots_R]
        at_RK = generated_R.unsqueeze(1) + self.offset_K[:count]
        right_RK = self.answers_NW[request_R1, at_RK.clamp(0, self.answers_NW.shape[1] - 1)]
        # Whether a position is hard does not depend on when it is proposed, so acceptance at each depth is
        # the requested one.
        mixed_RK = (request_R1 * 1_000_003 + at_RK * 8_191 + self.seed) * MIX
        mixed_RK = (mixed_RK ^ (mixed_RK >> 29)) * MIX
        level_RK = (mixed_RK >> 33) & (LEVELS - 1)
        wrong_RK = (right_RK + 1) % self.context.policy.config.vocab_size
        self.context.proposals_SK[slots_R, :count] = torch.where(
            level_RK < self.level_K[:count], right_RK, wrong_RK
        )
