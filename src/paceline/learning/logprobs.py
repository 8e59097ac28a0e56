"""Log-probabilities and entropies of response tokens, without ever holding all logits at once."""

import torch
from torch.utils.checkpoint import checkpoint

from paceline.kernels.training_launch import takes_kernels
from paceline.learning.batch import MicroBatch
from paceline.learning.head import head_logprobs
from paceline.policy.decoder import Decoder

# Logits per chunk: 64 MiB in float32. (On a GPU `head.py` has its own.)
CHUNK_ELEMENTS = 1 << 24

# Differences of logprobs are clamped to this size before exp, in nats. exp(20) is 5e8: wide enough to mean
# "hopeless", narrow enough to be squared and summed.
MAX_LOG_RATIO = 20.0


def token_logprobs(policy: Decoder, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `logprobs_R` at each token's own temperature and `entropies_R`, which have no gradient."""
    hidden_TE = policy(
        batch.tokens_T, batch.attention.positions_T, batch.attention, batch.capture, batch.replay
    )
    if takes_kernels(hidden_TE):
        return head_logprobs(hidden_TE, policy.head.weight, batch, policy.recompute.logits)
    hidden_RE = hidden_TE[batch.predictors_R]
    chunk = max(1, CHUNK_ELEMENTS // policy.config.vocab_size)
    logprobs = []
    entropies = []
    for part in zip(
        *(x.split(chunk) for x in (hidden_RE, batch.targets_R, batch.temperatures_R)), strict=True
    ):
        if torch.is_grad_enabled() and len(hidden_RE) > chunk:
            logprob, entropy = checkpoint(_chunk_logprobs, policy, *part, use_reentrant=False)
        else:
            logprob, entropy = _chunk_logprobs(policy, *part)
        logprobs.append(logprob)
        entropies.append(entropy)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk_logprobs(
    policy: Decoder, hidden_RE: torch.Tensor, targets_R: torch.Tensor, temperatures_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logits_RV = policy.logits(hidden_RE)
    logits_RV = logits_RV / temperatures_R[:, None].to(logits_RV.dtype)
    normaliser_R = logits_RV.logsumexp(-1)
    logprobs_R = logits_RV.gather(1, targets_R[:, None]).squeeze(1) - normaliser_R
    with torch.no_grad():
        entropies_R = normaliser_R - ((logits_RV - normaliser_R[:, None]).exp() * logits_RV).sum(-1)
    return logprobs_R, entropies_R
