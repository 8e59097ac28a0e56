"""From groups of samples to packed micro-batches of tensors.

    sequence   p0 p1 p2 r0 r1 r2          prompt, then response
    predictors       p2 r0 r1             the hidden states that predict response tokens, one place before
    targets             r0 r1 r2

A token budget splits a step into micro-batches; a sequence is never split, so a sum over one is complete
within a micro-batch. In the names of tensors here and in all of `learning/`, R means response tokens of the
whole micro-batch, T all of its tokens, and B sequences.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from paceline.policy.attention import PackedAttention
from paceline.policy.decoder import Capture
from paceline.policy.replay import RouterReplay, packed_replay
from paceline.types import Completion, Routing


@dataclass(frozen=True)
class TrainingSequence:
    """A prompt and response to learn from."""

    tokens: tuple[int, ...] | np.ndarray  # prompt and response
    prompt_length: int
    loss_mask: tuple[bool, ...] | np.ndarray  # over the response
    rollout_logprobs: tuple[float, ...] | np.ndarray  # over the response
    advantage: float
    temperature: float
    penalties: tuple[float, ...] = ()  # over the response, subtracted from the advantage; empty: none
    # Over the response, by the learner before the step's first update; empty: not computed.
    learner_logprobs: tuple[float, ...] = ()
    routing: Routing | None = None  # of all tokens but the last, where the rollout recorded it
    versions: tuple[int, ...] = ()  # over the response: of the weights that sampled; empty: unknown

    @property
    def loss_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask))


@dataclass(frozen=True)
class MicroBatch:
    """Packed sequences; tensors with suffix R run over the response tokens of all of them.

    Numbers that come from Python stay float64 and are rounded where they meet the policy's own type.
    """

    tokens_T: torch.Tensor
    attention: PackedAttention
    predictors_R: torch.Tensor
    targets_R: torch.Tensor
    mask_R: torch.Tensor
    rollout_logprobs_R: torch.Tensor
    # By the learner before the step's first update; None: not computed.
    learner_logprobs_R: torch.Tensor | None
    # The denominator of the clipped ratio: the rollout's, or the learner's in decoupled mode (correction.py).
    old_logprobs_R: torch.Tensor
    advantages_R: torch.Tensor
    temperatures_R: torch.Tensor
    sequence_R: torch.Tensor  # which sequence of the micro-batch a token belongs to
    response_lengths: tuple[int, ...]  # of each sequence, in tokens R
    replay: RouterReplay | None = None  # of the sequences whose routing was recorded
    versions: tuple[int, ...] = ()  # of the weights that sampled, each once; empty: unknown
    versions_R: torch.Tensor | None = None  # where there are several
    capture: Capture | None = None  # captures the policy's states over these tokens
    divergence_R: torch.Tensor | None = None  # of policy and teacher, with its gradient (teacher.py)

    @property
    def num_sequences(self) -> int:
        return len(self.response_lengths)

    def sequence_sums(self, values_R: torch.Tensor) -> torch.Tensor:
        return values_R.new_zeros(self.num_sequences).index_add(0, self.sequence_R, values_R)


def training_sequence(completion: Completion) -> TrainingSequence:
    """Returns a completion as a sequence to learn from, still without an advantage.

    The learner computes its logprobs at the temperature of the rollout: at any other they would be those of
    another distribution.
    """
    if completion.request.sampling.truncates:
        raise ValueError(
            f"{completion.request.id} was sampled with top_p, top_k or min_p, and its logprobs are not those "
            "of the distribution it was drawn from: train on samples made with temperature alone"
        )
    prompt = completion.request.prompt
    temperature = completion.request.sampling.temperature or 1.0  # temperature 0 reports logprobs at 1
    return TrainingSequence(
        prompt + completion.tokens,
        len(prompt),
        tuple(completion.loss_mask),
        completion.logprobs,
        0.0,
        temperature,
        routing=completion.routing,
        versions=_versions(completion),
    )


def _versions(completion: Completion) -> tuple[int, ...]:
    """Returns the weight version of every response token; empty where an old file has none."""
    versions = [v for s in completion.segments for v in [s.weight_version] * (s.stop - s.start)]
    return tuple(versions) if len(versions) == len(completion.tokens) else ()


def told_versions(sequences: Sequence[TrainingSequence]) -> tuple[int, ...]:
    """Returns the versions of the weights that sampled, each once; empty where any is unknown."""
    told = all(len(s.versions) == len(s.loss_mask) for s in sequences)
    return tuple(sorted({v for s in sequences for v in s.versions})) if told else ()


def split_by_tokens(sequences: Sequence[TrainingSequence], token_budget: int) -> list[list[TrainingSequence]]:
    """Splits sequences into parts of at most `token_budget` tokens, longest first.

    A sequence that is longer than the budget is a part of its own.
    """
    parts: list[list[TrainingSequence]] = []
    for sequence in sorted(sequences, key=lambda s: len(s.tokens), reverse=True):
        if not parts or sum(len(s.tokens) for s in parts[-1]) + len(sequence.tokens) > token_budget:
            parts.append([])
        parts[-1].append(sequence)
    return parts


def micro_batches(
    sequences: Sequence[TrainingSequence], token_budget: int, device: torch.device
) -> list[MicroBatch]:
    return [pack(part, device) for part in split_by_tokens(sequences, token_budget)]


def pack(sequences: Sequence[TrainingSequence], device: torch.device) -> MicroBatch:
    """Packs sequences into one micro-batch, in their order."""
    assert all(s.prompt_length > 0 for s in sequences), "another sequence would predict the first token"
    lengths = [len(s.tokens) for s in sequences]
    responses = [length - s.prompt_length for length, s in zip(lengths, sequences, strict=True)]
    ends = list(accumulate(lengths))
    predictors = [np.arange(end - 1 - count, end - 1) for end, count in zip(ends, responses, strict=True)]

    # By way of numpy: tensors of Python's numbers take five times as long.
    def joined(parts: Iterable, dtype: type = np.float64) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([np.asarray(part, dtype) for part in parts])).to(device)

    def each(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device)

    tokens_T = joined((s.tokens for s in sequences), np.int64)
    predictors_R = joined(predictors, np.int64)
    sequence_R = joined([np.repeat(np.arange(len(sequences)), responses)], np.int64)
    rollout_logprobs_R = joined(s.rollout_logprobs for s in sequences)
    penalties_R = joined(s.penalties or np.zeros(n) for s, n in zip(sequences, responses, strict=True))
    computed = any(s.learner_logprobs for s in sequences)
    distinct = told_versions(sequences)
    return MicroBatch(
        tokens_T=tokens_T,
        attention=PackedAttention(lengths, device),
        predictors_R=predictors_R,
        targets_R=tokens_T[predictors_R + 1],
        mask_R=joined((s.loss_mask for s in sequences), np.bool_),
        rollout_logprobs_R=rollout_logprobs_R,
        learner_logprobs_R=joined(s.learner_logprobs for s in sequences) if computed else None,
        old_logprobs_R=rollout_logprobs_R,
        advantages_R=each([s.advantage for s in sequences])[sequence_R] - penalties_R,
        temperatures_R=each([s.temperature for s in sequences])[sequence_R],
        sequence_R=sequence_R,
        response_lengths=tuple(responses),
        replay=packed_replay([s.routing for s in sequences], lengths, device),
        versions=distinct,
        versions_R=joined((s.versions for s in sequences), np.int64) if len(distinct) > 1 else None,
    )
