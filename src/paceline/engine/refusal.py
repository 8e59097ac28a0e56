"""Checks of requests before they run: why an engine refuses one, as a message for the caller.

Requests are checked before they are batched: on the device one bad row would end its whole batch.
"""

import math
from dataclasses import dataclass

from paceline.engine.request_state import RequestState
from paceline.engine.rows import MAX_STOP_IDS
from paceline.types import MIN_TEMPERATURE, Request, SamplingParams

# Rows keep integers in signed 64 bits: from minus this to below this.
WORD = 1 << 63


@dataclass(frozen=True)
class Limits:
    """The limits of an engine's requests."""

    # Tokens of a prompt and its response.
    max_length: int
    # Tokens that the KV pool holds.
    pool_tokens: int
    vocab_size: int
    # Whether the engine has a tokenizer.
    reads_text: bool


def refusal(sequence: RequestState, stop_ids: tuple[int, ...], limits: Limits) -> str:
    """Returns why this request cannot run; empty if it can."""
    request = sequence.request
    return (
        prompt_refusal(request, limits)
        or sampling_refusal(request.sampling, limits)
        or _room_refusal(sequence, stop_ids, limits)
    )


def prompt_refusal(request: Request, limits: Limits) -> str:
    """Returns why no backend can run this prompt; empty if one can."""
    prompt = request.prompt
    last = limits.vocab_size - 1
    if not 1 <= len(prompt) < limits.max_length:
        return f"prompt of {len(prompt)} tokens; this engine takes 1 to {limits.max_length - 1}"
    lowest, highest = min(prompt), max(prompt)
    if lowest < 0 or highest > last:
        return f"the prompt holds token {lowest if lowest < 0 else highest}; the policy's are 0 to {last}"
    return ""


def sampling_refusal(sampling: SamplingParams, limits: Limits) -> str:
    """Returns why no backend can sample like this; empty if one can. No comparison is true of a NaN."""
    if not (sampling.temperature == 0 or MIN_TEMPERATURE <= sampling.temperature < math.inf):
        return (
            f"temperature {sampling.temperature}; it must be 0 (greedy) or a number from {MIN_TEMPERATURE:g}"
        )
    if not 0 < sampling.top_p <= 1:
        return f"top_p {sampling.top_p}; it must be more than 0 and at most 1, which keeps all tokens"
    if not 0 <= sampling.min_p <= 1:
        return f"min_p {sampling.min_p}; it must be from 0, which keeps all tokens, to 1"
    if sampling.max_tokens < 0:
        return f"max_tokens {sampling.max_tokens}; it must be 0 or more"
    if not 0 <= sampling.top_logprobs <= limits.vocab_size:
        allowed = f"0 to {limits.vocab_size}, the size of the vocabulary"
        return f"top_logprobs {sampling.top_logprobs}; it must be {allowed}"
    if sampling.stop and not limits.reads_text:
        return "stop strings need an engine with a tokenizer"
    return ""


def _room_refusal(sequence: RequestState, stop_ids: tuple[int, ...], limits: Limits) -> str:
    """Returns why the engine's own memory cannot hold this request; empty if it can."""
    request = sequence.request
    sampling = request.sampling
    if sequence.limit > limits.pool_tokens:
        asked = f"prompt of {len(request.prompt)} tokens and max_tokens {sampling.max_tokens}"
        return f"{asked} need {sequence.limit} KV tokens; the pool holds {limits.pool_tokens}"
    if len(stop_ids) > MAX_STOP_IDS:
        return f"{len(stop_ids)} stop tokens; at most {MAX_STOP_IDS} are supported"
    for name, values in (("seed", (request.seed,)), ("top_k", (sampling.top_k,)), ("stop token", stop_ids)):
        for value in values:
            if not -WORD <= value < WORD:
                return f"{name} {value} does not fit into 64 bits; it must be from -2^63 to 2^63 - 1"
    return ""
