"""What a head learns from during a run: passages of responses, with the policy's states along them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.learning.batch import TrainingSequence, training_sequence
from paceline.policy.states import TextStates
from paceline.types import Completion, Group


@dataclass(frozen=True)
class Example:
    """A response to learn from."""

    sequence: TrainingSequence
    states: TextStates


def longest_texts(groups: Sequence[Group], tokens: int, room: int) -> list[TrainingSequence]:
    """Returns the longest responses that make up `tokens`, within `room` for all of their tokens.

    The tail is where speculation pays. The learner passes over groups whose rewards are all the same, so they
    count only where there are no others.
    """
    mixed = [group for group in groups if len({sample.score.reward for sample in group.samples}) > 1]
    chosen: list[Completion] = []
    for completion in sorted(
        (sample.completion for group in mixed or groups for sample in group.samples),
        key=lambda c: -len(c.tokens),
    ):
        if tokens <= 0 or not completion.tokens:
            break
        size = len(completion.request.prompt) + len(completion.tokens)
        if size > room:
            continue
        room -= size
        tokens -= len(completion.tokens)
        chosen.append(completion)
    return [training_sequence(completion) for completion in chosen]


@dataclass(frozen=True)
class Passage:
    """Some tokens of a response, in a row, that are learned from with all the text before them."""

    example: Example
    start: int  # of the response
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def length(self) -> int:
        """The tokens of the text, from the prompt's first to the passage's last."""
        return self.example.sequence.prompt_length + self.stop

    @property
    def sequence(self) -> TrainingSequence:
        """The text up to the end of the passage; what precedes the passage counts as the prompt."""
        whole = self.example.sequence
        return replace(
            whole,
            tokens=whole.tokens[: self.length],
            prompt_length=whole.prompt_length + self.start,
            loss_mask=whole.loss_mask[self.start : self.stop],
            rollout_logprobs=whole.rollout_logprobs[self.start : self.stop],
            penalties=(),
            learner_logprobs=(),
            routing=None,
            versions=(),
        )


def passages(example: Example, rows: int) -> list[Passage]:
    """Cuts a response into passages of at most `rows` tokens; those without a sampled token are left out."""
    mask = example.sequence.loss_mask
    cuts = [(start, min(start + rows, len(mask))) for start in range(0, len(mask), rows)]
    return [Passage(example, start, stop) for start, stop in cuts if any(mask[start:stop])]
