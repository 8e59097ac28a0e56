"""Device-resident state of running requests: a row per slot, written by the step itself.

The host fills a row when a request enters and reads it when it has finished; in between the step's own
kernels append tokens and test for the end. One extra row, the null row, is never active: batches are padded
with it.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from paceline.kernels.row_step import RowTensors
from paceline.paged.cache import blocks_for
from paceline.policy.states import to_device
from paceline.types import SamplingParams

# Most tokens of one row in one step.
MAX_QUERY = 16
# Stop tokens that one request may have.
MAX_STOP_IDS = 16


@dataclass(frozen=True)
class NewRow:
    """What the host writes when a request enters or resumes."""

    slot: int
    # Prompt and response so far.
    tokens: list[int]
    # Sequence length at which it must stop.
    limit: int
    seed: int
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    blocks: list[int]


class Rows:
    """The tensors of all rows (`state`), and how the host fills and reads them."""

    def __init__(
        self, num_slots: int, max_length: int, score_dtype: torch.dtype, device: torch.device
    ) -> None:
        rows = num_slots + 1
        width = max_length + MAX_QUERY
        self.device = device
        self.null_slot = num_slots
        # Which tokens grammars allow; made when the first request has one.
        self.allowed_SV: torch.Tensor | None = None
        self.reader = torch.cuda.Stream(device) if device.type == "cuda" else None

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.state = RowTensors(
            tokens=zeros(rows, width),
            logprobs=zeros(rows, width, dtype=score_dtype),
            length=torch.ones(rows, dtype=torch.int64, device=device),
            limit=zeros(rows),
            active=zeros(rows, dtype=torch.bool),
            stopped=zeros(rows, dtype=torch.bool),
            seed=zeros(rows),
            temperature=zeros(rows, dtype=score_dtype),
            top_k=zeros(rows),
            top_p=torch.ones(rows, dtype=score_dtype, device=device),
            min_p=zeros(rows, dtype=score_dtype),
            stop_ids=torch.full((rows, MAX_STOP_IDS), -1, dtype=torch.int64, device=device),
            block_table=zeros(rows, blocks_for(width), dtype=torch.int32),
        )

    def enter(self, new_rows: list[NewRow]) -> None:
        longest = max(len(row.tokens) for row in new_rows)
        widest = max(len(row.blocks) for row in new_rows)
        slots = self._tensor([row.slot for row in new_rows])
        self.state.tokens[slots, :longest] = self._tensor(
            [row.tokens + [0] * (longest - len(row.tokens)) for row in new_rows]
        )
        self.state.block_table[slots] = 0
        self.state.block_table[slots, :widest] = self._tensor(
            [row.blocks + [0] * (widest - len(row.blocks)) for row in new_rows], torch.int32
        )
        self.state.length[slots] = self._tensor([len(row.tokens) for row in new_rows])
        self.state.limit[slots] = self._tensor([row.limit for row in new_rows])
        self.state.seed[slots] = self._tensor([row.seed for row in new_rows])
        score = self.state.temperature.dtype
        self.state.temperature[slots] = self._tensor([row.sampling.temperature for row in new_rows], score)
        self.state.top_k[slots] = self._tensor([row.sampling.top_k for row in new_rows])
        self.state.top_p[slots] = self._tensor([row.sampling.top_p for row in new_rows], score)
        self.state.min_p[slots] = self._tensor([row.sampling.min_p for row in new_rows], score)
        self.state.stop_ids[slots] = self._tensor(
            [[*row.stop_ids, *[-1] * (MAX_STOP_IDS - len(row.stop_ids))] for row in new_rows]
        )
        self.state.stopped[slots] = False
        self.state.active[slots] = True

    def extend_blocks(self, slots: list[int], indices: list[int], blocks: list[int]) -> None:
        self.state.block_table[self._tensor(slots), self._tensor(indices)] = self._tensor(blocks, torch.int32)

    def deactivate(self, slots: list[int]) -> None:
        """Stops rows; later steps leave them unchanged."""
        self.state.active[self._tensor(slots)] = False

    def allow(self, slots: list[int], bits_RW: np.ndarray, vocab_size: int) -> None:
        """Sets which tokens rows may sample next, from 32 in a word; other rows may sample any."""
        if self.allowed_SV is None:
            shape = (self.null_slot + 1, vocab_size)
            self.allowed_SV = torch.ones(shape, dtype=torch.bool, device=self.device)
        allowed_RV = np.unpackbits(bits_RW.view(np.uint8), axis=1, bitorder="little")[:, :vocab_size]
        self.allowed_SV.fill_(True)
        self.allowed_SV[self._tensor(slots)] = to_device(
            torch.from_numpy(np.ascontiguousarray(allowed_RV)).bool(), self.device
        )

    def read(
        self, slots: list[int], starts: list[int], count: int
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Returns `count` tokens and logprobs of each row from its start on, on the host.

        A row never changes up to a length that has been read, so on a GPU a separate stream reads it without
        waiting for the steps launched since. What lies beyond that length has no meaning.
        """
        if not count:
            return [[] for _ in slots], [[] for _ in slots]
        with torch.cuda.stream(self.reader) if self.reader is not None else nullcontext():
            rows_R1 = self._tensor(slots)[:, None]
            columns_RN = self._tensor(starts)[:, None] + torch.arange(count, device=self.device)
            columns_RN.clamp_(max=self.state.tokens.shape[1] - 1)
            return self.state.tokens[rows_R1, columns_RN].tolist(), self.state.logprobs[
                rows_R1, columns_RN
            ].tolist()

    def _tensor(self, values: list, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return to_device(torch.tensor(values, dtype=dtype), self.device)
