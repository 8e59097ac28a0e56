"""From groups of samples to packed micro-batches of tensors.

    sequence   p0 p1 p2 r0 r1 r2          prompt, then response
    predictors       p2 r0 r1             the hidden state that predicts a response token stands one place before it
    targets             r0 r1 r2

A token budget cuts a step into micro-batches; a sequence is never split, so whatever is a sum over one stays
in one place.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.policy.attention import PackedAttention
from paceline.policy.replay import RouterReplay, packed_replay
from paceline.types import Completion, Routing


@dataclass(frozen=True)
class TrainingSequence:
    tokens: tuple[int, ...]
    prompt_length: int
    loss_mask: tuple[bool, ...]  # over the response
    rollout_logprobs: tuple[float, ...]
    advantage: float
    temperature: float
    penalties: tuple[float, ...] = ()  # over the response, subtracted from the advantage; empty: none
    learner_logprobs: tuple[
        float, ...
    ] = ()  # over the response, by the learner before the step's first update; empty: not computed
    routing: Routing | None = None  # of all tokens but the last, where the rollout recorded it

    @property
    def loss_tokens(self) -> int:
        return sum(self.loss_mask)


@dataclass(frozen=True)
class MicroBatch:
    """Packed sequences; everything with suffix R runs over the response tokens of all of them.

    Numbers that come from Python stay float64 and are rounded where they meet the policy's own type.
    """

    tokens_T: torch.Tensor
    attention: PackedAttention
    predictors_R: torch.Tensor
    targets_R: torch.Tensor
    mask_R: torch.Tensor
    rollout_logprobs_R: torch.Tensor
    learner_logprobs_R: (
        torch.Tensor | None
    )  # of the learner's policy before the step's first update, where they were computed beforehand
    anchor_logprobs_R: (
        torch.Tensor
    )  # of the policy that the clipped ratio is taken to: the rollout's, unless correction.py says otherwise
    advantages_R: torch.Tensor
    temperatures_R: torch.Tensor
    sequence_R: torch.Tensor  # which sequence of the micro-batch a token belongs to
    response_lengths: tuple[int, ...]  # of each sequence, in tokens R
    replay: RouterReplay | None = None  # of the sequences whose routing was recorded

    @property
    def num_sequences(self) -> int:
        return len(self.response_lengths)

    def sequence_sums(self, values_R: torch.Tensor) -> torch.Tensor:
        """One sum for each sequence."""
        return values_R.new_zeros(self.num_sequences).index_add(0, self.sequence_R, values_R)


def training_sequence(completion: Completion) -> TrainingSequence:
    """Without an advantage yet. The learner's logprobs are at the temperature sampled with, or they would be
    of another distribution.
    """
    if completion.request.sampling.truncates:
        raise ValueError(
            f"{completion.request.id} was sampled with top_p, top_k or min_p, and its logprobs are not those "
            "of the distribution it was drawn from: "
            "train on samples made with temperature alone"
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
    )


def cut(sequences: Sequence[TrainingSequence], token_budget: int) -> list[list[TrainingSequence]]:
    """Longest first, as many as fit the budget; one that is longer than the budget goes alone."""
    parts: list[list[TrainingSequence]] = []
    for sequence in sorted(sequences, key=lambda s: len(s.tokens), reverse=True):
        if not parts or sum(len(s.tokens) for s in parts[-1]) + len(sequence.tokens) > token_budget:
            parts.append([])
        parts[-1].append(sequence)
    return parts


def micro_batches(
    sequences: Sequence[TrainingSequence], token_budget: int, device: torch.device
) -> list[MicroBatch]:
    return [pack(part, device) for part in cut(sequences, token_budget)]


def pack(sequences: Sequence[TrainingSequence], device: torch.device) -> MicroBatch:
    predictors: list[int] = []
    sequence_ids: list[int] = []
    penalties: list[float] = []
    start = 0
    for index, sequence in enumerate(sequences):
        responses = len(sequence.tokens) - sequence.prompt_length
        first = start + sequence.prompt_length - 1
        predictors.extend(range(first, first + responses))
        sequence_ids.extend([index] * responses)
        penalties.extend(sequence.penalties or [0.0] * responses)
        start += len(sequence.tokens)

    def tensor(values: list, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    tokens_T = torch.tensor([token for s in sequences for token in s.tokens], device=device)
    rollout_logprobs_R = tensor([x for s in sequences for x in s.rollout_logprobs])
    computed = any(s.learner_logprobs for s in sequences)
    predictors_R = torch.tensor(predictors, device=device)
    sequence_R = torch.tensor(sequence_ids, device=device)
    return MicroBatch(
        tokens_T=tokens_T,
        attention=PackedAttention([len(s.tokens) for s in sequences], device),
        predictors_R=predictors_R,
        targets_R=tokens_T[predictors_R + 1],
        mask_R=tensor([m for s in sequences for m in s.loss_mask], torch.bool),
        rollout_logprobs_R=rollout_logprobs_R,
        learner_logprobs_R=tensor([x for s in sequences for x in s.learner_logprobs]) if computed else None,
        anchor_logprobs_R=rollout_logprobs_R,
        advantages_R=tensor([s.advantage for s in sequences])[sequence_R] - tensor(penalties),
        temperatures_R=tensor([s.temperature for s in sequences])[sequence_R],
        sequence_R=sequence_R,
        response_lengths=tuple(len(s.tokens) - s.prompt_length for s in sequences),
        replay=packed_replay([s.routing for s in sequences], [len(s.tokens) for s in sequences], device),
    )
