"""A head's optimiser steps in slices: each a few milliseconds of work, and learning can end after any.

    passages ──▶ optimiser steps, `batch` of them or more ──▶ slices of at most `slice_rows` tokens
                                                                │ one at a time, in any idle time
                           gradients add up over slices ◀───────┘ the last slice of a step updates the head

Stopped between two slices nothing is lost: the next one continues where the last one ended. Where that
takes too long, a slice may also be abandoned midway; then it is rerun.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from paceline.drafting.draft_attention import has_flash
from paceline.drafting.examples import Example, Passage
from paceline.drafting.training import HeadStep, HeadTrainer
from paceline.learning.batch import TrainingSequence, pack
from paceline.policy.decoder import Decoder
from paceline.policy.states import HostBlock, TextCapture, TextPlace, TextStates

# Response tokens of a passage at most, by device.
PASSAGE_ROWS = {"cpu": 64, "cuda": 256, "meta": 256}
# Response tokens of a slice. On a GPU a few rows take as long as these: the time is that of launches.
SLICE_ROWS = {"cpu": 64, "cuda": 4096, "meta": 4096}
# Tokens of a slice with all the text before them and padding; a longer text is a slice of its own. On a GPU
# so many that an optimiser step of passages out of long texts is one slice.
SLICE_TOKENS = {"cpu": 2048, "cuda": 49152, "meta": 49152}
# On a GPU slices of ever new sizes took longer than the same one again (benchmarks/notes/heads.md). So they
# are filled up to one of so many sizes, in response tokens and in all tokens.
ROW_SIZES, TOKEN_SIZES = 4, 6
# The hidden size up to which these are meant: with a larger one a token takes more time and memory.
SLICE_HIDDEN = 2048


@dataclass(frozen=True)
class Slice:
    """Passages that go through the head together."""

    passages: list[Passage]
    ends_step: bool  # the optimiser step's last


class SlicedLearning:
    """Trains a head slice by slice."""

    def __init__(self, policy: Decoder, trainer: HeadTrainer, batch: int) -> None:
        self.policy = policy
        self.trainer = trainer
        self.batch = batch
        device = policy.device.type
        share = max(1, policy.config.hidden_size // SLICE_HIDDEN)
        self.slice_rows = SLICE_ROWS[device] // share
        self.token_budget = SLICE_TOKENS[device] // share
        self.pads = not has_flash(device, policy.dtype)  # texts of a slice to the longest
        self.gives_up = False  # a slice that is to stop midway is rerun, and the next one later
        self.work: deque[Slice] = deque()
        self.rebuilt = 0  # texts whose states had to be computed

    @property
    def passage_rows(self) -> int:
        """Response tokens of a passage at most."""
        return min(PASSAGE_ROWS[self.policy.device.type], self.slice_rows)

    @property
    def examples(self) -> list[Example]:
        """The examples of the planned work, each once."""
        planned = {id(passage.example): passage.example for part in self.work for passage in part.passages}
        return [*planned.values()]

    def plan(self, passages: Sequence[Passage]) -> None:
        """Puts optimiser steps of these passages, in this order, in place of those that have not begun."""
        begun = self.trainer.accumulated
        rest: list[Slice] = []
        while begun and self.work:
            rest.append(self.work.popleft())
            if rest[-1].ends_step:
                break
        self.work = deque(rest)
        for step in self._steps(passages):
            parts = self.cut(step)
            self.work.extend(Slice(part, part is parts[-1]) for part in parts)

    def _steps(self, passages: Sequence[Passage]) -> list[list[Passage]]:
        """Returns the passages of each optimiser step: `batch`, and on a GPU as many more as fit one slice.

        A slice that is not full would take as long there.
        """
        fills = self.policy.device.type != "cpu"
        steps: list[list[Passage]] = []
        rows = tokens = longest = 0
        for passage in passages:
            size, text = passage.stop - passage.start, _text(passage)
            rows, tokens, longest = rows + size, tokens + text, max(longest, text)
            held = longest * (len(steps[-1]) + 1) if steps and self.pads else tokens
            has_room = fills and rows <= self.slice_rows and held <= self.token_budget
            if not steps or (len(steps[-1]) >= self.batch and not has_room):
                steps.append([])
                rows, tokens, longest = size, text, text
            steps[-1].append(passage)
        return steps

    def cut(self, passages: Sequence[Passage]) -> list[list[Passage]]:
        """Cuts passages, longest text first, into slices that fit, padded to the first where texts are."""
        parts: list[list[Passage]] = []
        rows = tokens = 0
        for passage in sorted(passages, key=lambda p: -_text(p)):
            size = passage.stop - passage.start
            longest = _text(parts[-1][0] if parts and self.pads else passage)
            if not parts or tokens + longest > self.token_budget or rows + size > self.slice_rows:
                parts.append([])
                rows = tokens = 0
            parts[-1].append(passage)
            rows += size
            tokens += longest
        return parts

    def slices(self, should_stop: Callable[[], bool]) -> Iterator[HeadStep | None]:
        """Does a slice of the work and yields, until it is done or `should_stop` returns True.

        Yields what an optimiser step saw after the slice that made it.
        """
        while self.work and not should_stop():
            part = self.work[0]
            missing = [p.example for p in part.passages if p.example.states is None]
            if missing:
                self.compute_states(missing)
                report = None
            else:
                if not self._accumulate(part.passages, should_stop):
                    return
                self.work.popleft()
                report = self.trainer.update() if part.ends_step else None
            if self.policy.device.type == "cuda":  # the next synchronisation waits for this slice alone
                torch.cuda.current_stream(self.policy.device).synchronize()
            yield report

    def abandon(self) -> None:
        """Drops what was accumulated and what is left, where memory has run out."""
        self.trainer.discard()
        self.work.clear()

    def _accumulate(self, passages: list[Passage], should_stop: Callable[[], bool]) -> bool:
        if self.gives_up:
            return self.trainer.try_rows(*self.inputs(passages), should_stop)
        self.trainer.accumulate_rows(*self.inputs(passages))
        return True

    def inputs(self, passages: list[Passage]) -> tuple:
        """Returns the packed batch of passages, whose states are there, and those states."""
        device = self.policy.device
        sequences = [passage.sequence for passage in passages]
        filler = self._filler(sequences)
        batch = pack([*sequences, *filler], device)
        more_rows, more_tokens = sum(len(s.loss_mask) for s in filler), sum(len(s.tokens) for s in filler)
        states = [(passage, passage.example.states) for passage in passages]
        hidden = [s.hidden_RE[p.start : p.stop].to(device, non_blocking=True) for p, s in states]
        captured = [
            _texts_on(device, [(s.captured_TE[layer], _text(p)) for p, s in states], more_tokens)
            for layer in range(len(self.trainer.head.config.captured_layers))
        ]
        return batch, _joined(hidden, more_rows), captured

    def _filler(self, sequences: Sequence[TrainingSequence]) -> list[TrainingSequence]:
        """Returns texts that nothing is learned from, with which a slice has one of few sizes.

        None where texts are padded anyway, and where they do not fit.
        """
        if self.pads:
            return []
        rows, tokens = sum(len(s.loss_mask) for s in sequences), sum(len(s.tokens) for s in sequences)
        more_rows = -rows % -(-self.slice_rows // ROW_SIZES)
        more_rows = min(more_rows, max(0, self.slice_rows - rows))
        # Prompts are so long that each query has a key to see, texts no longer than the policy's can be.
        prompt = 2 + self.trainer.settings.unroll
        longest = len(self.trainer.head.rope_table) - prompt
        least = more_rows + prompt * -(-more_rows // longest)
        more_tokens = least + -(tokens + least) % max(1, self.token_budget // TOKEN_SIZES)
        if tokens + more_tokens > self.token_budget:
            return []
        filler = []
        while more_tokens:
            taught = min(more_rows, longest)
            length = min(more_tokens, prompt + longest) if taught == more_rows else prompt + taught
            mask, logprobs = (False,) * taught, (0.0,) * taught
            filler.append(TrainingSequence((0,) * length, length - taught, mask, logprobs, 0.0, 1.0))
            more_rows, more_tokens = more_rows - taught, more_tokens - length
        return filler

    @torch.no_grad()
    def compute_states(self, examples: Sequence[Example]) -> None:
        """Runs the policy over as many of the texts as fit, the first in any case."""
        chosen: dict[tuple[int, ...], Example] = {}
        tokens = 0
        for example in examples:
            if example.sequence.tokens in chosen:
                continue
            tokens += len(example.sequence.tokens)
            if chosen and tokens > self.token_budget:
                break
            chosen[example.sequence.tokens] = example
        found: dict[tuple[int, ...], TextStates] = {}
        places, start = [], 0
        for key, example in chosen.items():
            places.append(TextPlace(key, start, example.sequence.prompt_length))
            start += len(key)
        batch = pack([example.sequence for example in chosen.values()], self.policy.device)
        layers = self.trainer.head.config.captured_layers
        block = None
        if self.policy.device.type == "cuda":
            state_bytes = self.policy.config.hidden_size * self.policy.dtype.itemsize
            sizes = [(len(place.key), place.prompt) for place in places]
            block = HostBlock(HostBlock.needed(sizes, len(layers), state_bytes))
        capture = TextCapture(layers, places, found, block)
        self.policy(batch.tokens_T, batch.attention.positions_T, batch.attention, capture, batch.replay)
        for example in (*examples, *self.examples):  # equal responses share them
            example.states = found.get(example.sequence.tokens, example.states)
        self.rebuilt += len(chosen)


def _texts_on(device: torch.device, texts: Sequence[tuple[torch.Tensor, int]], zeros: int) -> torch.Tensor:
    """Returns the first so many states of each text, one after the other; each is sent to the device once.

    And so many states of zeros.
    """
    needed: dict[int, int] = {}
    for states_TE, count in texts:
        needed[id(states_TE)] = max(count, needed.get(id(states_TE), 0))
    sent: dict[int, torch.Tensor] = {}
    for states_TE, _ in texts:
        if id(states_TE) not in sent:
            sent[id(states_TE)] = states_TE[: needed[id(states_TE)]].to(device, non_blocking=True)
    return _joined([sent[id(states_TE)][:count] for states_TE, count in texts], zeros)


def _joined(states: list[torch.Tensor], zeros: int) -> torch.Tensor:
    """Returns states one after the other, and so many of zeros."""
    return torch.cat([*states, states[0].new_zeros(zeros, states[0].shape[1])])


def _text(passage: Passage) -> int:
    """Returns the tokens of a passage's text, from the prompt's first to the passage's last."""
    return passage.example.sequence.prompt_length + passage.stop
