"""The history drafter: what followed these tokens when this prompt's siblings, now or in earlier epochs, wrote them.

Needs no model. A row's sources are its own text, its siblings that are running, and a bank of finished sequences of the same
prompt (bounded, oldest out). The bank lives on the device and outlives weight updates: an old response is still a good guess.
"""

from collections import defaultdict, deque

import torch

from paceline.drafting.base import Drafter, Seat
from paceline.kernels.history_match import NO_SOURCE, bank_source, propose_from_history
from paceline.types import Request

MIN_MATCH = 2  # one equal token says too little


class HistoryDrafter(Drafter):
    name = "history"
    max_tokens = 15

    def __init__(self, bank_entries: int = 2048, entries_per_prompt: int = 16, siblings: int = 16, bank_tokens: int = 1 << 24) -> None:
        self.bank_entries = bank_entries
        self.bank_tokens = bank_tokens  # bounds the bank where sequences are long: 128 MiB
        self.entries_per_prompt = entries_per_prompt
        self.siblings = siblings
        self.live: dict[tuple[int, ...], dict[int, None]] = defaultdict(dict)  # slots by prompt, in order of entry
        self.banked: dict[tuple[int, ...], deque[int]] = defaultdict(deque)  # entries by prompt, oldest first
        self.owner: dict[int, tuple[int, ...]] = {}
        self.next_entry = 0

    def bind(self, seat: Seat) -> None:
        self.rows, self.proposals_SK = seat.rows, seat.proposals_SK
        slots, width = self.rows.tokens.shape
        device = self.rows.tokens.device
        self.bank_entries = max(self.entries_per_prompt, min(self.bank_entries, self.bank_tokens // width))
        self.bank_NW = torch.zeros(self.bank_entries, width, dtype=torch.int64, device=device)
        self.bank_length_N = torch.zeros(self.bank_entries, dtype=torch.int64, device=device)
        self.sources_SC = torch.full((slots, self.entries_per_prompt + self.siblings + 1), NO_SOURCE, dtype=torch.int32, device=device)

    def observe_enter(self, slot: int, request: Request, handover: torch.Tensor | None) -> None:
        self.live[request.prompt][slot] = None
        self._refresh(request.prompt)

    def observe_leave(self, slot: int, request: Request, length: int) -> None:
        entry = self._claim_entry(request.prompt)
        self.bank_NW[entry, :length] = self.rows.tokens[slot, :length]
        self.bank_length_N[entry] = length
        del self.live[request.prompt][slot]
        self._refresh(request.prompt)
        if not self.live[request.prompt]:
            del self.live[request.prompt]

    def propose(self, slots_R: torch.Tensor, count: int, truncates: bool) -> None:
        propose_from_history(
            slots_R, self.rows.tokens, self.rows.length, self.bank_NW, self.bank_length_N, self.sources_SC, MIN_MATCH, count, self.proposals_SK
        )

    def state(self) -> dict[str, torch.Tensor]:
        """The bank, with the prompt of each entry as its leading tokens: the prompt's length is all that must be kept beside it."""
        prompt_length = torch.zeros(self.bank_entries, dtype=torch.int64)
        for entry, prompt in self.owner.items():
            prompt_length[entry] = len(prompt)
        order = [entry for entries in self.banked.values() for entry in entries]
        return {
            "tokens": self.bank_NW.to("cpu", copy=True),
            "length": self.bank_length_N.to("cpu", copy=True),
            "prompt_length": prompt_length,
            "order": torch.tensor(order, dtype=torch.int64),
            "next_entry": torch.tensor(self.next_entry),
        }

    def load_state(self, tensors: dict[str, torch.Tensor]) -> None:
        entries = min(self.bank_entries, len(tensors["length"]))
        width = min(self.bank_NW.shape[1], tensors["tokens"].shape[1])
        self.bank_NW[:entries, :width] = tensors["tokens"][:entries, :width].to(self.bank_NW.device)
        self.bank_length_N[:entries] = tensors["length"][:entries].clamp(max=width).to(self.bank_length_N.device)
        self.banked.clear()
        self.owner.clear()
        for entry in (e for e in tensors["order"].tolist() if e < entries):
            prompt = tuple(tensors["tokens"][entry, : int(tensors["prompt_length"][entry])].tolist())
            self.banked[prompt].append(entry)
            self.owner[entry] = prompt
        self.next_entry = int(tensors["next_entry"]) % self.bank_entries

    def _claim_entry(self, prompt: tuple[int, ...]) -> int:
        """The prompt's own oldest entry once it has its share, else the next one round the bank."""
        if len(self.banked[prompt]) >= self.entries_per_prompt:
            entry = self.banked[prompt].popleft()
        else:
            entry = self.next_entry
            self.next_entry = (self.next_entry + 1) % self.bank_entries
            previous = self.owner.get(entry)
            if previous is not None:
                self.banked[previous].remove(entry)
                if previous != prompt:
                    self._refresh(previous)
                if not self.banked[previous]:
                    del self.banked[previous]
        self.banked[prompt].append(entry)
        self.owner[entry] = prompt
        return entry

    def _refresh(self, prompt: tuple[int, ...]) -> None:
        """Rewrites the source lists of the prompt's running rows: bank first, siblings next, itself last and so preferred."""
        live = list(self.live.get(prompt, ()))
        if not live:
            return
        bank = [bank_source(entry) for entry in self.banked.get(prompt, ())]
        lists = []
        for slot in live:
            siblings = [other for other in live if other != slot][-self.siblings :]
            sources = [*bank, *siblings, slot]
            lists.append(sources + [NO_SOURCE] * (self.sources_SC.shape[1] - len(sources)))
        device = self.sources_SC.device
        self.sources_SC[torch.tensor(live, device=device)] = torch.tensor(lists, dtype=torch.int32, device=device)
