"""Keeps the policy's states of some running rows as the engine computes them, for a head to learn from.

    prefill   prompt but its last token ──▶ passed on when the row enters
    step      position p of a row       ──▶ record[row, p], written again while the token there is not final
    leave     a finished response       ──▶ its states, on the host, the longest within a limit

A step writes its queries by their positions. Those behind the last kept sample hold states of tokens
that were not kept, and the row's next step begins there, so it overwrites them: what a finished row has at p
is what the policy computed for the token at p. The last token of a response is never run, and has zeros:
nothing attends to it.

Rows beyond the recorder's share one line that is never read, so a captured graph need not know which rows are
recorded. Where nothing is captured, a step without a recorded row writes nothing.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from paceline.drafting.base import HIDDEN, TargetStep
from paceline.policy.states import HostBlock, TextStates, to_host
from paceline.types import Purpose, Request

# Rows that are recorded at most.
MAX_ROWS = 32
# Host bytes of finished responses that were not taken yet, for each byte that was granted of the device.
HOST_FACTOR = 4


@dataclass(frozen=True)
class RecorderShape:
    """The size of a recorder."""

    layers: tuple[int, ...]
    rows: int
    length: int  # tokens of a row at most
    hidden_size: int
    dtype: torch.dtype
    finished_bytes: int  # of the host, for responses that were not taken yet

    @classmethod
    def within(
        cls, max_bytes: int, layers: tuple[int, ...], length: int, hidden_size: int, dtype: torch.dtype
    ) -> "RecorderShape":
        """Returns the largest one within so many bytes; without a row where not even one fits."""
        row_bytes = (len(layers) + 1) * length * hidden_size * dtype.itemsize
        rows = min(MAX_ROWS, max(0, max_bytes // row_bytes - 1))  # less the line that is never read
        return cls(layers, rows, length, hidden_size, dtype, HOST_FACTOR * max_bytes)

    @property
    def bytes(self) -> int:
        if not self.rows:
            return 0
        return (len(self.layers) + 1) * (self.rows + 1) * self.length * self.hidden_size * self.dtype.itemsize


class Finished(NamedTuple):
    """A response that was recorded to its end."""

    tokens_T: torch.Tensor
    states: TextStates


class StateRecorder:
    """Records rows by their slots."""

    def __init__(self, shape: RecorderShape, slots: int, device: torch.device) -> None:
        self.shape = shape
        size = (len(shape.layers) + 1, shape.rows + 1, shape.length, shape.hidden_size)
        # The captured layers, then the states after the last norm.
        self.record_CNLE = torch.zeros(size, dtype=shape.dtype, device=device)
        self.row_S = torch.full((slots,), shape.rows, dtype=torch.int64, device=device)
        self.row_of: dict[int, int] = {}  # by slot
        self.free = list(range(shape.rows))
        self.finished: list[Finished] = []

    def enter(self, slot: int, request: Request, prompt_CTE: torch.Tensor) -> None:
        """Begins to record a row, if there is room, whose prompt but the last token has these states."""
        covered = prompt_CTE.shape[1] == len(request.prompt) - 1
        fits = len(request.prompt) + request.sampling.max_tokens <= self.shape.length
        if not self.free or not covered or not fits or request.purpose is not Purpose.TRAIN:
            return
        row = self.row_of[slot] = self.free.pop()
        self.row_S[slot] = row
        self.record_CNLE[:-1, row, : prompt_CTE.shape[1]] = prompt_CTE

    def step(self, step: TargetStep) -> None:
        """Writes the states of a step's queries that lie on the path of its samples."""
        if not self.row_of and not self.record_CNLE.is_cuda:
            return
        unread = self.shape.rows
        row_R1 = self.row_S.index_select(0, step.slots_R).unsqueeze(1)
        positions_RQ, cache_slots_RQ = (self._by_row(step, x) for x in (step.positions_T, step.cache_slots_T))
        row_RQ = torch.where(cache_slots_RQ >= 0, row_R1, unread)
        place_RQ = positions_RQ.clamp(max=self.shape.length - 1)
        line_T = (row_RQ * self.shape.length + place_RQ).flatten()
        for index, layer in enumerate((*self.shape.layers, HIDDEN)):
            states_TE = self._by_row(step, step.captured[layer]).flatten(0, 1)
            self.record_CNLE[index].flatten(0, 1).index_copy_(0, line_T, states_TE)

    @staticmethod
    def _by_row(step: TargetStep, x: torch.Tensor) -> torch.Tensor:
        """Returns what belongs to a step's tokens by row and place in its text; the last repeats."""
        if step.way_RQ is None:
            return x.unflatten(0, (len(step.slots_R), -1))
        return x[step.way_RQ]

    def leave(self, slot: int, request: Request, tokens_T: torch.Tensor, finished: bool) -> None:
        """Ends a row's record; of a finished one what was recorded is kept until `take`."""
        row = self.row_of.pop(slot, None)
        if row is None:
            return
        self.row_S[slot] = self.shape.rows
        self.free.append(row)
        if finished and len(tokens_T) > len(request.prompt):
            self.record_CNLE[:, row, len(tokens_T) - 1] = 0.0
            with torch.inference_mode(False):  # tensors made under it cannot be trained on
                states = self._copy(row, len(request.prompt), len(tokens_T))
            self.finished.append(Finished(to_host(tokens_T), states))
            self._shrink()

    def _copy(self, row: int, prompt: int, length: int) -> TextStates:
        """Returns what is recorded of a row, in one block of the host."""
        token_bytes = self.shape.hidden_size * self.shape.dtype.itemsize
        block = HostBlock(HostBlock.needed([(length, prompt)], len(self.shape.layers), token_bytes))
        captured_CTE = block.copy(self.record_CNLE[:-1, row, :length])
        hidden_RE = block.copy(self.record_CNLE[-1, row, prompt - 1 : length - 1])
        return TextStates(hidden_RE, tuple(captured_CTE))

    def _shrink(self) -> None:
        """Drops finished responses, shortest first, until the others fit."""
        excess = sum(text.states.bytes for text in self.finished) - self.shape.finished_bytes
        while excess > 0:
            shortest = min(range(len(self.finished)), key=lambda place: len(self.finished[place].tokens_T))
            excess -= self.finished.pop(shortest).states.bytes

    def take(self) -> dict[tuple[int, ...], TextStates]:
        """Returns the states of the responses that finished since the last call, by their tokens."""
        if self.record_CNLE.is_cuda:  # the copies to the host are complete then
            torch.cuda.current_stream(self.record_CNLE.device).synchronize()
        finished, self.finished = self.finished, []
        return {tuple(text.tokens_T.tolist()): text.states for text in finished}
