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
from paceline.kernels.sampler import sample, sample_truncated


def step(forward: PagedForward, rows: Rows, slots_R: torch.Tensor, proposals_SK: torch.Tensor, queries: int, truncates: bool) -> torch.Tensor:
    """Advances the rows in `slots_R`; returns `[2, R]`: their lengths, and 0 running, 1 at its limit, 2 stopped."""
    length_R, active_R, limit_R = rows.length[slots_R], rows.active[slots_R], rows.limit[slots_R]
    offsets_Q = torch.arange(queries, device=slots_R.device)
    last_R1 = rows.tokens[slots_R, length_R - 1].unsqueeze(1)
    proposals_RK = proposals_SK[slots_R, : queries - 1]
    positions_RQ = (length_R - 1).unsqueeze(1) + offsets_Q

    # Positions past the limit are computed (the shape is fixed) but neither stored nor kept.
    max_position = forward.cos_PC.shape[0] - 1
    stored_RQ = active_R.unsqueeze(1) & (positions_RQ < limit_R.unsqueeze(1))
    table_RB = rows.block_table[slots_R]
    block_RQ = table_RB.gather(1, positions_RQ // BLOCK_SIZE).long()
    cache_slots_RQ = torch.where(stored_RQ, block_RQ * BLOCK_SIZE + positions_RQ % BLOCK_SIZE, -1)
    context_R = torch.where(active_R, length_R - 1, -1)
    tokens_RQ = torch.cat((last_R1, proposals_RK), dim=1)
    hidden = forward.decode(tokens_RQ, positions_RQ.clamp(max=max_position), cache_slots_RQ, table_RB, context_R)

    sampled, logprobs = _sample(rows, forward.logits(hidden), slots_R, positions_RQ + 1, truncates)
    sampled_RQ, logprobs_RQ = sampled.view(-1, queries), logprobs.view(-1, queries)

    agreed_RK = (sampled_RQ[:, :-1] == proposals_RK).long().cumprod(1)
    count_R = torch.minimum(agreed_RK.sum(1) + 1, limit_R - length_R)
    is_stop_RQ = (sampled_RQ.unsqueeze(-1) == rows.stop_ids[slots_R].unsqueeze(1)).any(-1) & (offsets_Q < count_R.unsqueeze(1))
    stops_R = is_stop_RQ.any(1)
    count_R = torch.where(stops_R, is_stop_RQ.long().argmax(1) + 1, count_R) * active_R

    appended_RQ = offsets_Q < count_R.unsqueeze(1)
    where_RQ = length_R.unsqueeze(1) + offsets_Q
    row_R1 = slots_R.unsqueeze(1)
    rows.tokens[row_R1, where_RQ] = torch.where(appended_RQ, sampled_RQ, rows.tokens[row_R1, where_RQ])
    rows.logprobs[row_R1, where_RQ] = torch.where(appended_RQ, logprobs_RQ, rows.logprobs[row_R1, where_RQ])
    length_R = length_R + count_R
    stopped_R = rows.stopped[slots_R] | (active_R & stops_R)
    rows.length[slots_R] = length_R
    rows.stopped[slots_R] = stopped_R
    rows.active[slots_R] = active_R & ~stops_R & (length_R < limit_R)
    state_R = torch.where(rows.active[slots_R], 0, torch.where(stopped_R, 2, 1))
    return torch.stack((length_R, state_R))


def _sample(rows: Rows, logits_TV: torch.Tensor, slots_R: torch.Tensor, positions_RQ: torch.Tensor, truncates: bool) -> tuple[torch.Tensor, torch.Tensor]:
    slots_T = slots_R.repeat_interleave(positions_RQ.shape[1])
    seed_T, temperature_T, positions_T = rows.seed[slots_T], rows.temperature[slots_T], positions_RQ.flatten()
    if not truncates:
        return sample(logits_TV, temperature_T, seed_T, positions_T)
    limits = rows.top_k[slots_T], rows.top_p[slots_T], rows.min_p[slots_T]
    tokens, logprobs, _ = sample_truncated(logits_TV, temperature_T, seed_T, positions_T, *limits)
    return tokens, logprobs
