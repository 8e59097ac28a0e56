"""`paceline bench acceptance`: shared noise against rejection with the same draft model.

Expected, per token, along texts that the policy wrote, from the probabilities p of the policy and q of the
drafter alone:

    rejection       1 - TV(p, q), the most that any rule accepts
    shared noise    sum_t 1 / sum_j max(p_j / p_t, q_j / q_t): the chance that both win with token t when
                    they race on the same exponential clocks (Daliri, Musco, Suresh 2024, arXiv 2408.07978,
                    section 3)
    greedy draft    p(argmax q): the drafter proposes its most likely token

Realised, in the engine: the share accepted of the proposals that were looked at, and tokens per step; a
response's last step, which its end cuts short, does not count.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

from paceline.drafting.draft_model import DraftModel
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request_state import RequestState
from paceline.engine.sampling import Verify
from paceline.learning.batch import pack, training_sequence
from paceline.pacing.strategy import FixedPacer, Strategy
from paceline.policy.decoder import Decoder
from paceline.types import Completion, Request

# Logits that exist at once while the expected figures are computed: 512 MiB of float64.
PASS_LOGITS = 1 << 26
MAX_RUNNING = 64


@dataclass(frozen=True)
class AcceptancePoint:
    """The share of proposed tokens that each rule accepts: expected per token, and realised."""

    positions: int
    mean_tv: float
    rejection: float
    shared_noise: float
    shared_noise_bound: float  # the mean of (1 - TV) / (1 + TV), which shared noise never falls below
    greedy_draft: float
    realised_rejection: float
    realised_shared_noise: float
    accept_length_rejection: float
    accept_length_shared_noise: float

    def record(self) -> dict:
        """Returns the point as JSON takes it."""
        return asdict(self)


def bench_acceptance(
    policy: Decoder, draft: Decoder, requests: Sequence[Request], tokens: int
) -> AcceptancePoint:
    """Measures with `tokens` proposed per step in the engine. The requests must not truncate."""
    completions, shared = _run(policy, draft, requests, tokens, Verify.SHARED_NOISE)
    _, rejection = _run(policy, draft, requests, tokens, Verify.REJECTION)
    if not len(shared) or not len(rejection):
        raise ValueError(
            "every response ended within one step; allow longer ones (rollout.max_tokens) "
            "or propose fewer tokens"
        )
    columns = _expected(policy, draft, completions)
    tv, shared_chance, greedy = columns.mean(1).tolist()
    bound = float(((1 - columns[0]) / (1 + columns[0])).mean())
    return AcceptancePoint(
        columns.shape[1],
        tv,
        1 - tv,
        shared_chance,
        bound,
        greedy,
        realised_rejection=_realised(rejection, tokens),
        realised_shared_noise=_realised(shared, tokens),
        accept_length_rejection=float(rejection.mean()),
        accept_length_shared_noise=float(shared.mean()),
    )


def _realised(gains: torch.Tensor, tokens: int) -> float:
    """Returns the accepted share of the proposals up to each draft's first that was not accepted."""
    return float((gains - 1).sum() / gains.clamp(max=tokens).sum())


def _run(
    policy: Decoder, draft: Decoder, requests: Sequence[Request], tokens: int, verify: Verify
) -> tuple[list[Completion], torch.Tensor]:
    """Returns what was written, and how many tokens each step but the last of every response gave."""
    longest = max(len(request.prompt) + request.sampling.max_tokens for request in requests)
    running = min(MAX_RUNNING, len(requests))
    settings = EngineSettings(
        max_running=running, kv_tokens=running * (longest + 64), max_length=longest, verify=verify
    )
    engine = Engine(
        policy,
        settings,
        drafters=[DraftModel(draft)],
        pacer=FixedPacer(Strategy(DraftModel.name, tokens), running),
    )
    gains: dict[str, list[int]] = {request.id: [] for request in requests}

    def note(sequences: list[RequestState], lengths: np.ndarray, gained: np.ndarray) -> None:
        for sequence, new in zip(sequences, gained.tolist(), strict=True):
            if new:
                gains[sequence.request.id].append(new)

    engine.outcomes.observer = note
    engine.submit(requests)
    completions = list(engine.completions())
    return completions, torch.tensor(
        [new for steps in gains.values() for new in steps[:-1]], dtype=torch.float64
    )


@torch.inference_mode()
def _expected(policy: Decoder, draft: Decoder, completions: list[Completion]) -> torch.Tensor:
    """Returns `[3, N]`: TV, the chance to agree under shared noise, p of the drafter's likeliest token."""
    chunk = max(1, PASS_LOGITS // policy.config.vocab_size)
    parts = []
    for completion in completions:
        batch = pack([training_sequence(completion)], policy.device)
        states = [
            model(batch.tokens_T, batch.attention.positions_T, batch.attention)[batch.predictors_R]
            for model in (policy, draft)
        ]
        temperature = completion.request.sampling.temperature or 1.0
        for p_RE, q_RE in zip(*(state.split(chunk) for state in states), strict=True):
            p_RV, q_RV = (
                (model.logits(x).double() / temperature).softmax(-1)
                for model, x in ((policy, p_RE), (draft, q_RE))
            )
            tv_R = 0.5 * (p_RV - q_RV).abs().sum(-1)
            greedy_R = p_RV.gather(1, q_RV.argmax(-1, keepdim=True)).squeeze(1)
            parts.append(torch.stack((tv_R, shared_noise_agreement(p_RV, q_RV), greedy_R)))
    return torch.cat(parts, dim=1)


def shared_noise_agreement(p_RV: torch.Tensor, q_RV: torch.Tensor) -> torch.Tensor:
    """Returns the chance that policy and drafter agree on each row's token under shared noise.

    Sorted by p / q, the maxima of the formula's inner sum are p's for the tokens that follow, and q's for
    those before.
    """
    order_RV = (p_RV.log() - q_RV.log()).nan_to_num(0.0).argsort(-1)
    p_RV = p_RV.gather(-1, order_RV)
    q_RV = q_RV.gather(-1, order_RV)
    above_RV = p_RV.sum(-1, keepdim=True) - p_RV.cumsum(-1)
    rival_RV = above_RV.clamp(min=0) / p_RV + q_RV.cumsum(-1) / q_RV
    return torch.where((p_RV > 0) & (q_RV > 0), 1 / rival_RV, 0.0).sum(-1)
