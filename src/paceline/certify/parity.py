"""Checks of the rollout's logprobs against a forward pass over the same text.

Base precision: against a learner's pass, within limits by type. FP8: against the FP8 policy (`fp8_policy.py`)
and its perturbed copies. A rounding that fell the other way may move a token's logprob by 1e-7 or by 1, so
there is no limit to write down; but the backend is then one more perturbed copy, and is the one that moved
farthest for one token in copies + 1. A scale that is wrong moves most of them farther. What moved one token
of a text moves those behind it: a quarter of the prompts, those with the most such tokens, are therefore left
out. The distance between rollout and learner is reported, not judged.
"""

from collections.abc import Iterator, Sequence

import torch

from paceline.certify.certificate import Check
from paceline.certify.subject import Policy, Subject
from paceline.learning.batch import TrainingSequence, micro_batches, split_by_tokens
from paceline.learning.logprobs import token_logprobs
from paceline.types import Completion

# (largest, mean) difference of a logprob between backend and learner. bf16 keeps 8 bits, so logits of about
# 10 are off by a few hundredths.
PARITY_LIMITS = {torch.float64: (1e-8, 1e-9), torch.float32: (1e-3, 1e-5), torch.bfloat16: (1.0, 0.03)}

# Tokens of a forward pass.
BATCH_TOKENS = 4096

# Rounding of a logprob whose logits were summed in float32.
LAST_DIGITS = 1e-5

# Probabilities between which a logprob is informative about the logits.
MID_PROBABILITY = (0.02, 0.98)

# Share of those tokens that may have moved farther than every copy. One in nine is expected of eight copies,
# and fewer where the worst prompts are left out.
FARTHER_LIMIT = 1 / 5


def check_logprobs(
    subject: Subject, completions: list[Completion], name: str, tell_distance: bool = False
) -> list[Check]:
    """Compares the completions' logprobs; `name` is a template of the checks' names.

    Samples with truncation are compared, too: logprobs are those of the full vocabulary.
    """
    texts = _texts(completions)
    rollout_R = torch.tensor(
        [logprob for text in texts for logprob in text.rollout_logprobs], dtype=torch.float64
    )
    if not subject.perturbed:
        # Below temperature 1, which magnifies what float32 does, it is the difference of the logits.
        scale_R = torch.tensor([min(1.0, text.temperature) for text in texts for _ in text.rollout_logprobs])
        difference_R = scale_R * (rollout_R - _logprobs(subject.policy, texts))
        return [
            _learner_check(
                difference_R, PARITY_LIMITS[subject.policy.dtype], name.format("logprobs of a learner")
            )
        ]
    exact_R = _logprobs(subject.exact_policy, texts)
    spread_R = torch.stack([(_logprobs(other, texts) - exact_R).abs() for other in subject.perturbed]).amax(0)
    checks = [
        _fp8_check(
            rollout_R,
            exact_R,
            spread_R,
            texts,
            len(subject.perturbed),
            name.format("logprobs of the FP8 policy"),
        )
    ]
    if tell_distance:
        learner_R = _logprobs(subject.policy, texts)
        detail = (
            f"rollout: {_differences(rollout_R - learner_R)}; "
            f"the FP8 policy itself: {_differences(exact_R - learner_R)}"
        )
        checks.append(Check(name.format("distance to the learner"), None, detail, promised=False))
    return checks


def _learner_check(difference_R: torch.Tensor, limits: tuple[float, float], name: str) -> Check:
    largest = float(difference_R.abs().max())
    mean = float(difference_R.abs().mean())
    largest_allowed, mean_allowed = limits
    detail = (
        f"{_differences(difference_R)} over {len(difference_R)} tokens "
        f"(allowed: {largest_allowed:g}, {mean_allowed:g})"
    )
    return Check(name, largest <= largest_allowed and mean <= mean_allowed, detail)


def _fp8_check(
    rollout_R: torch.Tensor,
    exact_R: torch.Tensor,
    spread_R: torch.Tensor,
    texts: list[TrainingSequence],
    copies: int,
    name: str,
) -> Check:
    difference_R = rollout_R - exact_R
    mid_R = (exact_R.exp() > MID_PROBABILITY[0]) & (exact_R.exp() < MID_PROBABILITY[1])
    if not mid_R.any():
        mid_R[:] = True
    farther_R = ~(difference_R.abs() <= spread_R + LAST_DIGITS)  # true for NaN
    by_prompt: dict[tuple[int, ...], dict[tuple, bool]] = {}
    for (prompt, context), mid, farther in zip(
        _places(texts), mid_R.tolist(), farther_R.tolist(), strict=True
    ):
        if mid:
            by_prompt.setdefault(prompt, {})[context] = farther
    found = sorted(
        (list(tokens.values()) for tokens in by_prompt.values()), key=lambda tokens: sum(tokens) / len(tokens)
    )
    left_out = max(len(found) // 4, min(1, len(found) - 1))
    share = _share(found[: len(found) - left_out])
    detail = (
        f"{_differences(difference_R)}; farther than {copies} perturbed copies: "
        f"{100 * _share(found):.1f}% of {sum(map(len, found))} mid-probability tokens "
        f"(expected: {100 / (copies + 1):.0f}%), {100 * share:.1f}% without {left_out} of {len(found)} "
        f"prompts (allowed: {100 * FARTHER_LIMIT:.0f}%)"
    )
    return Check(name, share <= FARTHER_LIMIT, detail)


def _share(found: list[list[bool]]) -> float:
    return sum(map(sum, found)) / sum(map(len, found))


def _differences(difference_R: torch.Tensor) -> str:
    largest = float(difference_R.abs().max())
    mean = float(difference_R.abs().mean())
    return f"differ by {largest:.1e} at most and {mean:.1e} on average"


@torch.inference_mode()
def _logprobs(policy: Policy, texts: list[TrainingSequence]) -> torch.Tensor:
    return torch.cat(
        [
            token_logprobs(policy, batch)[0].double().cpu()
            for batch in micro_batches(texts, BATCH_TOKENS, policy.device)
        ]
    )


def _texts(completions: Sequence[Completion]) -> list[TrainingSequence]:
    """Returns different texts as a learner sees them, in the order that micro-batches have them."""
    texts = []
    for completion in completions:
        prompt = completion.request.prompt
        if completion.tokens:
            texts.append(
                TrainingSequence(
                    tokens=prompt + completion.tokens,
                    prompt_length=len(prompt),
                    loss_mask=tuple(completion.loss_mask),
                    rollout_logprobs=completion.logprobs,
                    advantage=0.0,
                    temperature=completion.request.sampling.temperature or 1.0,
                )
            )
    different = list(dict.fromkeys(texts))
    return [text for part in split_by_tokens(different, BATCH_TOKENS) for text in part]


def _places(texts: list[TrainingSequence]) -> Iterator[tuple[tuple[int, ...], tuple]]:
    """Yields for each response token its prompt, and a key that samples which share the token share."""
    for text in texts:
        for end in range(text.prompt_length, len(text.tokens)):
            yield text.tokens[: text.prompt_length], (text.temperature, text.tokens[: end + 1])
