"""The logprobs that came with the tokens, against a forward pass over the same text.

Base precision: against a learner's pass, within limits by type. FP8: against the FP8 policy (`fp8_policy.py`)
and its shaken copies. A rounding that fell the other way may move a token's logprob by 1e-7 or by 1, so there
is no limit to write down; but the backend is then one more shaken copy, and is the one that moved farthest
for one token in copies + 1. A scale that is wrong moves most of them farther. What moved one token of a text
moves those behind it: a quarter of the prompts, those with the most such tokens, are therefore left out. How
far rollout and learner are apart is told, and promised by nobody.
"""

from collections.abc import Iterator, Sequence

import torch

from paceline.certify.certificate import Check
from paceline.certify.subject import Policy, Subject
from paceline.learning.batch import TrainingSequence, split_by_tokens, micro_batches
from paceline.learning.logprobs import token_logprobs
from paceline.types import Completion

# (largest, mean) difference of a logprob between backend and learner. bf16 keeps 8 bits, so logits of about
# 10 are off by a few hundredths.
PARITY_LIMITS = {torch.float64: (1e-8, 1e-9), torch.float32: (1e-3, 1e-5), torch.bfloat16: (1.0, 0.03)}
BATCH_TOKENS = 4096
LAST_DIGITS = 1e-5  # of a logprob whose logits were summed in float32
CONTESTED = (0.02, 0.98)  # probabilities between which a logprob says something about the logits
FARTHER_LIMIT = (
    1 / 5
)  # of the contested tokens; one in nine is expected, and fewer where the worst prompts are left out


def check_logprobs(
    subject: Subject, completions: list[Completion], name: str, tell_distance: bool = False
) -> list[Check]:
    """`name` says where "logprobs of ..." goes. Truncated samples too, since what is compared is the full
    vocabulary's logprob.
    """
    texts = _texts(completions)
    rollout_R = torch.tensor(
        [logprob for text in texts for logprob in text.rollout_logprobs], dtype=torch.float64
    )
    if not subject.shaken:
        difference_R = rollout_R - _logprobs(subject.policy, texts)
        return [
            _learner_check(
                difference_R, PARITY_LIMITS[subject.policy.dtype], name.format("logprobs of a learner")
            )
        ]
    exact_R = _logprobs(subject.exact_policy, texts)
    spread_R = torch.stack([(_logprobs(other, texts) - exact_R).abs() for other in subject.shaken]).amax(0)
    checks = [
        _fp8_check(
            rollout_R,
            exact_R,
            spread_R,
            texts,
            len(subject.shaken),
            name.format("logprobs of the FP8 policy"),
        )
    ]
    if tell_distance:
        learner_R = _logprobs(subject.policy, texts)
        told = (
            f"rollout: {_apart(rollout_R - learner_R)}; the FP8 policy itself: {_apart(exact_R - learner_R)}"
        )
        checks.append(Check(name.format("distance to the learner"), None, told, promised=False))
    return checks


def _learner_check(difference_R: torch.Tensor, limits: tuple[float, float], name: str) -> Check:
    largest, mean = float(difference_R.abs().max()), float(difference_R.abs().mean())
    detail = f"{_apart(difference_R)} over {len(difference_R)} tokens (allowed: {limits[0]:g}, {limits[1]:g})"
    return Check(name, largest <= limits[0] and mean <= limits[1], detail)


def _fp8_check(
    rollout_R: torch.Tensor,
    exact_R: torch.Tensor,
    spread_R: torch.Tensor,
    texts: list[TrainingSequence],
    copies: int,
    name: str,
) -> Check:
    difference_R = rollout_R - exact_R
    contested_R = (exact_R.exp() > CONTESTED[0]) & (exact_R.exp() < CONTESTED[1])
    if not contested_R.any():
        contested_R[:] = True
    farther_R = ~(difference_R.abs() <= spread_R + LAST_DIGITS)  # true for NaN
    by_prompt: dict[tuple[int, ...], dict[tuple, bool]] = {}
    for (prompt, context), contested, farther in zip(
        _places(texts), contested_R.tolist(), farther_R.tolist(), strict=True
    ):
        if contested:
            by_prompt.setdefault(prompt, {})[context] = farther
    found = sorted(
        (list(tokens.values()) for tokens in by_prompt.values()), key=lambda tokens: sum(tokens) / len(tokens)
    )
    left_out = max(len(found) // 4, min(1, len(found) - 1))
    share = _share(found[: len(found) - left_out])
    detail = (
        f"{_apart(difference_R)}; farther than {copies} shaken copies: {100 * _share(found):.1f}% of {sum(map(len, found))} contested tokens "
        f"(expected: {100 / (copies + 1):.0f}%), {100 * share:.1f}% without {left_out} of {len(found)} prompts (allowed: {100 * FARTHER_LIMIT:.0f}%)"
    )
    return Check(name, share <= FARTHER_LIMIT, detail)


def _share(found: list[list[bool]]) -> float:
    return sum(map(sum, found)) / sum(map(len, found))


def _apart(difference_R: torch.Tensor) -> str:
    return f"differ by {float(difference_R.abs().max()):.1e} at most and {float(difference_R.abs().mean()):.1e} on average"


@torch.inference_mode()
def _logprobs(policy: Policy, texts: list[TrainingSequence]) -> torch.Tensor:
    return torch.cat(
        [
            token_logprobs(policy, batch)[0].double().cpu()
            for batch in micro_batches(texts, BATCH_TOKENS, policy.device)
        ]
    )


def _texts(completions: Sequence[Completion]) -> list[TrainingSequence]:
    """As a learner sees them, and in the order that micro-batches have them."""
    texts = []
    for completion in completions:
        prompt, temperature = completion.request.prompt, completion.request.sampling.temperature or 1.0
        if completion.tokens:
            logprobs = completion.logprobs
            texts.append(
                TrainingSequence(
                    prompt + completion.tokens,
                    len(prompt),
                    tuple(completion.loss_mask),
                    logprobs,
                    0.0,
                    temperature,
                )
            )
    return [
        text for part in split_by_tokens(list(dict.fromkeys(texts)), BATCH_TOKENS) for text in part
    ]  # what is equal once


def _places(texts: list[TrainingSequence]) -> Iterator[tuple[tuple[int, ...], tuple]]:
    """Of each response token: the prompt, and what is equal for samples that share it."""
    for text in texts:
        for end in range(text.prompt_length, len(text.tokens)):
            yield text.tokens[: text.prompt_length], (text.temperature, text.tokens[: end + 1])
