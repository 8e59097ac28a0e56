"""What a head learns from during a run: responses of this step and the last, within so many bytes.

    rollout ──▶ the longest responses ──┬── states that the learner's or the engine's pass left ──▶ Example
                                        └── none: computed when they are needed, and kept

The tail is where speculation pays, so long responses come first, and the shortest are dropped when memory is
short. What is older than the last step was written by an old policy, and is dropped, too.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from paceline.learning.batch import TrainingSequence, training_sequence
from paceline.policy.states import TextStates
from paceline.types import Completion, Group

# Steps whose responses are kept: this one and the one before.
STEPS_KEPT = 2
# Host bytes of a token without states: an int of a tuple, its mask and its logprob.
TOKEN_BYTES = 32


@dataclass
class Example:
    """A response to learn from."""

    sequence: TrainingSequence
    step: int  # of the run, whose rollout it comes from
    version: int  # of the weights that made the states, or will
    states: TextStates | None = None


class ExampleBuffer:
    """Examples of the newest steps, longest first within `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.examples: list[Example] = []

    def __len__(self) -> int:
        return len(self.examples)

    def __iter__(self) -> Iterator[Example]:
        return iter(self.examples)

    @property
    def bytes(self) -> int:
        """The memory of all examples; equal responses share their states."""
        shared = {id(e.states): e.states.bytes for e in self.examples if e.states is not None}
        return TOKEN_BYTES * sum(len(e.sequence.tokens) for e in self.examples) + sum(shared.values())

    def add(self, step: int, examples: Sequence[Example]) -> None:
        """Adds the examples of a step, and drops what is too old or exceeds the memory."""
        kept = [e for e in self.examples if step - STEPS_KEPT < e.step < step]
        self.examples = sorted([*examples, *kept], key=lambda e: -e.sequence.loss_tokens)
        self.shrink()

    def shrink(self) -> None:
        """Drops states, then whole examples, shortest first, until the rest fits.

        Work that is planned keeps what it needs.
        """
        excess = self.bytes - self.max_bytes
        holders = Counter(id(e.states) for e in self.examples)
        for place, example in reversed([*enumerate(self.examples)]):
            if excess <= 0:
                return
            if example.states is not None:
                holders[id(example.states)] -= 1
                if not holders[id(example.states)]:
                    excess -= example.states.bytes
                self.examples[place] = replace(example, states=None)
        while self.examples and excess > 0:
            excess -= TOKEN_BYTES * len(self.examples.pop().sequence.tokens)

    def drop_without_states(self) -> None:
        self.examples = [example for example in self.examples if example.states is not None]

    def longest(self, tokens: int) -> list[Example]:
        """Returns the longest examples within `tokens` sampled tokens, and at least one that has any."""
        return _within(self.examples, tokens)

    def offered(self, tokens: int, enough: int | None = None) -> list[Example]:
        """Returns what to learn `tokens` from: all examples with states and, if too few, the longest others.

        States for these take another pass; with `enough` tokens that have states, they are left out.
        """
        ready = [example for example in self.examples if example.states is not None]
        there = sum(example.sequence.loss_tokens for example in ready)
        missing = tokens - there
        if there >= (tokens if enough is None else min(enough, tokens)):
            return ready
        return ready + _within([example for example in self.examples if example.states is None], missing)

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self) -> dict[str, torch.Tensor]:
        sequences = [example.sequence for example in self.examples]
        tensors = {
            "tokens": torch.tensor([token for s in sequences for token in s.tokens], dtype=torch.int64),
            "mask": torch.tensor([sampled for s in sequences for sampled in s.loss_mask], dtype=torch.bool),
            "lengths": torch.tensor(
                [(s.prompt_length, len(s.loss_mask)) for s in sequences], dtype=torch.int64
            ).view(-1, 2),
            "temperatures": torch.tensor([s.temperature for s in sequences], dtype=torch.float64),
            "origins": torch.tensor([(e.step, e.version) for e in self.examples], dtype=torch.int64).view(
                -1, 2
            ),
        }
        for index, example in enumerate(self.examples):
            if example.states is not None:
                tensors[f"states.{index}.hidden"] = example.states.hidden_RE
                for place, captured_TE in enumerate(example.states.captured_TE):
                    tensors[f"states.{index}.captured.{place}"] = captured_TE
        return tensors

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restores what `state` returned; missing states are computed when they are needed."""
        prompts, responses = tensors["lengths"].unbind(1)
        texts = tensors["tokens"].split((prompts + responses).tolist())
        masks = tensors["mask"].split(responses.tolist())
        origins = tensors["origins"].tolist() if "origins" in tensors else [(0, 0)] * len(prompts)
        self.examples = []
        for index, (text, mask, prompt, temperature, (step, version)) in enumerate(
            zip(texts, masks, prompts.tolist(), tensors["temperatures"].tolist(), origins, strict=True)
        ):
            sequence = TrainingSequence(
                tuple(text.tolist()),
                prompt,
                tuple(mask.tolist()),
                (0.0,) * len(mask),
                advantage=0.0,
                temperature=temperature,
            )
            self.examples.append(Example(sequence, step, version, _states(tensors, index)))
        self.shrink()


def host_bytes(examples: Iterable[Example]) -> int:
    """Returns the host memory held by the examples' states, including the rest of their blocks."""
    tensors = (
        tensor
        for example in examples
        if example.states is not None
        for tensor in (example.states.hidden_RE, *example.states.captured_TE)
    )
    storages = {storage.data_ptr(): storage.nbytes() for t in tensors for storage in [t.untyped_storage()]}
    return sum(storages.values())


def _within(examples: Sequence[Example], tokens: int) -> list[Example]:
    """Returns the first examples within `tokens` sampled tokens, and at least one that has any."""
    chosen: list[Example] = []
    for example in examples:
        tokens -= example.sequence.loss_tokens
        if example.sequence.loss_tokens == 0 or (chosen and tokens < 0):
            break
        chosen.append(example)
    return chosen


def _states(tensors: Mapping[str, torch.Tensor], index: int) -> TextStates | None:
    prefix = f"states.{index}."
    if f"{prefix}hidden" not in tensors:
        return None
    captured: list[torch.Tensor] = []
    while (name := f"{prefix}captured.{len(captured)}") in tensors:
        captured.append(tensors[name])
    return TextStates(tensors[f"{prefix}hidden"], tuple(captured))


def longest_texts(
    groups: Sequence[Group], tokens: int, at_most: int = 0, room: int = 0
) -> list[TrainingSequence]:
    """Returns the longest responses that make up `tokens`, at least one; the others are not read.

    Up to `at_most` tokens of responses where all of it, with prompts, is within `room`.
    """
    chosen: list[Completion] = []
    for completion in sorted(
        (sample.completion for group in groups for sample in group.samples), key=lambda c: -len(c.tokens)
    ):
        room -= len(completion.request.prompt) + len(completion.tokens)
        if not completion.tokens or (tokens <= 0 and (at_most <= 0 or room < 0)):
            break
        tokens -= len(completion.tokens)
        at_most -= len(completion.tokens)
        chosen.append(completion)
    return [training_sequence(completion) for completion in chosen]


@dataclass(frozen=True)
class Passage:
    """Some tokens of a response, in a row, that are learned from with all the text before them."""

    example: Example
    start: int  # of the response
    stop: int

    @property
    def sequence(self) -> TrainingSequence:
        """The text up to the end of the passage; what precedes the passage counts as the prompt."""
        whole = self.example.sequence
        return replace(
            whole,
            tokens=whole.tokens[: whole.prompt_length + self.stop],
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
