"""Rejection in Triton: every logit of a proposal is read once, and those of one position a second time.

    logits[row, 0..K-1]   | chunk 0 | chunk 1 | ...   max, exp sum and most likely token of every chunk
                               \\       |     /
    accepted[row, k]               one program        u q(d) < p(d)
                                     |
    logits[row, stop]     | chunk 0 | chunk 1 | ...   the best of ln max(p - q, 0) + gumbel; stop is the first
                               \\       |     /         rejected position, or the last one, sampled plainly
    token[row, stop]              one program

Chunks are the sampler's, whatever the batch; sums have one order and there are no atomics, so a row's result
does not depend on the others. The grid depends on shapes only. Truncation is not known here. `rejection.py`
has the reference, `rejection_launch.py` launches.

p(x) is exp(x - max) / sum, so that either p(d) = 1, and the proposal is accepted because u q(d) < 1, or
another token has p > 0. Hence a rejected row always ends in a token other than its proposal: where rounding
left nothing of p, it is drawn from p without the proposal. `append_samples` stops there, and nothing that
follows passes unverified.
"""

from paceline.kernels import noise
from paceline.kernels.noise import gumbel_triton, uniform_triton
from paceline.kernels.triton_support import launch_next, tl, triton, wait_previous

_STREAM_SAMPLE = tl.constexpr(noise.STREAM_SAMPLE)
_STREAM_ACCEPT = tl.constexpr(noise.STREAM_ACCEPT)
_STREAM_RECOVER = tl.constexpr(noise.STREAM_RECOVER)
# Above every token.
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _divided(logits, temperature):
    return tl.div_rn(logits, tl.zeros_like(logits) + tl.where(temperature > 0, temperature, 1.0))


@triton.jit
def _scaled_chunk(logits_ptr, line, chunk, temperature, vocab_size, CHUNK: tl.constexpr):
    """Returns a chunk's tokens and their logits at the temperature, of one line of logits."""
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = token < vocab_size
    logits = tl.load(logits_ptr + line * vocab_size + token, mask=mask, other=-float("inf"))
    return token, _divided(logits.to(tl.float32), temperature)


@triton.jit
def _chunk_mass(scaled):
    """Returns a chunk's maximum and the sum of exponentials below it; of masked logits, nothing."""
    maximum = tl.max(scaled, axis=0)
    return maximum, tl.sum(tl.where(scaled == -float("inf"), 0.0, tl.exp(scaled - maximum)), axis=0)


@triton.jit
def _lowest_best(scores, tokens):
    """Returns the largest score and its token; of equal scores the lowest token."""
    best = tl.max(scores, axis=0)
    return best, tl.min(tl.where(scores == best, tokens, _NO_TOKEN), axis=0)


@triton.jit
def _row_mass(max_ptr, sum_ptr, best_ptr, line, num_chunks, BLOCK: tl.constexpr):
    """Returns the maximum, the sum and the most likely token of a line from those of its chunks."""
    chunk = tl.arange(0, BLOCK)
    mask = chunk < num_chunks
    maxima = tl.load(max_ptr + line * num_chunks + chunk, mask=mask, other=-float("inf"))
    sums = tl.load(sum_ptr + line * num_chunks + chunk, mask=mask, other=0.0)
    tokens = tl.load(best_ptr + line * num_chunks + chunk, mask=mask, other=_NO_TOKEN)
    maximum, best = _lowest_best(maxima, tokens)
    return maximum, tl.sum(sums * tl.where(sums > 0, tl.exp(maxima - maximum), 0.0), axis=0), best


@triton.jit
def mass_kernel(
    logits_ptr,
    temperature_ptr,
    max_ptr,
    sum_ptr,
    best_ptr,
    vocab_size,
    num_chunks,
    num_proposals,
    num_queries,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs (row and proposal, chunk)."""
    launch_next(PDL)
    wait_previous(PDL)
    proposal, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    line = proposal // num_proposals * num_queries + proposal % num_proposals
    token, scaled = _scaled_chunk(logits_ptr, line, chunk, tl.load(temperature_ptr + line), vocab_size, CHUNK)
    maximum, total = _chunk_mass(scaled)
    out = proposal * num_chunks + chunk
    tl.store(max_ptr + out, maximum)
    tl.store(sum_ptr + out, total)
    _, best = _lowest_best(scaled, token)
    tl.store(best_ptr + out, best)


@triton.jit
def accept_kernel(
    logits_ptr,
    temperature_ptr,
    seed_ptr,
    position_ptr,
    proposals_ptr,
    draft_ptr,
    slots_ptr,
    max_ptr,
    sum_ptr,
    best_ptr,
    row_max_ptr,
    row_sum_ptr,
    accepted_ptr,
    token_ptr,
    logprob_ptr,
    vocab_size,
    num_chunks,
    num_proposals,
    num_queries,
    draft_stride,
    KNOWN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs (row, proposal): each decides, as if it were reached, and writes its proposal as the token."""
    launch_next(PDL)
    wait_previous(PDL)
    row, k = tl.program_id(0).to(tl.int64), tl.program_id(1)
    line, proposal = row * num_queries + k, row * num_proposals + k
    maximum, total, best = _row_mass(max_ptr, sum_ptr, best_ptr, proposal, num_chunks, BLOCK)
    proposed = tl.load(proposals_ptr + proposal)
    token = tl.maximum(proposed, 0)
    temperature = tl.load(temperature_ptr + line)
    scaled = _divided(tl.load(logits_ptr + line * vocab_size + token).to(tl.float32), temperature)
    p = tl.where(temperature > 0, tl.div_rn(tl.exp(scaled - maximum), total), (token == best).to(tl.float32))
    q = p * 0.0 + 1.0
    if KNOWN:
        # Unless rounding made it more than 1, it is less.
        drawn = tl.load(draft_ptr + tl.load(slots_ptr + row) * draft_stride + k * vocab_size + token)
        q = tl.minimum(drawn.to(tl.float32), 1.0)
    uniform = uniform_triton(tl.load(seed_ptr + line), tl.load(position_ptr + line), _STREAM_ACCEPT)
    tl.store(accepted_ptr + proposal, ((proposed >= 0) & (uniform * q < p)).to(tl.int32))
    tl.store(row_max_ptr + proposal, maximum)
    tl.store(row_sum_ptr + proposal, total)
    tl.store(token_ptr + line, token)
    tl.store(logprob_ptr + line, scaled - maximum - tl.log(total))


@triton.jit
def _first_rejected(accepted_ptr, row, num_proposals, BLOCK_K: tl.constexpr):
    """Returns the position of a row's first rejected proposal, or its last position."""
    k = tl.arange(0, BLOCK_K)
    accepted = tl.load(accepted_ptr + row * num_proposals + k, mask=k < num_proposals, other=0)
    return tl.min(tl.where(accepted > 0, num_proposals, tl.minimum(k, num_proposals)), axis=0)


@triton.jit
def draw_kernel(
    logits_ptr,
    temperature_ptr,
    seed_ptr,
    position_ptr,
    proposals_ptr,
    draft_ptr,
    slots_ptr,
    row_max_ptr,
    row_sum_ptr,
    accepted_ptr,
    left_ptr,
    score_ptr,
    best_ptr,
    value_ptr,
    max_ptr,
    sum_ptr,
    vocab_size,
    num_chunks,
    num_proposals,
    num_queries,
    draft_stride,
    KNOWN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs (row, chunk), at the row's first rejected position, or its last."""
    launch_next(PDL)
    wait_previous(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    stop = _first_rejected(accepted_ptr, row, num_proposals, BLOCK_K)
    recovers = stop < num_proposals
    line = row * num_queries + stop
    temperature = tl.load(temperature_ptr + line)
    token, scaled = _scaled_chunk(logits_ptr, line, chunk, temperature, vocab_size, CHUNK)
    stream = tl.where(recovers, _STREAM_RECOVER, _STREAM_SAMPLE).to(tl.uint32)
    seed, position = tl.load(seed_ptr + line), tl.load(position_ptr + line)
    gumbel = gumbel_triton(seed, position, chunk * CHUNK, CHUNK, stream)
    plain = scaled + tl.where(temperature > 0, gumbel, 0.0)

    # Of a row that recovers nothing, any proposal's numbers: they are not used.
    proposal = row * num_proposals + tl.minimum(stop, num_proposals - 1)
    proposed = tl.load(proposals_ptr + proposal)
    row_max, row_sum = tl.load(row_max_ptr + proposal), tl.load(row_sum_ptr + proposal)
    p = tl.div_rn(tl.exp(scaled - row_max), tl.zeros_like(scaled) + row_sum)
    if KNOWN:
        # Greedy rows need none of it, and rows without a proposal have none.
        num_drafted = tl.where(recovers & (proposed >= 0) & (temperature > 0), vocab_size, 0)
        at = tl.load(slots_ptr + row) * draft_stride + tl.minimum(stop, num_proposals - 1) * vocab_size
        q = tl.load(draft_ptr + at + token, mask=token < num_drafted, other=0.0).to(tl.float32)
    else:
        q = (token == proposed).to(tl.float32)
    left = tl.maximum(p - q, 0.0)
    something = tl.max(left, axis=0) > 0
    weight = tl.where(something, left, tl.where(token == proposed, 0.0, p))
    draws = recovers & (temperature > 0)
    scores = tl.where(draws, tl.log(weight) + gumbel, plain)

    best_score, best_token = _lowest_best(scores, token)
    maximum, total = _chunk_mass(scaled)
    out = row * num_chunks + chunk
    tl.store(left_ptr + out, (something | (draws == 0)).to(tl.int32))
    tl.store(score_ptr + out, best_score)
    tl.store(best_ptr + out, best_token)
    tl.store(value_ptr + out, tl.max(tl.where(token == best_token, scaled, -float("inf")), axis=0))
    tl.store(max_ptr + out, maximum)
    tl.store(sum_ptr + out, total)


@triton.jit
def settle_kernel(
    accepted_ptr,
    left_ptr,
    score_ptr,
    best_ptr,
    value_ptr,
    max_ptr,
    sum_ptr,
    token_ptr,
    logprob_ptr,
    vocab_size,
    num_chunks,
    num_proposals,
    num_queries,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row: the token where the row ends. What is behind it is token 0."""
    launch_next(PDL)
    wait_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    stop = _first_rejected(accepted_ptr, row, num_proposals, BLOCK_K)
    chunk = tl.arange(0, BLOCK)
    mask = chunk < num_chunks
    offset = row * num_chunks + chunk
    # Chunks of which q left nothing count only where no chunk has anything left.
    left = tl.load(left_ptr + offset, mask=mask, other=0)
    mask = mask & (left == tl.max(left, axis=0))
    scores = tl.load(score_ptr + offset, mask=mask, other=-float("inf"))
    tokens = tl.load(best_ptr + offset, mask=mask, other=_NO_TOKEN)
    values = tl.load(value_ptr + offset, mask=mask, other=-float("inf"))
    _, best = _lowest_best(scores, tokens)
    value = tl.max(tl.where(tokens == best, values, -float("inf")), axis=0)
    maximum, total, _ = _row_mass(max_ptr, sum_ptr, best_ptr, row, num_chunks, BLOCK)
    # A NaN may leave the padding's token, as in the sampler.
    line = row * num_queries + stop
    tl.store(token_ptr + line, tl.minimum(best, vocab_size - 1).to(tl.int64))
    tl.store(logprob_ptr + line, value - maximum - tl.log(total))
    behind = row * num_queries + num_proposals
    tl.store(token_ptr + behind, tl.zeros_like(best).to(tl.int64), mask=stop < num_proposals)
    tl.store(logprob_ptr + behind, tl.zeros_like(value), mask=stop < num_proposals)


@triton.jit
def distribution_kernel(
    logits_ptr,
    temperature_ptr,
    slots_ptr,
    max_ptr,
    sum_ptr,
    best_ptr,
    out_ptr,
    vocab_size,
    num_chunks,
    slot_stride,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs (row, chunk): a drafter's probabilities, by the formula of p, into the row's slot."""
    launch_next(PDL)
    wait_previous(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    maximum, total, best = _row_mass(max_ptr, sum_ptr, best_ptr, row, num_chunks, BLOCK)
    temperature = tl.load(temperature_ptr + row)
    token, scaled = _scaled_chunk(logits_ptr, row, chunk, temperature, vocab_size, CHUNK)
    drawn = tl.div_rn(tl.exp(scaled - maximum), tl.zeros_like(scaled) + total)
    probabilities = tl.where(temperature > 0, drawn, (token == best).to(tl.float32))
    out = out_ptr + tl.load(slots_ptr + row) * slot_stride + token
    tl.store(out, probabilities.to(out_ptr.dtype.element_ty), mask=token < vocab_size)
