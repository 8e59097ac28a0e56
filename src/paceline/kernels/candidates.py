"""The best candidates for the next token: the largest of logits / T + gumbel(seed, position, token).

The noise is that with which the policy samples, so the first candidate is what `sampler.py` would sample from
these logits, and the policy's own choice lies among the first few far more often than it is the first. T = 0
means the largest logits. A row is cut into chunks whatever the batch, as in `sampler.py`.

Logits may be of some tokens of the vocabulary, as an EAGLE-3 head's are: noise belongs to the policy's tokens
and is computed for those alone.
"""

import torch

from paceline.kernels import noise
from paceline.kernels.noise import gumbel_of_triton, gumbel_triton
from paceline.kernels.operation import cdiv, next_power_of_2, reference_of
from paceline.kernels.rejection import Truncation
from paceline.kernels.sampler import (
    CHUNK,
    at_temperature,
    better,
    in_wide_pieces,
    kept_tokens,
    perturbed_logits,
    row_logsumexp,
    scaled_logits,
)
from paceline.kernels.triton_support import launch_next, launch_options, tl, triton, wait_previous

# What truncation leaves stands before what it cuts by so much: the policy may cut elsewhere.
CUT_PENALTY = 1e4
_STREAM_SAMPLE = tl.constexpr(noise.STREAM_SAMPLE)


@triton.jit(do_not_specialize=["width"])
def _best_chunk_kernel(
    noise_of,
    vocabulary_ptr,
    logits_ptr,
    chunks,
    vocab_size,
    num_chunks,
    width,
    COUNT: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs (row, chunk): the chunk's COUNT best. A vocabulary says which tokens logits are of."""
    launch_next(PDL)
    temperature_ptr, seed_ptr, position_ptr = noise_of
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    temperature = tl.load(temperature_ptr + row // width)
    greedy = temperature <= 0
    seed, position = tl.load(seed_ptr + row // width), tl.load(position_ptr + row // width)
    if vocabulary_ptr is not None:
        token = tl.load(vocabulary_ptr + place, mask=place < vocab_size, other=0x7FFFFFFF).to(tl.int32)
        gumbel = gumbel_of_triton(seed, position, token, _STREAM_SAMPLE)
    else:
        token = place
        gumbel = gumbel_triton(seed, position, chunk * CHUNK, CHUNK, _STREAM_SAMPLE)
    wait_previous(PDL)
    logits = tl.load(logits_ptr + row * vocab_size + place, mask=place < vocab_size, other=-float("inf")).to(
        tl.float32
    )
    scaled = at_temperature(logits, temperature)
    scores = scaled + tl.where(greedy, 0.0, gumbel)
    score_ptr, token_ptr = chunks
    out = (row * num_chunks + chunk) * COUNT
    for i in tl.static_range(COUNT):
        best_score, best_token = tl.reduce((scores, token), 0, better)
        tl.store(score_ptr + out + i, best_score)
        tl.store(token_ptr + out + i, best_token)
        scores = tl.where(token == best_token, -float("inf"), scores)


@triton.jit
def _best_combine_kernel(chunks, out, num_found, COUNT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program per row: the best of its chunks' best."""
    launch_next(PDL)
    score_ptr, token_ptr = chunks
    out_score_ptr, out_token_ptr = out
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    wait_previous(PDL)
    scores = tl.load(score_ptr + row * num_found + index, mask=index < num_found, other=-float("inf"))
    tokens = tl.load(token_ptr + row * num_found + index, mask=index < num_found, other=0x7FFFFFFF)
    for i in tl.static_range(COUNT):
        best_score, best_token = tl.reduce((scores, tokens), 0, better)
        # Also false for a NaN, which is no candidate.
        possible = best_score > -float("inf")
        tl.store(out_score_ptr + row * COUNT + i, tl.where(possible, best_score, -float("inf")))
        tl.store(out_token_ptr + row * COUNT + i, tl.where(possible, best_token, -1).to(tl.int64))
        scores = tl.where(tokens == best_token, -float("inf"), scores)


def best_candidates_triton(logits_RV, temperature_R, seed_R, position_R, count, width=1, vocabulary_V=None):
    num_rows, vocab_size = logits_RV.shape
    num_chunks = cdiv(vocab_size, CHUNK)
    device = logits_RV.device
    score = torch.empty(num_rows, num_chunks, count, dtype=torch.float32, device=device)
    token = torch.empty(num_rows, num_chunks, count, dtype=torch.int32, device=device)
    scores_RN = torch.empty(num_rows, count, dtype=torch.float32, device=device)
    tokens_RN = torch.empty(num_rows, count, dtype=torch.int64, device=device)
    _best_chunk_kernel[(num_rows, num_chunks)](
        (temperature_R, seed_R, position_R),
        vocabulary_V,
        logits_RV,
        (score, token),
        vocab_size,
        num_chunks,
        width,
        COUNT=count,
        CHUNK=CHUNK,
        **launch_options(num_warps=8),
    )
    found = num_chunks * count
    block, options = next_power_of_2(found), launch_options(num_warps=1)
    _best_combine_kernel[(num_rows,)](
        (score, token), (scores_RN, tokens_RN), found, COUNT=count, BLOCK=block, **options
    )
    return tokens_RN, scores_RN


@reference_of(best_candidates_triton)
def _best_candidates(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    seed_R: torch.Tensor,
    position_R: torch.Tensor,
    count: int,
    width: int = 1,
    vocabulary_V: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    temperature_R, seed_R, position_R = _for_each(width, temperature_R, seed_R, position_R)
    scaled_RV = scaled_logits(logits_RV, temperature_R)
    if vocabulary_V is None:
        return _best(perturbed_logits(scaled_RV, temperature_R, seed_R, position_R), count)
    noise_RV = noise.gumbel_of(seed_R, position_R, vocabulary_V)
    scores_RV = scaled_RV + torch.where((temperature_R > 0).unsqueeze(-1), noise_RV, 0.0)
    places_RN, scores_RN = _best(scores_RV, count)
    return torch.where(places_RN < 0, -1, vocabulary_V[places_RN]), scores_RN


def best_candidates(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    seed_R: torch.Tensor,
    position_R: torch.Tensor,
    count: int,
    truncation: Truncation | None = None,
    width: int = 1,
    vocabulary_V: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens and scores of each row's `count` best candidates, best first, `[R, count]`.

    What truncation leaves comes first. A token of -1 with a score of -inf is none: a logit of -inf is never
    a candidate. Every `width` rows of logits have the same noise and truncation, given once. `vocabulary_V`
    are the tokens that logits are of, int64, each once; None: all. Truncation is for logits of all tokens.
    """
    noise_of = temperature_R, seed_R, position_R
    if truncation is not None:
        cut = truncation.top_k_R, truncation.top_p_R, truncation.min_p_R
        given = _for_each(width, *noise_of, *cut)
        return in_wide_pieces(lambda *few: _best_truncated(*few, count), logits_RV, *given)
    return _best_candidates(logits_RV, *noise_of, count, width, vocabulary_V)


def _for_each(width: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.repeat_interleave(width) if width > 1 else x for x in tensors]


def _best_truncated(logits_RV, temperature_R, seed_R, position_R, top_k_R, top_p_R, min_p_R, count):
    scaled_RV = scaled_logits(logits_RV, temperature_R)
    kept_RV, _ = kept_tokens(scaled_RV, row_logsumexp(scaled_RV), top_k_R, top_p_R, min_p_R)
    scores_RV = perturbed_logits(scaled_RV, temperature_R, seed_R, position_R)
    return _best(scores_RV - torch.where(kept_RV, 0.0, CUT_PENALTY), count)


def _best(scores_RV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    scores_RN, tokens_RN = scores_RV.topk(min(count, scores_RV.shape[1]), dim=-1)
    missing = count - scores_RN.shape[1]
    if missing:
        scores_RN = torch.nn.functional.pad(scores_RN, (0, missing), value=-torch.inf)
        tokens_RN = torch.nn.functional.pad(tokens_RN, (0, missing), value=-1)
    return torch.where(scores_RN > -torch.inf, tokens_RN, -1), scores_RN
