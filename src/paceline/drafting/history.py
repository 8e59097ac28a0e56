"""The history drafter: what followed these tokens when this prompt's siblings wrote them, now or earlier.

It needs no model. What it looks up is its own text, that of the prompt's running rows, and a bank of the
prompt's finished responses (`history_bank.py`: bounded, oldest out), all through one index on the device
(`kernels/history_index.py`) whose cost does not grow with their length. The bank outlives weight updates: an
old response is still a good guess. Evaluations read it and add nothing to it.

A chain is what followed the longest match; a tree has every match's continuation (`branches.py`).
"""

import hashlib
import warnings
from array import array

import torch

from paceline.drafting.base import Drafter, DrafterContext, TreeStep
from paceline.drafting.branches import BranchCalibration, merged_branches
from paceline.drafting.history_bank import Entry, Ring
from paceline.drafting.tree import TreeProposals
from paceline.kernels.history_index import (
    LOCATION_BITS,
    MAX_MATCH,
    HistoryIndex,
    bank_row,
    index_finished,
)
from paceline.kernels.history_lookup import branches_from_history, propose_from_history
from paceline.types import Purpose, Request

# Responses, of the longest that a request can be, that the bank holds: enough for a small task of any length.
BANK_RESPONSES = 2048
# Tokens that the bank holds at most: 64 MiB.
BANK_TOKENS = 1 << 24
# Buckets of each table at most: 256 MiB.
MAX_BUCKETS = 1 << 25
# Tokens that are indexed at once when a bank is loaded.
INDEXED_AT_ONCE = 1 << 18


class HistoryDrafter(Drafter):
    """Proposes what followed a row's last tokens before, under the same prompt."""

    name = "history"
    max_tokens = 15
    calibration: BranchCalibration

    def __init__(self, bank_tokens: int = 0) -> None:
        """Makes a drafter with a bank of so many tokens; 0: as many as the requests' length suggests."""
        self.bank_tokens = bank_tokens
        # By slot: the hash of the prompt of the row that runs there.
        self.running: dict[int, int] = {}

    def bind(self, context: DrafterContext) -> None:
        self.context = context
        self.rows = context.rows
        self.proposals_SK = context.proposals_SK
        self.calibration = BranchCalibration(self.rows.tokens.device)
        self.trees = TreeProposals(context, self.calibration)
        slots, width = self.rows.tokens.shape
        assert slots * width < 1 << LOCATION_BITS, "a place in a row has 32 bits"
        self.ring = Ring(self.bank_tokens or min(BANK_TOKENS, BANK_RESPONSES * context.request_tokens))
        self.index = HistoryIndex.empty(
            slots, self.ring.size, slots * context.request_tokens, MAX_BUCKETS, self.rows.tokens.device
        )

    def observe_enter(self, slot: int, request: Request, handover: torch.Tensor | None) -> None:
        self.running[slot] = self.index.prompt_S[slot] = prompt_hash(request.prompt)
        self.index.indexed_S[slot] = 0

    def observe_leave(self, slot: int, request: Request, length: int, finished: bool) -> None:
        prompt = len(request.prompt)
        hashed = self.running.pop(slot)
        if finished and request.purpose is Purpose.TRAIN and length > prompt:
            # The prompt itself is in every row that has it.
            first = max(0, prompt - MAX_MATCH)
            entry = self.ring.claim(length - first, prompt - first, hashed)
            if entry is not None:
                bank_row(self.rows.tokens, self.index, slot, first, prompt, length, entry.start, entry.number)
                self.index.oldest_1.fill_(self.ring.oldest)
        if not self.running:
            # So that a rollout does not depend on those before it, other than by the bank.
            self.index.running_B.zero_()

    def propose(self, slots_R: torch.Tensor, count: int, truncates: bool) -> None:
        propose_from_history(
            slots_R, self.rows.tokens, self.rows.length, self.index, count, self.proposals_SK
        )

    def propose_tree(self, slots_R: torch.Tensor, count: int, truncates: bool) -> None:
        branches = branches_from_history(slots_R, self.rows.tokens, self.rows.length, self.index, count)
        self.trees.propose(slots_R, merged_branches(*branches, self.calibration), count)

    def observe_tree(self, step: TreeStep) -> None:
        self.trees.observe(step)

    def state(self) -> dict[str, torch.Tensor]:
        """Returns the bank's text up to its last entry's end, and where the entries lie."""
        entries = self.ring.entries
        used = max((entry.start + entry.length + 1 for entry in entries), default=0)
        return {
            "text": self.index.bank_T[:used].to("cpu", copy=True),
            "entries": torch.tensor(
                [[e.start, e.length, e.context, e.prompt] for e in entries], dtype=torch.int64
            ).view(-1, 4),
            "size": torch.tensor(self.ring.size),
        }

    def load_state(self, tensors: dict[str, torch.Tensor]) -> None:
        self.ring = Ring(self.ring.size)
        for table in (self.index.finished_B, self.index.running_B):
            table.zero_()
        if "entries" not in tensors:
            warnings.warn(
                "the checkpoint's history is of an earlier layout: the history drafter starts without one",
                stacklevel=2,
            )
        else:
            # Earlier checkpoints have a fifth column.
            self._load(tensors["text"], tensors["entries"][:, :4].tolist(), int(tensors["size"]))
        self.index.oldest_1.fill_(self.ring.oldest)

    def _load(self, text: torch.Tensor, entries: list[list[int]], size: int) -> None:
        if size == self.ring.size:
            # As it was, so that it continues to evict as it would have.
            for start, *rest in entries:
                self.ring.head = start
                self.ring.claim(*rest)
            self.index.bank_T[: len(text)] = text.to(self.index.bank_T.device)
        else:
            bank_T = self.index.bank_T.cpu()
            for start, length, *rest in entries:
                entry = self.ring.claim(length, *rest)
                if entry is not None:
                    bank_T[entry.start : entry.start + length + 1] = text[start : start + length + 1]
            self.index.bank_T.copy_(bank_T)
        self._index_entries(list(self.ring.entries))

    def _index_entries(self, entries: list[Entry]) -> None:
        """Indexes finished text, from the last token of each prompt to the last but one of the response."""
        fields = [
            [e.start + e.context - 1, e.length - e.context, e.context, e.prompt, e.number] for e in entries
        ]
        first, count, context, prompt, number = (
            torch.tensor(fields, dtype=torch.int64, device=self.index.bank_T.device).view(-1, 5).unbind(1)
        )
        owner_N = torch.repeat_interleave(torch.arange(len(entries), device=count.device), count)
        step_N = torch.arange(len(owner_N), device=count.device) - (count.cumsum(0) - count)[owner_N]
        for owner, step in zip(owner_N.split(INDEXED_AT_ONCE), step_N.split(INDEXED_AT_ONCE), strict=True):
            index_finished(
                self.index, first[owner] + step, context[owner] + step, prompt[owner], number[owner]
            )


def prompt_hash(prompt: tuple[int, ...]) -> int:
    """Returns a signed 64-bit hash of a prompt's tokens."""
    digest = hashlib.blake2b(array("q", prompt).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
