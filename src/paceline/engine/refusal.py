"""What an engine refuses to run, in words for whoever asked."""

from tokenizers import Tokenizer

from paceline.engine.rows import MAX_STOP_IDS
from paceline.engine.sequence import Sequence


def refusal(sequence: Sequence, stop_ids: tuple[int, ...], max_length: int, pool_tokens: int, tokenizer: Tokenizer | None) -> str:
    """Why this request cannot run; empty if it can."""
    request = sequence.request
    prompt = len(request.prompt)
    if not 1 <= prompt < max_length:
        return f"prompt of {prompt} tokens; this engine takes 1 to {max_length - 1}"
    if sequence.limit > pool_tokens:
        asked = f"prompt of {prompt} tokens and max_tokens {request.sampling.max_tokens}"
        return f"{asked} need {sequence.limit} KV tokens; the pool holds {pool_tokens}"
    if request.sampling.stop and tokenizer is None:
        return "stop strings need an engine with a tokenizer"
    if len(stop_ids) > MAX_STOP_IDS:
        return f"{len(stop_ids)} stop tokens; at most {MAX_STOP_IDS} are supported"
    return ""
