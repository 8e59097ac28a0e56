"""The history index: the reference against dictionaries in Python, the kernels against the reference."""

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.kernels import history_index, history_lookup
from paceline.kernels.history_index import END, LENGTHS, MAX_MATCH, MIN_MATCH, HistoryIndex

SLOTS = 5
WIDTH = 90
BANK = 160
COUNT = 8


@dataclass
class Text:
    """Rows that grow, end and begin anew, each slot of one of two prompts; and what the index knows of it."""

    seed: int
    buckets: int
    device: str = "cpu"
    vocab: int = 3
    head: int = 0
    number: int = 0
    oldest: int = 1
    entries: list[tuple[int, int, int]] = field(default_factory=list)  # number, start, end mark

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.tokens = torch.zeros(SLOTS, WIDTH, dtype=torch.int64, device=self.device)
        self.length = torch.ones(SLOTS, dtype=torch.int64, device=self.device)
        tables = {
            name: torch.zeros(self.buckets, dtype=torch.int64, device=self.device)
            for name in ("finished_B", "running_B")
        }
        self.index = HistoryIndex.empty(
            SLOTS, BANK, SLOTS * WIDTH, 1 << 20, torch.device(self.device)
        )._replace(**tables)
        self.prompts = [(1, 0, 2, 1), (0, 1, 1)]
        for slot in range(SLOTS - 1):
            self.enter(slot)

    def enter(self, slot: int) -> None:
        prompt = self.prompts[slot % 2]
        self.tokens[slot, : len(prompt)] = torch.tensor(prompt)
        self.length[slot] = len(prompt)
        self.index.prompt_S[slot] = 1000003 * (1 + slot % 2)
        self.index.indexed_S[slot] = 0

    def grow(self, slot: int) -> None:
        for _ in range(self.rng.randint(0, 4)):
            self.tokens[slot, self.length[slot]] = self.rng.randrange(self.vocab)
            self.length[slot] += 1

    def bank(self, slot: int, bank_row) -> None:
        """As a ring would; the oldest entries go."""
        length, prompt = int(self.length[slot]), len(self.prompts[slot % 2])
        first = max(0, prompt - MAX_MATCH)
        if self.head + length - first + 1 > BANK:
            self.entries = [e for e in self.entries if e[1] < self.head]
            self.head = 0
        start = self.head
        self.head += length - first + 1
        self.number += 1
        self.entries = [e for e in self.entries if e[2] < start or e[1] >= self.head] + [
            (self.number, start, self.head - 1)
        ]
        self.index.oldest_1.fill_(self.entries[0][0])
        bank_row(self.tokens, self.index, slot, first, prompt, length, start, self.number)
        self.enter(slot)


class Dictionaries:
    """What the index should know, without buckets."""

    def __init__(self, text: Text) -> None:
        self.text = text
        self.running: dict[tuple, tuple[int, int]] = {}  # slot and position
        self.finished: dict[tuple, tuple[int, list[int], int]] = {}  # number, text, position
        self.indexed = [0] * SLOTS

    def row(self, slot: int) -> list[int]:
        return self.text.tokens[slot, : self.text.length[slot]].tolist()

    def bank(self, slot: int) -> None:
        row = self.row(slot)
        for position in range(len(self.text.prompts[slot % 2]) - 1, len(row) - 1):
            for n in LENGTHS:
                if position + 1 >= n:
                    self.finished[slot % 2, *row[position + 1 - n : position + 1]] = (
                        self.text.number + 1,
                        row,
                        position,
                    )
        self.indexed[slot] = 0

    def propose(self, slots: list[int], count: int) -> list[list[int]]:
        for slot in sorted(slots):
            row = self.row(slot)
            for position in range(self.indexed[slot], len(row) - 1):
                for n in LENGTHS:
                    if position + 1 >= n:
                        self.running[slot % 2, *row[position + 1 - n : position + 1]] = (slot, position)
            self.indexed[slot] = max(self.indexed[slot], len(row) - 1)
        return [self.best(slot, count) for slot in slots]

    def best(self, slot: int, count: int) -> list[int]:
        own = self.row(slot)
        best = (MIN_MATCH - 1,)
        answer = []
        for rank, n in enumerate(LENGTHS * 2):
            key = (slot % 2, *own[-n:])
            found = (
                (self.finished if rank < len(LENGTHS) else self.running).get(key) if len(own) >= n else None
            )
            if found is None or (rank < len(LENGTHS) and found[0] < self.text.entries[0][0]):
                continue
            is_own = rank >= len(LENGTHS) and found[0] == slot
            source, position = (found[1], found[2]) if rank < len(LENGTHS) else (self.row(found[0]), found[1])
            matched = 0
            while (
                matched < MAX_MATCH
                and matched < len(own)
                and matched <= position
                and position < len(source)
                and source[position - matched] == own[-1 - matched]
            ):
                matched += 1
            follow = source[position + 1 : position + 1 + count]
            if follow and (matched, len(follow), rank) > best:
                best, answer = (matched, len(follow), rank), (follow * count)[:count] if is_own else follow
        return answer + [END] * (count - len(answer))


def test_history_reference_is_a_dictionary():
    said = 0
    for seed in range(6):
        text = Text(seed, buckets=1 << 20)
        model = Dictionaries(text)
        for step in range(60):
            slots = text.rng.sample(range(SLOTS - 1), 3)
            for slot in slots:
                text.grow(slot)
            if step % 9 == 8 or int(text.length.max()) > WIDTH - 10:
                slot = int(text.length.argmax())
                model.bank(slot)
                text.bank(slot, history_index.bank_row)
            proposals = torch.full((SLOTS, COUNT + 1), 99)
            count = text.rng.randint(1, COUNT)
            expected = model.propose(slots, count)
            history_lookup.propose_from_history(
                torch.tensor(slots), text.tokens, text.length, text.index, count, proposals
            )
            assert [proposals[slot, :count].tolist() for slot in slots] == expected
            assert (proposals[:, count:] == 99).all() and (
                proposals[[s for s in range(SLOTS) if s not in slots]] == 99
            ).all()
            said += sum(tokens[-1] != END for tokens in expected)
    assert said > 200


@pytest.mark.parametrize("buckets", [8, 256])
def test_crowded_history_table_only_forgets(buckets):
    """Whatever is proposed followed an equal run of tokens somewhere, however often buckets were taken."""
    text, said = Text(1, buckets, vocab=6), 0
    texts: list[list[int]] = []
    for step in range(80):
        for slot in range(SLOTS - 1):
            text.grow(slot)
        if int(text.length.max()) > WIDTH - 10 or step % 11 == 10:
            texts.append(text.tokens[int(text.length.argmax()), : text.length.max()].tolist())
            text.bank(int(text.length.argmax()), history_index.bank_row)
        proposals = torch.full((SLOTS, COUNT), 99)
        history_lookup.propose_from_history(
            torch.arange(SLOTS), text.tokens, text.length, text.index, COUNT, proposals
        )
        rows = [text.tokens[slot, : text.length[slot]].tolist() for slot in range(SLOTS)]
        for row, line in zip(rows, proposals.tolist(), strict=True):
            tokens = line[: line.index(END)] if END in line else line
            assert all(t == END for t in line[len(tokens) :])
            if tokens:
                wanted = [*row[-MIN_MATCH:], tokens[0]]
                assert any(
                    source[i : i + 3] == wanted for source in [*texts, *rows] for i in range(len(source))
                ), "that was never written"
                said += 1
    assert said > 20


class Produced(TorchDispatchMode):
    """Counts the numbers that operations give out, which is what they had to read and compute."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.numbers += sum(
            t.numel()
            for t in (out if isinstance(out, (tuple, list)) else (out,))
            if isinstance(t, torch.Tensor)
        )
        return out


def test_history_work_of_a_step_does_not_grow_with_the_text():
    work = []
    for length in (40, 4000):
        index = HistoryIndex.empty(2, 4096, 4096, 1 << 10, torch.device("cpu"))
        tokens = torch.randint(0, 9, (2, 4096))
        lengths = torch.full((2,), length)
        proposals = torch.zeros(2, COUNT, dtype=torch.int64)
        history_index.bank_row(tokens, index, 1, 0, 1, length, 0, 1)
        history_lookup.propose_from_history(torch.tensor([0]), tokens, lengths, index, COUNT, proposals)
        lengths += 3
        with Produced() as produced:
            history_lookup.propose_from_history(torch.tensor([0]), tokens, lengths, index, COUNT, proposals)
        work.append(produced.numbers)
    assert work[0] == work[1] > 0


def check_kernels(device: str, monkeypatch) -> None:
    monkeypatch.setattr(history_index, "_POSITIONS_AT_ONCE", 4)  # so that there are several rounds
    monkeypatch.setattr(history_index, "_BANKED_AT_ONCE", 16)
    for seed in range(2):
        for buckets in (64, 1 << 12):
            ours, theirs = Text(seed, buckets, device), Text(seed, buckets, "cpu")
            for step in range(14):
                count = 1 + (step * 3) % COUNT
                # The last: a null row, twice.
                slots = [0, 2, 1 if step > 11 else 3, SLOTS - 1, SLOTS - 1]
                for text in (ours, theirs):
                    for slot in range(SLOTS - 1):
                        text.grow(slot)
                if step % 4 == 3:
                    slot = step // 4 % 2 * 2
                    ours.bank(slot, history_index.bank_row_triton)
                    theirs.bank(slot, history_index.bank_row.reference)
                rows = torch.tensor(slots)
                if step % 3 == 2:
                    check_branches(rows, ours, theirs, count)
                    continue
                proposals = torch.full((SLOTS, COUNT), 99)
                our_proposals, ours_rows = proposals.to(device, copy=True), rows.to(device)
                history_lookup._look_up_triton(
                    ours_rows, ours.tokens, ours.length, ours.index, count, our_proposals
                )
                history_lookup.propose_from_history.reference(
                    rows, theirs.tokens, theirs.length, theirs.index, count, proposals
                )
                assert torch.equal(our_proposals.cpu(), proposals)
                same_index(ours, theirs)


def same_index(ours: Text, theirs: Text) -> None:
    for name, tensor in theirs.index._asdict().items():
        assert torch.equal(getattr(ours.index, name).cpu(), tensor), name


def check_branches(rows: torch.Tensor, ours: Text, theirs: Text, count: int) -> None:
    """All candidates, in place of the best one's proposal, which is the first branch."""
    found = history_lookup.find_branches_triton(
        rows.to(ours.tokens.device), ours.tokens, ours.length, ours.index, count
    )
    expected = history_lookup.find_branches.reference(rows, theirs.tokens, theirs.length, theirs.index, count)
    exists = expected[2] >= 0
    for mine, reference in zip(found, expected, strict=True):
        assert torch.equal(mine.cpu()[exists], reference[exists])
    assert torch.equal(found[2].cpu(), expected[2])
    same_index(ours, theirs)


def test_history_branches_are_sorted_and_the_first_is_what_a_chain_has():
    branched = 0
    for seed in range(4):
        text = Text(seed, 1 << 12, "cpu")
        for step in range(14):
            for slot in range(SLOTS - 1):
                text.grow(slot)
            if step % 4 == 3:
                text.bank(step // 4 % 2 * 2, history_index.bank_row.reference)
            rows = torch.arange(SLOTS - 1)
            arguments = rows, text.tokens, text.length, text.index, COUNT
            tokens, matched = history_lookup.branches_from_history(*arguments)
            proposals = torch.zeros(SLOTS, COUNT, dtype=torch.int64)
            history_lookup.propose_from_history(*arguments, proposals)
            assert torch.equal(tokens[:, 0], proposals[:-1])
            for row in range(SLOTS - 1):
                exists = tokens[row, :, 0] >= 0
                lengths = matched[row][exists].tolist()
                assert lengths == sorted(lengths, reverse=True)
                branched += len(set(tokens[row, exists, 0].tolist())) > 1
    assert branched > 5


@pytest.mark.slow
def test_history_kernels_equal_the_references_interpreted(monkeypatch):
    pytest.importorskip("triton")
    check_kernels("cpu", monkeypatch)


@pytest.mark.gpu
def test_history_kernels_equal_the_references_on_the_gpu(monkeypatch):
    check_kernels("cuda", monkeypatch)
