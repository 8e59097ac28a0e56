"""One replica's batch over time, event by event instead of token by token.

All rows of a batch advance by the same number of tokens per step (one, or the accept length), so the replica
keeps one counter, `progress`: tokens a row that never left has gained. A row that entered at progress p with
n tokens to go leaves at p + n; a heap of those marks gives the next event. Between events the batch is
constant and the step time is linear in the context, which grows linearly: the time of m steps is

    sum_{i<m} fixed + per_key (C + R a i) + per_longest (L + a i)
        = m (fixed + per_key C + per_longest L) + (per_key R a + per_longest a) m (m - 1) / 2

What is approximate: every row gains the mean accept length in every step; a request's own luck averages out
over its hundreds of steps.
"""

import heapq
import math
from collections import Counter, deque
from dataclasses import dataclass, field

from paceline.simulate.speculation import Speculation
from paceline.simulate.step_cost import LinearCost, StepCost

# Tokens of cache beyond its length that a request needs to start, as in the native engine.
LOOKAHEAD = 16
# The choice of k is looked at again when the context has grown by this share, but not before so many steps.
REPACE_GROWTH = 0.1
MIN_STRETCH = 64


@dataclass(eq=False)
class SimulatedRequest:
    """One response to generate, and how far it has come."""

    id: int
    prompt: int  # tokens
    length: int  # response tokens to generate
    group: int  # requests of a group share their prompt's cache
    batch: int  # the RL step it belongs to
    version: int = -1  # of the weights when it first ran
    started: float = math.inf  # when it first ran
    done: float = 0.0  # response tokens generated before it last entered


@dataclass(frozen=True)
class Stretch:
    """Consecutive steps with the same batch."""

    start: float
    stop: float
    rows: int
    draft_tokens: int
    steps: int
    tokens: float


@dataclass
class Plan:
    """The next stretch, worked out but not yet run."""

    steps: int
    stop: float
    draft_tokens: int


@dataclass
class ReplicaTotals:
    """What a replica has done so far."""

    busy_seconds: float = 0.0
    tokens: float = 0.0  # emitted, by the lengths of finished requests
    steps: int = 0
    prefill_tokens: float = 0.0
    preemptions: int = 0
    stretches: list[Stretch] = field(default_factory=list)


class Replica:
    """An engine that runs a batch of requests, and the requests that wait for it."""

    def __init__(
        self,
        cost: StepCost,
        speculation: Speculation,
        max_running: int,
        kv_tokens: int,
        costs: dict[int, LinearCost] | None = None,
    ) -> None:
        self.cost = cost
        self.speculation = speculation
        self.max_running = max_running
        self.kv_tokens = kv_tokens
        self.costs = costs or {k: cost.linear(max_running, k) for k in sorted({0, *speculation.draft_tokens})}
        self.clock = 0.0
        self.progress = 0.0
        self.rows: dict[int, SimulatedRequest] = {}
        self.entered: dict[int, float] = {}  # progress at which a row entered
        self.waiting: deque[SimulatedRequest] = deque()
        # Heaps of (progress, id, entry number) and (-context offset, id, entry number).
        self.finish_marks: list[tuple[float, int, int]] = []
        self.by_context: list[tuple[float, int, int]] = []
        self.entry_number: dict[int, int] = {}
        self.entries = 0
        self.offset_sum = 0.0  # context of all rows = offset_sum + rows x progress
        self.groups: Counter[int] = Counter()
        self.shared_tokens = 0.0  # prompt tokens that group members do not store again
        self.totals = ReplicaTotals()
        self.plan: Plan | None = None

    def empty_copy(self) -> "Replica":
        """Returns another one like it with nothing running, which shares the tables of step times."""
        return Replica(self.cost, self.speculation, self.max_running, self.kv_tokens, self.costs)

    # -- state --------------------------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Returns the number of requests that run or wait here."""
        return len(self.rows) + len(self.waiting)

    @property
    def context(self) -> float:
        """Returns the tokens of all running requests, prompts included."""
        return self.offset_sum + len(self.rows) * self.progress

    @property
    def kv_used(self) -> float:
        return self.context - self.shared_tokens

    @property
    def longest(self) -> float:
        self._drop_stale(self.by_context)
        return -self.by_context[0][0] + self.progress if self.by_context else 0.0

    def _drop_stale(self, heap: list[tuple[float, int, int]]) -> None:
        """Removes heads that belong to rows that have left; what the heap stands for does not change."""
        while heap and self.entry_number.get(heap[0][1]) != heap[0][2]:
            heapq.heappop(heap)

    # -- events -------------------------------------------------------------------------------------------

    def next_event(self) -> float:
        """Returns when the batch will change; infinity if nothing runs."""
        if self.plan is None:
            self.plan = self._make_plan()
        return self.plan.stop if self.plan is not None else math.inf

    def run_to_event(self) -> list[SimulatedRequest]:
        """Carries out the plan and returns what finished."""
        plan = self.plan
        assert plan is not None
        self._advance(plan.steps, plan.draft_tokens)
        return self._leave_finished()

    def run_until(self, time: float) -> list[SimulatedRequest]:
        """Runs the steps that begin before `time`, an event from outside, and returns what finished."""
        if self.plan is None or self.clock >= time:
            return []
        if self.plan.stop <= time:
            return self.run_to_event()
        steps = self._steps_within(self.plan, time - self.clock)
        self._advance(steps, self.plan.draft_tokens)
        return self._leave_finished()

    def admit(self, version: int) -> int:
        """Starts waiting requests while slots and cache last, and returns how many never ran before.

        Their prompts are computed, together with what a preempted request had generated.
        """
        entering = 0
        fresh = 0
        tokens = 0.0
        pairs = 0.0
        while self.waiting and len(self.rows) < self.max_running:
            request = self.waiting[0]
            cached = self.groups[request.group] > 0
            own = request.done + (0 if cached else request.prompt)
            if self.rows and self.kv_used + own + LOOKAHEAD > self.kv_tokens:
                break
            self.waiting.popleft()
            context = request.prompt + request.done
            new = context if not cached else request.done
            tokens += new
            pairs += new * (context - new / 2)
            entering += 1
            fresh += request.version < 0
            self._enter(request, version)
        if entering:
            self._prefill(tokens, pairs)
            self.plan = None
        return fresh

    def pause(self, until: float, recompute: bool) -> None:
        """Waits for new weights until then; the cache may have to be recomputed."""
        self.clock = max(self.clock, until)
        if recompute and self.rows:
            self._prefill(self.kv_used, self.context**2 / len(self.rows) / 2)
        self.plan = None

    # -- rows enter and leave -----------------------------------------------------------------------------

    def _prefill(self, tokens: float, pairs: float) -> None:
        seconds = self.cost.prefill(tokens, pairs)
        self.clock += seconds
        self.totals.busy_seconds += seconds
        self.totals.prefill_tokens += tokens

    def _enter(self, request: SimulatedRequest, version: int) -> None:
        if request.version < 0:
            request.version = version
            request.started = self.clock
        self.entries += 1
        self.rows[request.id] = request
        self.entered[request.id] = self.progress
        self.entry_number[request.id] = self.entries
        offset = request.prompt + request.done - self.progress
        self.offset_sum += offset
        finish = self.progress + request.length - request.done
        heapq.heappush(self.finish_marks, (finish, request.id, self.entries))
        heapq.heappush(self.by_context, (-offset, request.id, self.entries))
        if self.groups[request.group]:
            self.shared_tokens += request.prompt
        self.groups[request.group] += 1

    def abort_all(self) -> None:
        """Ends everything that runs or waits here."""
        for request in list(self.rows.values()):
            self._leave(request)
        self.waiting.clear()
        self.plan = None

    def _leave(self, request: SimulatedRequest) -> None:
        entered = self.entered.pop(request.id)
        self.offset_sum -= request.prompt + request.done - entered
        request.done = min(float(request.length), request.done + self.progress - entered)
        del self.rows[request.id], self.entry_number[request.id]
        self.groups[request.group] -= 1
        if self.groups[request.group]:
            self.shared_tokens -= request.prompt
        if not self.rows:
            self.offset_sum = self.shared_tokens = 0.0

    def _leave_finished(self) -> list[SimulatedRequest]:
        finished = []
        while self._next_finish() <= self.progress + 1e-9:
            _, id, _ = heapq.heappop(self.finish_marks)
            request = self.rows[id]
            self._leave(request)
            self.totals.tokens += request.length
            finished.append(request)
        while len(self.rows) > 1 and self.kv_used + len(self.rows) > self.kv_tokens:
            youngest = self.rows[next(reversed(self.rows))]  # a dictionary keeps the order of entry
            self._leave(youngest)
            self.waiting.appendleft(youngest)
            self.totals.preemptions += 1
        return finished

    def _next_finish(self) -> float:
        self._drop_stale(self.finish_marks)
        return self.finish_marks[0][0] if self.finish_marks else math.inf

    # -- stretches ----------------------------------------------------------------------------------------

    def _choose_draft_tokens(self, rows: int) -> int:
        """Returns the number of draft tokens with the most tokens per second at this batch and context."""
        allowed = self.speculation.allowed(rows)
        if len(allowed) == 1:
            return allowed[0]
        keys, longest = self.context, self.longest

        def rate(k: int) -> float:
            return self.speculation.accept_lengths[k] / self.costs[k].seconds(rows, keys, longest)

        return max(allowed, key=lambda k: (rate(k), -k))

    def _make_plan(self) -> Plan | None:
        rows = len(self.rows)
        if not rows:
            return None
        k = self._choose_draft_tokens(rows)
        gain = self.speculation.accept_lengths[k]
        steps = max(1, math.ceil((self._next_finish() - self.progress) / gain - 1e-9))
        if rows > 1:
            steps = min(steps, max(1, int((self.kv_tokens - self.kv_used - rows) / (rows * gain)) + 1))
        if len(self.speculation.allowed(rows)) > 1:
            steps = min(steps, max(MIN_STRETCH, int(REPACE_GROWTH * self.context / (rows * gain))))
        return Plan(steps, self.clock + self._seconds(steps, k), k)

    def _seconds(self, steps: int, k: int) -> float:
        first, growth = self._first_and_growth(k)
        return steps * first + growth * steps * (steps - 1) / 2

    def _first_and_growth(self, k: int) -> tuple[float, float]:
        rows, cost, gain = len(self.rows), self.costs[k], self.speculation.accept_lengths[k]
        return cost.seconds(rows, self.context, self.longest), (cost.per_key * rows + cost.per_longest) * gain

    def _steps_within(self, plan: Plan, seconds: float) -> int:
        """Returns the largest number of steps that takes at most this long, from the quadratic formula."""
        first, growth = self._first_and_growth(plan.draft_tokens)
        if growth <= 0:
            return min(plan.steps, int(seconds / first))
        b = first - growth / 2
        return min(plan.steps, int((-b + math.sqrt(b * b + 2 * growth * seconds)) / growth))

    def _advance(self, steps: int, k: int) -> None:
        rows = len(self.rows)
        start = self.clock
        seconds = self._seconds(steps, k)
        gain = steps * self.speculation.accept_lengths[k]
        self.clock += seconds
        self.progress += gain
        self.totals.busy_seconds += seconds
        self.totals.steps += steps
        if steps:
            self.totals.stretches.append(Stretch(start, self.clock, rows, k, steps, gain * rows))
        self.plan = None
