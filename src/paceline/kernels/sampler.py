"""Sampling: token = argmax(logits / T + gumbel(seed, position, token)), and the token's logprob.

One pass over the logits; ties go to the lowest id. A row is cut into chunks of CHUNK tokens whatever the
batch, so one row fills the GPU and the result does not depend on the number of rows:

    logits[row]   | chunk 0 | chunk 1 | ...    a program each: best score, its token and logit, max, exp sum
                       \\        |     /
                        combine kernel         one program per row, fixed order

T = 0 means plain argmax, with the logprob at temperature 1. `sample_truncated` adds top-k, top-p and min-p:
it sorts, so it is slower, but it never waits for the host and can be captured in a graph. What is plain torch
here holds many numbers per logit at once, and takes WIDE_ROWS rows at a time.
"""

from collections.abc import Callable, Iterable

import torch

from paceline.kernels import noise
from paceline.kernels.noise import gumbel_triton
from paceline.kernels.operation import cdiv, next_power_of_2, reference_of
from paceline.kernels.triton_support import launch_next, launch_options, tl, triton, wait_previous

# Tokens of a row that one program reads.
CHUNK = 2048
# Rows at a time of what is plain torch: enough to occupy a GPU where the vocabulary is large (2.4 million
# logits of Qwen3's), and 0.15 GB of what truncation holds per logit.
WIDE_ROWS = 16
# Probabilities become integers of this unit: their sums do not depend on the order a device adds them in.
MASS_UNIT = 2.0**40
_STREAM_SAMPLE = tl.constexpr(noise.STREAM_SAMPLE)


def row_logsumexp(scaled_RV: torch.Tensor) -> torch.Tensor:
    """Returns the logsumexp in fixed chunks: torch splits one long row over threads, and two rows not."""
    vocab_size = scaled_RV.shape[1]
    if vocab_size <= CHUNK:
        return scaled_RV.logsumexp(-1)
    padded = torch.nn.functional.pad(scaled_RV, (0, -vocab_size % CHUNK), value=-torch.inf)
    return padded.view(-1, padded.shape[1] // CHUNK, CHUNK).logsumexp(-1).logsumexp(-1)


def scaled_logits(logits_RV: torch.Tensor, temperature_R: torch.Tensor) -> torch.Tensor:
    """Returns the logits at each row's temperature, as they are where that is 0."""
    logits_RV = logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()
    temperature_R = temperature_R.to(logits_RV.dtype)
    return logits_RV / torch.where(temperature_R > 0, temperature_R, 1.0).unsqueeze(-1)


def perturbed_logits(
    scaled_RV: torch.Tensor, temperature_R: torch.Tensor, seed_R: torch.Tensor, position_R: torch.Tensor
) -> torch.Tensor:
    """Returns scaled logits with the noise of each row's seed and position; without any where T = 0."""
    noise_RV = noise.gumbel(seed_R, position_R, scaled_RV.shape[1])
    return scaled_RV + torch.where((temperature_R > 0).unsqueeze(-1), noise_RV, 0.0)


@triton.jit
def better(score_a, token_a, score_b, token_b):
    """Returns the larger score and its token; of equal scores the lower token."""
    take_a = (score_a > score_b) | ((score_a == score_b) & (token_a < token_b))
    return tl.where(take_a, score_a, score_b), tl.where(take_a, token_a, token_b)


@triton.jit
def at_temperature(logits, temperature):
    """Returns logits / T, as they are where T is 0; at 1, too, a division would change nothing."""
    if (temperature <= 0) | (temperature == 1.0):
        scaled = logits
    else:
        scaled = tl.div_rn(logits, tl.zeros_like(logits) + temperature)
    return scaled


@triton.jit
def _sample_chunk_kernel(
    noise_of, logits_ptr, chunks, vocab_size, num_chunks, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    """Programs (row, chunk)."""
    launch_next(PDL)
    temperature_ptr, seed_ptr, position_ptr = noise_of
    score_ptr, token_ptr, value_ptr, max_ptr, sum_ptr = chunks
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = token < vocab_size
    temperature = tl.load(temperature_ptr + row)
    greedy = temperature <= 0
    gumbel = gumbel_triton(
        tl.load(seed_ptr + row), tl.load(position_ptr + row), chunk * CHUNK, CHUNK, _STREAM_SAMPLE
    )
    wait_previous(PDL)
    logits = tl.load(logits_ptr + row * vocab_size + token, mask=mask, other=-float("inf")).to(tl.float32)
    scaled = at_temperature(logits, temperature)
    scores = scaled + tl.where(greedy, 0.0, gumbel)
    best_score, best_token = tl.reduce((scores, token), 0, better)
    best_value = tl.max(tl.where(token == best_token, scaled, -float("inf")), axis=0)
    maximum = tl.max(scaled, axis=0)
    # A chunk whose logits are all masked to -inf contributes nothing, and must not make a NaN.
    total = tl.sum(tl.where(scaled == -float("inf"), 0.0, tl.exp(scaled - maximum)), axis=0)
    out = row * num_chunks + chunk
    tl.store(score_ptr + out, best_score)
    tl.store(token_ptr + out, best_token)
    tl.store(value_ptr + out, best_value)
    tl.store(max_ptr + out, maximum)
    tl.store(sum_ptr + out, total)


@triton.jit
def _sample_combine_kernel(
    chunks, sampled_ptr, logprob_ptr, vocab_size, num_chunks, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """One program per row."""
    launch_next(PDL)
    score_ptr, token_ptr, value_ptr, max_ptr, sum_ptr = chunks
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    mask = chunk < num_chunks
    offset = row * num_chunks + chunk
    wait_previous(PDL)
    scores = tl.load(score_ptr + offset, mask=mask, other=-float("inf"))
    tokens = tl.load(token_ptr + offset, mask=mask, other=0x7FFFFFFF)
    values = tl.load(value_ptr + offset, mask=mask, other=-float("inf"))
    _, best_token = tl.reduce((scores, tokens), 0, better)
    best_value = tl.max(tl.where(tokens == best_token, values, -float("inf")), axis=0)
    maxima = tl.load(max_ptr + offset, mask=mask, other=-float("inf"))
    sums = tl.load(sum_ptr + offset, mask=mask, other=0.0)
    maximum = tl.max(maxima, axis=0)
    total = tl.sum(sums * tl.where(sums > 0, tl.exp(maxima - maximum), 0.0), axis=0)
    # A NaN is neither larger nor smaller and may leave the padding's token; the next step must not read its
    # embedding. The logprob is NaN.
    tl.store(sampled_ptr + row, tl.minimum(best_token, vocab_size - 1).to(tl.int64))
    tl.store(logprob_ptr + row, best_value - maximum - tl.log(total))


def sample_triton(logits_RV, temperature_R, seed_R, position_R, values_R=None):
    """Launches `sample`'s kernels; the logprob is that of the scaled logit `values_R`, where it is given."""
    num_rows, vocab_size = logits_RV.shape
    num_chunks = cdiv(vocab_size, CHUNK)
    device = logits_RV.device
    score, value, maximum, total = torch.empty(4, num_rows, num_chunks, dtype=torch.float32, device=device)
    token = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=device)
    sampled_R = torch.empty(num_rows, dtype=torch.int64, device=device)
    logprob_R = torch.empty(num_rows, dtype=torch.float32, device=device)
    noise_of, chunks = (temperature_R, seed_R, position_R), (score, token, value, maximum, total)
    options = launch_options(num_warps=8)
    _sample_chunk_kernel[(num_rows, num_chunks)](
        noise_of, logits_RV, chunks, vocab_size, num_chunks, CHUNK=CHUNK, **options
    )
    if values_R is not None:
        value.copy_(values_R[:, None].expand_as(value))
    block, options = next_power_of_2(num_chunks), launch_options(num_warps=1)
    _sample_combine_kernel[(num_rows,)](
        chunks, sampled_R, logprob_R, vocab_size, num_chunks, BLOCK=block, **options
    )
    return sampled_R, logprob_R


@reference_of(sample_triton)
def sample(
    logits_RV: torch.Tensor, temperature_R: torch.Tensor, seed_R: torch.Tensor, position_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (token int64 `[R]`, full-vocabulary logprob `[R]`).

    The logprob is that at the row's temperature, at 1 where it is 0.
    `temperature_R` float32, `seed_R` int64, `position_R` the absolute index of the token being sampled.
    """
    scaled_RV = scaled_logits(logits_RV, temperature_R)
    token_R = perturbed_logits(scaled_RV, temperature_R, seed_R, position_R).argmax(-1)
    logprob_R = scaled_RV.gather(-1, token_R.unsqueeze(-1)).squeeze(-1) - row_logsumexp(scaled_RV)
    return token_R, logprob_R


def target_logprobs_triton(logits_RV, temperature_R, targets_R):
    """Launches `sample`'s kernels with any noise, and asks for the logprob of another token."""
    chosen_R1 = scaled_logits(logits_RV.gather(-1, targets_R.unsqueeze(-1)), temperature_R)
    any_R = torch.zeros_like(targets_R)
    return sample_triton(logits_RV, temperature_R, any_R, any_R, chosen_R1.squeeze(-1))[1]


@reference_of(target_logprobs_triton)
def target_logprobs(
    logits_RV: torch.Tensor, temperature_R: torch.Tensor, targets_R: torch.Tensor
) -> torch.Tensor:
    """Returns the logprobs of given tokens: the bits that `sample` returns where it samples them."""
    scaled_RV = scaled_logits(logits_RV, temperature_R)
    return scaled_RV.gather(-1, targets_R.unsqueeze(-1)).squeeze(-1) - row_logsumexp(scaled_RV)


def sample_truncated(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    seed_R: torch.Tensor,
    position_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns `sample` over the tokens that truncation leaves, and the log of their mass.

    Truncation is top-k (0: off), then top-p (1: off), then min-p (0: off). The order and meaning are Hugging
    Face's: top-p counts mass within what top-k left, and keeps the token that crosses the threshold; min-p is
    relative to the most likely token. Of equal logits the lower id is kept. Plain torch on every device. The
    logprob stays that of the full vocabulary; subtract the log kept mass for the truncated distribution's.
    Rows that nothing truncates get what `sample` gives them, to the bit, whatever else runs in the batch.
    """
    return in_wide_pieces(
        _sample_truncated, logits_RV, temperature_R, seed_R, position_R, top_k_R, top_p_R, min_p_R
    )


def top_logprobs(
    logits_RV: torch.Tensor, temperature_R: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns logprobs and ids of each row's `count` most likely tokens, `[R, count]`.

    Logprobs are those at the row's temperature, at 1 where it is 0.
    """
    return in_wide_pieces(
        lambda logits, temperature: scaled_logits(logits, temperature).log_softmax(-1).topk(count),
        logits_RV,
        temperature_R,
    )


def in_wide_pieces(
    function: Callable[..., Iterable[torch.Tensor]], *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Applies a function of rows to WIDE_ROWS of them at a time; temporaries are released before the next."""
    pieces = [
        function(*piece) for piece in zip(*(tensor.split(WIDE_ROWS) for tensor in tensors), strict=True)
    ]
    return tuple(torch.cat(outs) if len(outs) > 1 else outs[0] for outs in zip(*pieces, strict=True))


def _sample_truncated(logits_RV, temperature_R, seed_R, position_R, top_k_R, top_p_R, min_p_R):
    scaled_RV = scaled_logits(logits_RV, temperature_R)
    logsumexp_R = row_logsumexp(scaled_RV)
    kept_RV, log_mass_R = kept_tokens(scaled_RV, logsumexp_R, top_k_R, top_p_R, min_p_R)
    token_R = (
        perturbed_logits(scaled_RV, temperature_R, seed_R, position_R)
        .masked_fill(~kept_RV, -torch.inf)
        .argmax(-1)
    )
    logprob_R = scaled_RV.gather(-1, token_R.unsqueeze(-1)).squeeze(-1) - logsumexp_R
    whole_R = (top_k_R <= 0) & (top_p_R >= 1) & (min_p_R <= 0)
    whole_token_R, whole_logprob_R = sample(logits_RV, temperature_R, seed_R, position_R)
    return (
        torch.where(whole_R, whole_token_R, token_R),
        torch.where(whole_R, whole_logprob_R, logprob_R),
        log_mass_R,
    )


def kept_tokens(
    scaled_RV: torch.Tensor,
    logsumexp_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns which tokens truncation leaves `[R, V]` and the log of their mass `[R]`; see above."""
    vocab_size = scaled_RV.shape[1]
    sorted_RV, token_RV = scaled_RV.sort(dim=-1, descending=True, stable=True)
    mass_RV = ((sorted_RV - logsumexp_R.unsqueeze(-1)).exp().double() * MASS_UNIT).long()
    rank_V = torch.arange(vocab_size, device=scaled_RV.device)
    top_k_R = torch.where(top_k_R > 0, top_k_R, vocab_size)
    keep_RV = rank_V < top_k_R.unsqueeze(-1)

    left_RV = torch.where(keep_RV, mass_RV, 0)
    mass_before_RV = left_RV.cumsum(-1) - left_RV
    limit_R = (left_RV.sum(-1).double() * top_p_R.double()).unsqueeze(-1)
    keep_RV &= (mass_before_RV < limit_R) | (top_p_R >= 1).unsqueeze(-1)
    relative_RV = (sorted_RV - sorted_RV[:, :1]).exp()
    keep_RV &= (relative_RV >= min_p_R.to(relative_RV.dtype).unsqueeze(-1)) | (min_p_R <= 0).unsqueeze(-1)
    keep_RV[:, 0] = True

    log_mass_R = (torch.where(keep_RV, mass_RV, 0).sum(-1).double() / mass_RV.sum(-1).double()).log()
    return torch.zeros_like(keep_RV).scatter(-1, token_RV, keep_RV), log_mass_R.to(scaled_RV.dtype)
