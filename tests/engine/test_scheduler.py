"""The scheduler without a device: who may run, in which order, and what lies in the blocks they are given.

`EngineModel` plays the engine around a real scheduler. Its cache is a dictionary from block and offset to the
tokens up to there, so that a row whose blocks hold anything but its own prefix is found.
"""

from collections.abc import Iterator
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.engine.blocks import BlockPool
from paceline.engine.request_state import RequestState
from paceline.engine.scheduler import Scheduler
from paceline.paged.cache import BLOCK_SIZE, blocks_for
from paceline.types import Request, SamplingParams

NUM_BLOCKS = 12
NUM_SLOTS = 3
PROMPT_LENGTHS = (1, 2, BLOCK_SIZE, BLOCK_SIZE + 1, BLOCK_SIZE + 2, 2 * BLOCK_SIZE + 1, 40)
LOOKAHEAD = 4
SAMPLED = 7  # every sampled token
ENOUGH_ROUNDS = 10_000


class EngineModel:
    """What the engine does with its scheduler, on a cache of Python tuples."""

    def __init__(self, longest_first: bool = False, num_blocks: int = NUM_BLOCKS) -> None:
        self.pool = BlockPool(num_blocks)
        self.scheduler = Scheduler(self.pool, NUM_SLOTS, longest_first)
        self.cache: dict[tuple[int, int], tuple[int, ...]] = {}
        self.running: list[RequestState] = []
        self.over: list[RequestState] = []
        self.submitted: list[RequestState] = []
        self._names = count()

    def submit(self, prompt: tuple[int, ...], max_tokens: int = 8, **options) -> RequestState:
        request = Request(str(next(self._names)), prompt, 0, SamplingParams(max_tokens=max_tokens), **options)
        sequence = RequestState(request, len(self.submitted), len(prompt) + max_tokens)
        self.submitted.append(sequence)
        self.scheduler.add([sequence])
        return sequence

    def admit(self, spared: int = 0) -> None:
        self.over += self.scheduler.admit(not self.running, LOOKAHEAD, spared)

    def prefill(self, budget: int = 1000) -> None:
        """Writes the next tokens of the prefills at the head of the queue."""
        for prefill in self.scheduler.prefills:
            for position in range(prefill.done, min(len(prefill.tokens), prefill.done + budget)):
                self._write(prefill.blocks, tuple(prefill.tokens[: position + 1]))
                prefill.done += 1
                budget -= 1
        ready = self.scheduler.take_ready()
        for source, target in zip(ready.copy_from, ready.copy_to, strict=True):
            for offset in range(BLOCK_SIZE):
                if (source, offset) in self.cache:
                    self.cache[target, offset] = self.cache[source, offset]
        for sequence in ready.sequences:
            if sequence.aborted:
                self.scheduler.release(sequence)
                self.over.append(sequence)
            else:
                self.running.append(sequence)

    def step(self) -> None:
        """One token for every running row; the youngest are preempted where blocks do not suffice."""
        while self.running and self._missing() > self.pool.free:
            self.scheduler.drop_idle()
            if self._missing() > self.pool.free:
                self.preempt(max(self.running, key=lambda s: s.order))
        for sequence in list(self.running):
            sequence.blocks += self.pool.allocate(self._missing_of(sequence))
            self._write(sequence.blocks, tuple(sequence.tokens))
            sequence.append([SAMPLED], [0.0], version=0)
            if sequence.length == sequence.limit:
                self.finish(sequence)

    def finish(self, sequence: RequestState) -> None:
        self.running.remove(sequence)
        if sequence.request.hold:
            self.scheduler.hold(sequence)
        self.scheduler.release(sequence)
        self.over.append(sequence)

    def preempt(self, sequence: RequestState) -> None:
        self.running.remove(sequence)
        self.scheduler.requeue(sequence)

    def run_to_the_end(self) -> None:
        for _ in range(ENOUGH_ROUNDS):
            if self.scheduler.idle and not self.running:
                return
            self.admit(spared=self._missing())
            self.prefill()
            self.check()
            self.step()
        pytest.fail(f"{len(self.submitted) - len(self.over)} requests never finish")

    def check(self) -> None:
        """No request is lost or duplicated, slots and blocks have owners, rows see their own prefix."""
        places = [*self.scheduler.sequences, *self.running, *self.over]
        assert sorted(s.order for s in places) == list(range(len(self.submitted)))
        slots = [s.slot for s in self.submitted if s.slot >= 0]
        assert sorted([*slots, *self.scheduler.free_slots]) == list(range(NUM_SLOTS))
        assert self.pool.used == len(set(self._owned()))
        for sequence in self.running:
            for position in range(sequence.length - 1):
                seen = self.cache[sequence.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE]
                assert seen == tuple(sequence.tokens[: position + 1]), f"position {position} is not its own"

    def _owned(self) -> Iterator[int]:
        for sequence in self.submitted:
            yield from sequence.blocks
        for shared in self.scheduler.shared.values():
            yield from shared.prefill.blocks
        for held in self.scheduler.held.values():
            yield from held.blocks

    def _missing(self) -> int:
        return sum(map(self._missing_of, self.running))

    def _missing_of(self, sequence: RequestState) -> int:
        return max(0, blocks_for(sequence.length) - len(sequence.blocks))

    def _write(self, blocks: list[int], prefix: tuple[int, ...]) -> None:
        block, offset = divmod(len(prefix) - 1, BLOCK_SIZE)
        self.cache[blocks[block], offset] = prefix


def prompt_of(length: int, family: int = 0) -> tuple[int, ...]:
    return tuple(100 * (family + 1) + i for i in range(length))


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, run, are preempted, aborted, held and continued in any order; at the end all finish."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = EngineModel()

    @rule(
        length=st.sampled_from(PROMPT_LENGTHS),
        family=st.integers(0, 1),
        siblings=st.integers(1, 4),
        max_tokens=st.integers(1, 40),
        hold=st.booleans(),
    )
    def submit_a_group(self, length: int, family: int, siblings: int, max_tokens: int, hold: bool) -> None:
        for _ in range(siblings):
            self.engine.submit(prompt_of(length, family), max_tokens, hold=hold)

    @precondition(lambda self: self.engine.scheduler.held)
    @rule(data=st.data(), extra=st.integers(0, 3), max_tokens=st.integers(1, 20))
    def continue_a_held_request(self, data: st.DataObject, extra: int, max_tokens: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.engine.scheduler.held)))
        prompt = (*self.engine.scheduler.held[name].tokens, *range(900, 900 + extra))
        if len(prompt) + max_tokens <= (NUM_BLOCKS - 1) * BLOCK_SIZE:
            self.engine.submit(prompt, max_tokens, continues=name, hold=True)

    @rule(spared=st.integers(0, 3))
    def admit(self, spared: int) -> None:
        self.engine.admit(spared)

    @rule(budget=st.integers(1, 50))
    def prefill(self, budget: int) -> None:
        self.engine.prefill(budget)

    @rule()
    def step(self) -> None:
        self.engine.step()

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data(), ending=st.sampled_from(["finish", "preempt"]))
    def leave(self, data: st.DataObject, ending: str) -> None:
        getattr(self.engine, ending)(data.draw(st.sampled_from(self.engine.running)))

    @precondition(lambda self: self.engine.scheduler.sequences)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.engine.scheduler.sequences)).aborted = True

    @rule(everything=st.booleans())
    def drop_what_is_cached(self, everything: bool) -> None:
        if everything:
            for sequence in sorted(self.engine.running, key=lambda s: s.order, reverse=True):
                self.engine.preempt(sequence)
            self.engine.scheduler.drop_all()
            assert self.engine.pool.used == 0
        else:
            self.engine.scheduler.drop_idle()

    @invariant()
    def all_is_well(self) -> None:
        self.engine.check()

    def teardown(self) -> None:
        self.engine.run_to_the_end()
        self.engine.scheduler.drop_all()
        assert self.engine.pool.used == 0 and not self.engine.scheduler.waiting_prompts
        assert len(self.engine.over) == len(self.engine.submitted)


SchedulerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestScheduler = SchedulerMachine.TestCase


def test_siblings_prefill_their_prompt_once_and_share_its_whole_blocks():
    engine = EngineModel()
    siblings = [engine.submit(prompt_of(40)) for _ in range(3)]
    engine.admit()
    (prefill,) = engine.scheduler.prefills
    assert prefill.tokens == list(prompt_of(40)[:-1]) and prefill.waiting == siblings
    engine.prefill()
    assert {tuple(s.blocks[:2]) for s in siblings} == {tuple(prefill.blocks[:2])}
    assert len({s.blocks[2] for s in siblings} | {prefill.blocks[2]}) == 4, "each has its partial block"
    engine.check()
    assert not engine.scheduler.shared, "no request waits for the prompt any more"


def test_late_sibling_starts_from_the_cached_prompt():
    engine = EngineModel()
    for _ in range(NUM_SLOTS + 1):
        engine.submit(prompt_of(33), max_tokens=2)
    engine.admit()
    engine.prefill()
    engine.finish(engine.running[0])
    engine.admit()
    assert not any(len(p.tokens) - p.done for p in engine.scheduler.prefills), "nothing is computed again"
    engine.prefill()
    engine.check()
    assert len(engine.running) == NUM_SLOTS


def test_admission_is_in_order_of_arrival_or_by_expected_length():
    for longest_first, expected in ((False, [0, 1, 2]), (True, [3, 1, 0])):
        engine = EngineModel(longest_first)
        for family, tokens in enumerate((5, 9, 1, 30)):
            engine.submit(prompt_of(4, family), expected_tokens=tokens)
        engine.admit()
        engine.prefill()
        assert [s.order for s in engine.running] == expected


def test_preempted_request_is_first_in_the_queue_and_keeps_its_tokens():
    engine = EngineModel()
    for family in range(NUM_SLOTS + 2):
        engine.submit(prompt_of(4, family))
    engine.admit()
    engine.prefill()
    engine.step()
    victim = engine.running[-1]
    engine.preempt(victim)
    assert victim.slot == -1 and not victim.blocks and victim.response == [SAMPLED]
    engine.admit()
    engine.prefill()
    assert victim in engine.running
    engine.check()


def test_admission_spares_the_blocks_of_running_rows():
    engine = EngineModel(num_blocks=4)
    engine.submit(prompt_of(4, 0))
    engine.admit()
    engine.prefill()
    engine.submit(prompt_of(20, 1))
    engine.admit(spared=1)
    assert len(engine.scheduler.waiting) == 1, "two blocks are free, and one of them is spoken for"
    engine.admit(spared=0)
    assert not engine.scheduler.waiting


def test_continued_request_starts_from_the_held_cache():
    engine = EngineModel()
    first = engine.submit(prompt_of(20), max_tokens=10, hold=True)
    engine.run_to_the_end()
    held = engine.scheduler.held[first.request.id]
    assert held.cached == 29 and engine.pool.used == len(held.blocks) == 2
    engine.submit((*first.tokens, 901, 902), continues=first.request.id)
    engine.admit()
    (prefill,) = engine.scheduler.prefills
    assert prefill.done == held.cached and not engine.scheduler.held
    engine.prefill()
    engine.check()


def test_held_cache_is_kept_from_a_prompt_that_does_not_continue_it():
    engine = EngineModel()
    first = engine.submit(prompt_of(20), max_tokens=10, hold=True)
    engine.run_to_the_end()
    engine.submit((*first.tokens[:-1], 999, 998), continues=first.request.id)
    engine.admit()
    assert engine.scheduler.prefills[0].done == 0 and first.request.id in engine.scheduler.held


def test_held_caches_are_dropped_for_a_waiting_request_when_no_row_runs():
    engine = EngineModel(num_blocks=4)
    engine.submit(prompt_of(30), max_tokens=8, hold=True)
    engine.run_to_the_end()
    assert engine.pool.free == 0
    engine.submit(prompt_of(30, 1), max_tokens=8)
    engine.run_to_the_end()
    assert not engine.scheduler.held and engine.pool.used == 0


def test_aborted_waiting_request_never_runs():
    engine = EngineModel()
    kept, gone = engine.submit(prompt_of(20)), engine.submit(prompt_of(20))
    gone.aborted = True
    engine.admit()
    assert engine.over == [gone] and gone.slot == -1
    engine.run_to_the_end()
    assert engine.over == [gone, kept] and engine.pool.used == 0


def test_drop_all_drops_a_held_cache_that_a_waiting_request_has_taken_over():
    engine = EngineModel(num_blocks=6)
    first = engine.submit(prompt_of(20), max_tokens=4, hold=True)
    engine.run_to_the_end()
    other = engine.submit(prompt_of(40, 1), max_tokens=1)
    engine.admit()
    engine.prefill()
    heir = engine.submit((*first.tokens, *range(900, 920)), continues=first.request.id)
    engine.admit()
    assert heir.blocks and heir.slot == -1, "it has the cache already, but waits for a block"
    engine.preempt(other)
    engine.scheduler.drop_all()
    assert engine.pool.used == 0 and heir.cached == 0
    engine.run_to_the_end()
