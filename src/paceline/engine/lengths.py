"""The longest sequences of a recipe, by which pools and micro-batches are sized."""

from dataclasses import dataclass

from paceline.config import Config
from paceline.policy.config import DecoderConfig

# Prompt tokens assumed where task.max_prompt_tokens sets no limit, if responses may be as long.
UNKNOWN_PROMPT = 1024


@dataclass(frozen=True)
class Lengths:
    """The longest sequences a recipe allows for, in tokens."""

    request: int  # prompt and response, in training or evaluation
    micro_batch: int
    certain: int  # as `request`, but with a prompt of one token where the prompt length is unknown

    @staticmethod
    def of(config: Config, shape: DecoderConfig) -> "Lengths":
        longest = max(config.rollout.max_tokens, config.eval.max_tokens)
        prompt = config.task.max_prompt_tokens or min(longest, UNKNOWN_PROMPT)
        certain = (config.task.max_prompt_tokens or 1) + longest
        trained = min(shape.max_positions, prompt + config.rollout.max_tokens)
        request, certain = (min(shape.max_positions, tokens) for tokens in (prompt + longest, certain))
        return Lengths(request, max(config.learning.micro_batch_tokens, trained), certain)


def pool_too_small(kv_tokens: int, lengths: Lengths) -> str:
    """Returns why a KV pool of the recipe's size cannot serve the recipe's requests; empty if it can."""
    if kv_tokens >= lengths.certain:
        return ""
    return (
        f"rollout.kv_tokens = {kv_tokens}: one request may need {lengths.certain} tokens, prompt and "
        "response; "
        "raise it, set it to 0 to take what fits, or lower rollout.max_tokens (and eval.max_tokens)"
    )
