"""One step of all running rows: gather, forward, sample, verify, append, test for the end. No host involved.

With Q = 1 this is plain decoding. With Q = k + 1 the row's k proposed tokens are run behind its last one, every position
is sampled with its own noise, and the longest prefix where proposal equals sample is kept, plus one more token:

    inputs      last  d1  d2  d3        proposals d1..d3 from a drafter
    samples      s1   s2  s3  s4        what the policy itself says at each position
    d1 = s1, d2 = s2, d3 != s3   ->     append s1 s2 s3: exactly what plain decoding would have appended

Stop tokens and limits cut the appended run where plain decoding would have stopped.
"""

import torch

from paceline.engine.cache import BLOCK_SIZE
from paceline.engine.forward import PagedForward
from paceline.engine.rows import Rows
from paceline.kernels.row_step import Queries, append_samples, gather_queries
from paceline.kernels.sampler import sample, sample_truncated


def step(forward: PagedForward, rows: Rows, slots_R: torch.Tensor, proposals_SK: torch.Tensor, queries: int, truncates: bool) -> torch.Tensor:
    """Advances the rows in `slots_R`; returns `[2, R]`: their lengths, and 0 running, 1 ended at its limit, 2 stopped."""
    state = rows.state
    gathered = gather_queries(state, slots_R, proposals_SK, queries, forward.max_position, BLOCK_SIZE)
    table_RB = state.block_table.index_select(0, slots_R)
    hidden_TE = forward.decode(gathered.tokens_RQ, gathered.positions_RQ, gathered.cache_slots_RQ, table_RB, gathered.context_R)
    sampled_T, logprobs_T = _sample(rows, forward.logits(hidden_TE), slots_R, gathered, truncates)
    shape = gathered.tokens_RQ.shape
    return append_samples(state, slots_R, proposals_SK, sampled_T.view(shape), logprobs_T.view(shape))


def _sample(rows: Rows, logits_TV: torch.Tensor, slots_R: torch.Tensor, gathered: Queries, truncates: bool) -> tuple[torch.Tensor, torch.Tensor]:
    noise = gathered.temperature_RQ.flatten(), gathered.seed_RQ.flatten(), gathered.sample_positions_RQ.flatten()
    if not truncates:
        return sample(logits_TV, *noise)
    slots_T = slots_R.repeat_interleave(gathered.tokens_RQ.shape[1])
    tokens_T, logprobs_T, _ = sample_truncated(logits_TV, *noise, rows.top_k[slots_T], rows.top_p[slots_T], rows.min_p[slots_T])
    return tokens_T, logprobs_T
