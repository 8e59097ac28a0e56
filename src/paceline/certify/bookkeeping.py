"""What must hold of a completion whatever was sampled: its end, its reason, its segments, its lists."""

import math
from collections.abc import Sequence

from paceline.certify.oracle.ending import ending
from paceline.certify.subject import Subject
from paceline.types import Completion, FinishReason


def problems_of(subject: Subject, completions: Sequence[Completion]) -> list[str]:
    """Returns what is wrong with the completions, one line each."""
    return [
        f"{completion.request.id}: {problem}"
        for completion in completions
        for problem in (*_ending_problems(subject, completion), *_list_problems(completion))
    ]


def _ending_problems(subject: Subject, completion: Completion) -> list[str]:
    """Compares where and why it ended with what its tokens require."""
    request = completion.request
    sampling = request.sampling
    stop_ids = set(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        stop_ids |= set(subject.policy.config.eos_token_ids)
    limit = min(sampling.max_tokens, subject.policy.config.max_positions - len(request.prompt))
    end = ending(completion.tokens, frozenset(stop_ids), sampling.stop, subject.decode, limit)
    count = len(completion.tokens)
    if end.tokens != count:
        return [f"{count} tokens, but it ends after {end.tokens} by {end.reason}"]
    if completion.finish_reason is FinishReason.ABORTED:
        return []
    if not end.reason:
        return [f"ended by {completion.finish_reason} after {count} tokens with nothing that ends it"]
    if completion.finish_reason != end.reason:
        return [f"ended by {completion.finish_reason}, but its end is a {end.reason}"]
    return []


def _list_problems(completion: Completion) -> list[str]:
    count = len(completion.tokens)
    problems = []
    if len(completion.logprobs) != count:
        problems.append(f"{len(completion.logprobs)} logprobs of {count} tokens")
    if not all(math.isfinite(logprob) and logprob <= 1e-3 for logprob in completion.logprobs):
        problems.append("a logprob is not one")
    covered = [n for segment in completion.segments for n in range(segment.start, segment.stop)]
    if covered != list(range(count)) or not all(completion.loss_mask):
        problems.append(f"segments {completion.segments} of {count} tokens")
    versions = [segment.weight_version for segment in completion.segments]
    if versions != sorted(set(versions)):
        problems.append(f"weight versions in the order {versions}")
    if completion.request.sampling.top_logprobs and len(completion.top_logprobs) != count:
        problems.append(f"{len(completion.top_logprobs)} lists of likely tokens for {count} tokens")
    return problems
