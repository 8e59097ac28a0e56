"""Decides which requests may run: the queue, the slots, the blocks, and the prompts that siblings share.

    waiting ──admit──▶ prefilling ──take_ready──▶ the engine's running rows
       ▲                                              │
       └─────────────── requeue ◀─────────────────────┘   preempted: first in the queue, recomputes its cache

Host bookkeeping only: nothing here touches the device.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

from paceline.engine.blocks import BlockPool
from paceline.engine.expected_lengths import ExpectedLengths
from paceline.engine.prefill import Prefill, SharedPrompt
from paceline.engine.request_state import RequestState
from paceline.paged.cache import BLOCK_SIZE, blocks_for
from paceline.types import Request


@dataclass(frozen=True)
class Held:
    """The cache of a finished sequence, kept for a request that continues it."""

    tokens: list[int]
    blocks: list[int]
    # Leading tokens whose keys and values are in `blocks`.
    cached: int


@dataclass(frozen=True)
class Ready:
    """Sequences whose prompt is cached, and the partial blocks to copy before they run."""

    sequences: list[RequestState]
    copy_from: list[int]
    copy_to: list[int]


class Scheduler:
    """The requests that do not run yet, and the allocation of slots and blocks."""

    def __init__(
        self, pool: BlockPool, num_slots: int, longest_first: bool, keeps_prefixes: bool = False
    ) -> None:
        self.pool = pool
        # Whether prompts start from what earlier requests left in the cache.
        self.keeps_prefixes = keeps_prefixes
        self.expected_lengths = ExpectedLengths()
        # Otherwise first come, first served.
        self.longest_first = longest_first
        self._is_sorted = True
        # A heap: rows get the slots they would get in a new engine, so drafters see the same after a restart.
        self.free_slots = list(range(num_slots))
        self.waiting: deque[RequestState] = deque()
        self.prefills: deque[Prefill] = deque()
        self.held: dict[str, Held] = {}
        self.shared: dict[tuple[int, ...], SharedPrompt] = {}
        self.waiting_prompts: Counter[tuple[int, ...]] = Counter()

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.prefills)

    @property
    def sequences(self) -> list[RequestState]:
        """All sequences that are not running yet."""
        return [*self.waiting, *(sequence for prefill in self.prefills for sequence in prefill.waiting)]

    def add(self, sequences: Iterable[RequestState]) -> None:
        for sequence in sequences:
            self.waiting.append(sequence)
            self.waiting_prompts[sequence.request.prompt] += 1
        self._is_sorted = False

    def note_finished(self, sequence: RequestState) -> None:
        """Records the length of a finished response; waiting siblings may start earlier or later for it."""
        if self.longest_first:  # it keeps prompts
            self.expected_lengths.note(sequence.request, len(sequence.response))
            self._is_sorted = False

    def _sort(self) -> None:
        """Puts the longest expected sequences first, if so configured, but behind preempted ones."""
        if self.longest_first and not self._is_sorted:
            expected = {s.order: self.expected_lengths.of(s.request) for s in self.waiting}
            self.waiting = deque(
                sorted(self.waiting, key=lambda s: (not s.response, -expected[s.order], s.order))
            )
            self._is_sorted = True

    def requeue(self, sequence: RequestState) -> None:
        """Puts a sequence back at the head of the queue."""
        self.release(sequence)
        sequence.begin("waiting")
        self.waiting.appendleft(sequence)
        self.waiting_prompts[sequence.request.prompt] += 1

    @property
    def may_admit(self) -> bool:
        """Whether a sequence waits and a slot is free."""
        return bool(self.waiting and self.free_slots)

    def admit(self, nobody_runs: bool, lookahead: int, blocks_to_keep: int) -> list[RequestState]:
        """Starts waiting sequences, in order, while there are slots and blocks.

        A sequence starts with blocks for `lookahead` tokens beyond its length, and leaves `blocks_to_keep` to
        the running rows: without those it would be preempted at once and its prefill wasted. Returns the
        sequences that were aborted meanwhile.
        """
        aborted = []
        if self.may_admit:
            self._sort()
        while self.may_admit:
            sequence = self.waiting[0]
            if sequence.aborted:
                self._forget(self.waiting.popleft())
                self.pool.release(sequence.drop_blocks())
                aborted.append(sequence)
                continue
            self._take_held(sequence)
            wanted = blocks_for(min(sequence.length + lookahead, sequence.limit))
            prefix = self._prefix_of(sequence, wanted + blocks_to_keep)
            if prefix is None:
                self._take_prefix(sequence)
            whole = prefix.whole_blocks if prefix is not None else []
            if wanted + blocks_to_keep - len(whole) - len(sequence.blocks) > self.pool.free:
                if not nobody_runs or self.prefills or not self._caches_idle:
                    # Blocks come free when a row finishes.
                    break
                self.drop_idle()
                continue
            self.waiting.popleft()
            self._start(sequence, prefix, whole, wanted)
            self._forget(sequence)
        return aborted

    def take_ready(self) -> Ready:
        """Removes and returns the sequences whose prefill is done."""
        ready = [prefill for prefill in self.prefills if prefill.finished]
        self.prefills = deque(prefill for prefill in self.prefills if not prefill.finished)
        copy_from = []
        copy_to = []
        for prompt, shared in list(self.shared.items()):
            if shared.prefill not in ready:
                continue
            if shared.partial_block is not None:
                targets = [sequence.blocks[len(shared.whole_blocks)] for sequence in shared.prefill.waiting]
                copy_from += [shared.partial_block] * len(targets)
                copy_to += targets
            if prompt not in self.waiting_prompts:
                # Released now, reused at the earliest after the copy: the device works in order.
                self._drop_shared(prompt)
        sequences = [sequence for prefill in ready for sequence in prefill.waiting]
        for prefill in ready:
            for sequence in prefill.waiting[:1]:
                self._remember(sequence.request, prefill.tokens, prefill.blocks)
            for sequence in prefill.waiting:
                sequence.handover = prefill.handover
            prefill.waiting = []
        return Ready(sequences, copy_from, copy_to)

    def release(self, sequence: RequestState) -> None:
        self.pool.release(sequence.drop_blocks())
        if sequence.slot >= 0:
            heappush(self.free_slots, sequence.slot)
            sequence.slot = -1

    def hold(self, sequence: RequestState) -> None:
        """Keeps the cache of a finished sequence; `release` frees the rest."""
        # There may be one of an earlier request with the same id.
        self.drop_held([sequence.request.id])
        # The last token has been sampled but not run.
        cached = sequence.length - 1
        keep = blocks_for(cached)
        self.held[sequence.request.id] = Held(sequence.tokens, sequence.blocks[:keep], cached)
        sequence.blocks = sequence.blocks[keep:]

    def note_left(self, sequence: RequestState) -> None:
        """Called when a row stops running, before its blocks are released."""
        # The last token has been sampled but not run.
        self._remember(sequence.request, sequence.tokens[:-1], sequence.blocks)

    def _remember(self, request: Request, tokens: list[int], blocks: list[int]) -> None:
        if self.keeps_prefixes:
            self.pool.prefixes.add(request.scope, tokens, blocks)

    def drop_held(self, names: Iterable[str]) -> None:
        """Releases the caches held of these finished requests; requests without one are ignored."""
        for name in [name for name in names if name in self.held]:
            self.pool.release(self.held.pop(name).blocks)

    def drop_idle(self) -> None:
        """Releases what is cached only for requests that may reuse it.

        That is held sequences, also those that a waiting request has taken over, and prompts of siblings that
        still wait.
        """
        self.drop_held(list(self.held))
        self._drop_taken_over()
        for prompt in [
            p for p, shared in self.shared.items() if shared.prefill.finished and not shared.prefill.waiting
        ]:
            self._drop_shared(prompt)

    def drop_all(self) -> None:
        """Drops everything cached, because weights change or memory is released; all sequences wait again."""
        for prefill in reversed(self.prefills):
            for sequence in reversed(prefill.waiting):
                self.requeue(sequence)
        self.prefills.clear()
        self._drop_taken_over()
        self.drop_held(list(self.held))
        for prompt in list(self.shared):
            self._drop_shared(prompt)
        self.pool.forget_prefixes()

    @property
    def _caches_idle(self) -> bool:
        return bool(self.shared or self.held or any(sequence.blocks for sequence in self.waiting))

    def _drop_taken_over(self) -> None:
        for sequence in self.waiting:
            self.pool.release(sequence.drop_blocks())

    def _start(
        self, sequence: RequestState, prefix: SharedPrompt | None, whole: list[int], num_blocks: int
    ) -> None:
        sequence.slot = heappop(self.free_slots)
        sequence.begin("prefill")
        sequence.blocks += self.pool.share(whole)
        sequence.blocks += self.pool.allocate(max(0, num_blocks - len(sequence.blocks)))
        if prefix is None:
            tokens = sequence.tokens
            self.prefills.append(
                Prefill(
                    tokens[:-1], sequence.blocks, done=sequence.cached, last=tokens[-1], waiting=[sequence]
                )
            )
            return
        prefix.prefill.waiting.append(sequence)
        sequence.reused = prefix.reused
        if prefix.prefill.finished and prefix.prefill not in self.prefills:
            # Only to let this sibling enter.
            self.prefills.append(prefix.prefill)

    def _prefix_of(self, sequence: RequestState, wanted: int) -> SharedPrompt | None:
        """Returns the cached prompt to start from, or None.

        It is made now if siblings wait and there are blocks for its partial one as well. A sequence that
        resumes, or continues a held one, has none.
        """
        if sequence.response or sequence.blocks:
            return None
        prompt = sequence.request.prompt
        if (
            prompt not in self.shared
            and len(prompt) > 1
            and self.waiting_prompts[prompt] > 1
            and wanted < self.pool.free
        ):
            tokens = list(prompt[:-1])
            blocks = self._known_prefix(sequence)
            done = len(blocks) * BLOCK_SIZE
            blocks += self.pool.allocate(blocks_for(len(tokens)) - len(blocks))
            prefill = Prefill(tokens, blocks, done, last=prompt[-1])
            self.prefills.append(prefill)
            self.shared[prompt] = SharedPrompt(prefill, done)
        return self.shared.get(prompt)

    def _take_held(self, sequence: RequestState) -> None:
        """Passes the held cache to a request that continues it, if that still exists and is a prefix."""
        held = self.held.get(sequence.request.continues)
        if held is None or sequence.response or sequence.blocks:
            return
        if (
            len(sequence.request.prompt) > held.cached
            and list(sequence.request.prompt[: len(held.tokens)]) == held.tokens
        ):
            del self.held[sequence.request.continues]
            sequence.blocks = held.blocks
            sequence.cached = held.cached

    def _take_prefix(self, sequence: RequestState) -> None:
        """Lets a sequence start behind the longest prefix that the cache still holds."""
        if not sequence.blocks:
            sequence.blocks = self._known_prefix(sequence)
            sequence.cached = len(sequence.blocks) * BLOCK_SIZE

    def _known_prefix(self, sequence: RequestState) -> list[int]:
        if not self.keeps_prefixes:
            return []
        # At least one token is left to prefill: drafters that follow the policy begin with its state there.
        blocks = self.pool.share_prefix(sequence.request.scope, sequence.tokens[:-2])
        if not sequence.response:
            sequence.reused = len(blocks) * BLOCK_SIZE
        return blocks

    def _forget(self, sequence: RequestState) -> None:
        """Called when a sequence stops waiting; its group's prompt is dropped when no sibling waits."""
        prompt = sequence.request.prompt
        self.waiting_prompts[prompt] -= 1
        if self.waiting_prompts[prompt] > 0:
            return
        del self.waiting_prompts[prompt]
        shared = self.shared.get(prompt)
        if shared is not None and shared.prefill.finished and not shared.prefill.waiting:
            self._drop_shared(prompt)

    def _drop_shared(self, prompt: tuple[int, ...]) -> None:
        self.pool.release(self.shared.pop(prompt).prefill.blocks)
