"""What an engine refuses to run, in words for whoever asked.

Everything is checked before a request meets others: on the device one bad row would end the batch it is in.
"""

from dataclasses import dataclass

from paceline.engine.rows import MAX_STOP_IDS
from paceline.engine.sequence import Sequence

WORD = 1 << 63  # rows keep integers in signed 64 bits


@dataclass(frozen=True)
class Limits:
    """Of an engine."""

    max_length: int
    pool_tokens: int
    vocab_size: int
    reads_text: bool  # has a tokenizer


def refusal(sequence: Sequence, stop_ids: tuple[int, ...], limits: Limits) -> str:
    """Why this request cannot run; empty if it can."""
    request, sampling = sequence.request, sequence.request.sampling
    prompt, last = len(request.prompt), limits.vocab_size - 1
    if not 1 <= prompt < limits.max_length:
        return f"prompt of {prompt} tokens; this engine takes 1 to {limits.max_length - 1}"
    lowest, highest = min(request.prompt), max(request.prompt)
    if lowest < 0 or highest > last:
        return f"the prompt holds token {lowest if lowest < 0 else highest}; the policy's are 0 to {last}"
    if sampling.max_tokens < 0:
        return f"max_tokens {sampling.max_tokens}; it must be 0 or more"
    if sequence.limit > limits.pool_tokens:
        asked = f"prompt of {prompt} tokens and max_tokens {sampling.max_tokens}"
        return f"{asked} need {sequence.limit} KV tokens; the pool holds {limits.pool_tokens}"
    if not 0 <= sampling.top_logprobs <= limits.vocab_size:
        return f"top_logprobs {sampling.top_logprobs}; it must be 0 to {limits.vocab_size}, the size of the vocabulary"
    if sampling.stop and not limits.reads_text:
        return "stop strings need an engine with a tokenizer"
    if len(stop_ids) > MAX_STOP_IDS:
        return f"{len(stop_ids)} stop tokens; at most {MAX_STOP_IDS} are supported"
    for name, values in (("seed", (request.seed,)), ("top_k", (sampling.top_k,)), ("stop token", stop_ids)):
        for value in values:
            if not -WORD <= value < WORD:
                return f"{name} {value} does not fit into 64 bits; it must be from -2^63 to 2^63 - 1"
    return ""
