"""A source whose groups outlive the step: prompts are admitted as there is room, complete groups are taken.

    order ──▶ [ groups under way: NEW, RUNNING, IN_TOOL, DONE ] ──StepRules.choose──▶ the step's groups
                       │          ▲
                    suspend     resubmit            groups under way survive the step, an evaluation
                       ▼          │                 and, in the checkpoint, the process
                     state() ── restore()

`staleness.py` decides what a step may take and what may be admitted; this file only moves samples along. A
request that is taken off the backend later resumes where it stopped (`underway.py`), so no token is lost, and
a group leaves the list when a step takes it, so none counts twice.

    partial      the rest stays on the backend while the policy is updated
    oversample   the rest is dropped, and how much longer it was is measured
    async        the backend is another process, which generates during the update: prompts are admitted first
"""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from paceline.config import ConfigError, RolloutConfig
from paceline.rollout.lag import lag_metrics, straggler_metrics
from paceline.rollout.sampler import GroupIdentity, GroupSampler, ToolReplies
from paceline.rollout.schedule import schedule_line
from paceline.rollout.sources import RolloutSource, training_params
from paceline.rollout.staleness import StepRules
from paceline.rollout.underway import (
    GroupUnderway,
    OpenSample,
    Stage,
    group_record,
    read_identity,
    restore_group,
)
from paceline.stats import RolloutStats
from paceline.tasks.base import Observation
from paceline.tasks.order import ProblemOrder
from paceline.tasks.rewards.functions import Failed
from paceline.types import Completion, FinishReason, Group, Purpose


@dataclass
class Admissions:
    """The groups admitted under one step: the next number, and the occurrences of each problem."""

    step: int
    number: int
    seen: Counter[str]


class StreamingRollouts(RolloutSource):
    """The source for the modes in which a step does not wait for all of its requests."""

    def __init__(
        self,
        sampler: GroupSampler,
        order: ProblemOrder,
        rollout: RolloutConfig,
        signal_rounds: int,
        warn: Callable[[str], None],
    ) -> None:
        """With `signal_rounds`, groups with equal rewards are dropped, at most that many steps' worth."""
        super().__init__()
        self.sampler = sampler
        self.order = order
        self.mode = rollout.mode
        self.samples = rollout.samples_per_prompt
        self.sampling = training_params(rollout)
        self.keeps_cache = rollout.on_update == "keep"
        self.carries = rollout.stragglers == "carry"
        self.signal_rounds = signal_rounds
        self.warn = warn
        lag = rollout.max_lag if self.mode in ("partial", "async") else None
        self.rules = StepRules(rollout.prompts_per_step, rollout.in_flight, lag, rollout.on_stale)
        self.replies = ToolReplies(sampler.backend, listening=False)
        self.groups: list[GroupUnderway] = []  # in order of admission
        self.running: dict[str, tuple[GroupUnderway, OpenSample]] = {}  # by request id
        self.given_up: set[str] = set()  # requests aborted on the backend, whose completions are ignored
        self.carried: list[int] = []  # positions of problems to sample again
        self.admissions = Admissions(0, 0, Counter())
        self.version = 0  # of the policy that learns
        self.taken: list[GroupUnderway] = []  # by the last step
        self.stragglers: list[GroupUnderway] = []  # dropped by the last step
        self.dropped: Counter[str] = Counter()  # groups of the current step, by reason

    # -- the source's own contract ----------------------------------------------------------------

    def collect(self, step: int) -> list[Group]:
        version = step - 1
        self.version = version
        self.dropped.clear()
        self._drop_expired(version)
        for group in [group for group in self.groups if group.complete]:  # completed since the last step
            self._drop_without_signal(group)
        self.replies.listen(True)
        chosen = self._generate_until_chosen(step, version)
        self.replies.listen(False)
        self.taken = [group for group in self.groups if group.identity.name in chosen]
        self.groups = [group for group in self.groups if group.identity.name not in chosen]
        stragglers = self._give_up_stragglers() if self.mode == "oversample" else []
        if self.mode == "async":
            self._fill(step + 1, version, learning=True)
        self.sampler.report_refusals([s.dialogue for group in self.taken for s in group.samples])
        with self.sampler.waiting_for_rewards():
            groups = [group.group() for group in self.taken]
        self.metrics = self._measure(groups, version, stragglers)
        self.schedule = schedule_line(step, self.taken, self.order.position, self.metrics)
        return groups

    def take_stats(self) -> RolloutStats:
        return self.sampler.take_stats()

    def rewinder(self) -> Callable[[], None]:
        return self._begin_again

    def suspend(self) -> None:
        backend = self.sampler.backend
        backend.resume()
        backend.abort([*self.running, *self.given_up])
        for completion in backend.completions():
            self._receive(completion, suspending=True)
        assert not self.running and not self.given_up, "the backend has not ended every request"

    def state(self) -> str:
        self.suspend()
        return json.dumps(
            {
                "step": self.admissions.step,
                "number": self.admissions.number,
                "seen": self.admissions.seen,
                "carried": self.carried,
                "groups": [group_record(group) for group in self.groups],
            }
        )

    def restore(self, state: str) -> None:
        if not state:  # of a run in mode sync, which had no groups under way
            return
        saved = json.loads(state)
        if isinstance(saved, list):  # of `ScheduledRollouts`
            raise ConfigError(
                "this run repeats a schedule, and what is under way in it are recorded groups; continue "
                "with the same --schedule FILE"
            )
        self.admissions = Admissions(saved["step"], saved["number"], Counter(saved["seen"]))
        self.carried = list(saved["carried"])
        self.groups = [self._restored(record) for record in saved["groups"]]
        for group in self.groups:
            for sample in group.samples:
                if sample.stage is Stage.IN_TOOL:
                    self._call_tool(group, sample)

    # -- prompts in, completions out --------------------------------------------------------------

    def _generate_until_chosen(self, step: int, version: int) -> set[str]:
        backend = self.sampler.backend
        while True:
            self._fill(step, version)
            if (chosen := self._choose(version)) is not None:
                return chosen
            for completion in backend.completions():
                group = self._receive(completion)
                if group is not None and group.complete:
                    self._drop_without_signal(group)
                    self._fill(step, version)
                    if self._choose(version) is not None:
                        backend.pause()
            self._take_replies()
            assert not self._stuck(version), "everything is complete, and still the step may not go"

    def _stuck(self, version: int) -> bool:
        """Returns whether no progress is possible; the rules exclude it."""
        if self.running or not all(group.complete for group in self.groups):
            return False
        born = [group.born for group in self.groups]
        return self._choose(version) is None and not self.rules.places(version, born)

    def _choose(self, version: int) -> set[str] | None:
        complete = [group for group in self.groups if group.complete]
        unfinished = [group.born for group in self.groups if not group.complete]
        indices = self.rules.choose(version, [group.born for group in complete], unfinished)
        return None if indices is None else {complete[i].identity.name for i in indices}

    def _fill(self, step: int, version: int, learning: bool = False) -> None:
        """Admits prompts where there is room, and submits the samples that are not on the backend.

        A rerun step continues the numbering of the next one, if prompts have been admitted for that.
        """
        if self.admissions.step < step:
            self.admissions = Admissions(step, 0, Counter())
        for _ in range(self.rules.places(version, [group.born for group in self.groups], learning)):
            self.groups.append(self._admit(version))
        waiting = [(group, s) for group in self.groups for s in group.samples if s.stage is Stage.NEW]
        if not waiting:
            return
        for group, sample in waiting:
            sample.stage = Stage.RUNNING
            self.running[sample.id] = (group, sample)
        self.sampler.backend.submit([sample.request() for _, sample in waiting])

    def _admit(self, version: int) -> GroupUnderway:
        position = self.carried.pop(0) if self.carried else self.order.position
        if position == self.order.position:
            self.order.take(1)
        problem = self.order.problem_at(position)
        admissions = self.admissions
        identity = GroupIdentity(
            Purpose.TRAIN, admissions.step, admissions.number, admissions.seen[problem.id]
        )
        admissions.number += 1
        admissions.seen[problem.id] += 1
        return self._open(identity, position, version)

    def _open(self, identity: GroupIdentity, position: int, version: int) -> GroupUnderway:
        problem = self.order.problem_at(position)
        requests = self.sampler.requests_of(problem, identity, self.samples, self.sampling)
        samples = [OpenSample.of(index, request) for index, request in enumerate(requests)]
        scoring = self.sampler.task.scoring.open_group(problem, self.samples)
        return GroupUnderway(identity, position, problem, version, scoring, samples)

    def _receive(self, completion: Completion, suspending: bool = False) -> GroupUnderway | None:
        """Adds one completion to its sample and returns the group; None where the request was dropped."""
        name = completion.request.id
        if name in self.given_up:
            self.given_up.remove(name)
            return None
        group, sample = self.running.pop(name)
        if suspending and completion.finish_reason is FinishReason.ABORTED:
            sample.park(completion)
            return group
        whole = sample.join(completion)
        sample.add_turn(whole, self.sampler.tokenizer.decode(whole.tokens))
        if self.sampler.task.turns is not None and whole.finish_reason is FinishReason.STOP:
            self._call_tool(group, sample)
        else:
            group.finish(sample)
        return group

    # -- tools ------------------------------------------------------------------------------------

    def _call_tool(self, group: GroupUnderway, sample: OpenSample) -> None:
        sample.stage = Stage.IN_TOOL
        future = self.sampler.task.turns.step(group.problem, sample.dialogue.conversation)
        future.add_done_callback(partial(self.replies.put, (group, sample)))

    def _take_replies(self) -> None:
        """Handles the tools' replies; waits for one where no request is running."""
        in_tool = any(s.stage is Stage.IN_TOOL for group in self.groups for s in group.samples)
        if in_tool and not self.running:
            with self.sampler.waiting_for_rewards():
                self.replies.wait()
        for (group, sample), reply in self.replies.take():
            if sample.stage is not Stage.IN_TOOL:
                continue  # its group was dropped, or restarted
            if isinstance(reply, Failed):
                group.scoring.note_failure(sample.index, "step", reply)
            request = None
            if isinstance(reply, Observation):
                dialogue = sample.dialogue
                tokens = self.sampler.task.prompts.encode_observation(reply, dialogue.tokens[-1])
                request = dialogue.continue_with(tokens, self.sampler.tokenizer.decode(tokens))
            if request is None:
                group.finish(sample)
                if group.complete:
                    self._drop_without_signal(group)
            else:
                sample.begin_turn(request)

    # -- groups that no step learns from ----------------------------------------------------------

    def _drop_without_signal(self, group: GroupUnderway) -> None:
        if self.dropped["signal"] >= self.signal_rounds * self.rules.prompts:
            return
        with self.sampler.waiting_for_rewards():
            rewards = group.group().rewards
        if len(set(rewards)) == 1:
            self.groups.remove(group)
            self.dropped["signal"] += 1

    def _drop_expired(self, version: int) -> None:
        """Drops groups past `max_lag`, with a warning; with `on_stale: wait` there are none."""
        expired = [group for group in self.groups if self.rules.expired(version, group.born)]
        if expired:
            self.dropped["stale"] += len(expired)
            self.warn(
                f"step {version + 1}: {len(expired)} groups are more than rollout.max_lag = "
                f"{self.rules.max_lag} versions old and dropped (rollout/dropped_stale)"
            )
            self._give_up(expired)

    def _give_up(self, groups: list[GroupUnderway]) -> None:
        for group in groups:
            self.groups.remove(group)
        names = {id(group) for group in groups}
        requests = [name for name, (group, _) in self.running.items() if id(group) in names]
        for name in requests:
            del self.running[name]
        self.given_up.update(requests)
        _forget(groups)
        self.sampler.backend.abort(requests)

    def _give_up_stragglers(self) -> list[int]:
        """Drops the groups that the step did not wait for; returns the lengths of their responses so far."""
        self.suspend()
        self.stragglers, self.groups = self.groups, []
        _forget(self.stragglers)
        self.dropped["stragglers"] += len(self.stragglers)
        if self.carries:
            self.carried += [group.position for group in self.stragglers]
        return [sample.length for group in self.stragglers for sample in group.samples]

    def _begin_again(self) -> None:
        """Restarts all groups under way, and those that the last step took or dropped, with their seeds."""
        self.suspend()
        begun = [*self.taken, *self.stragglers, *self.groups]
        begun.sort(key=lambda group: (group.identity.step, group.identity.number))
        _forget(begun)
        asked = {group.position for group in self.stragglers}
        self.carried = [position for position in self.carried if position not in asked]
        self.groups = [self._open(group.identity, group.position, self.version) for group in begun]
        self.taken, self.stragglers = [], []
        self.take_stats()

    # -- metrics ----------------------------------------------------------------------------------

    def _measure(self, groups: list[Group], version: int, stragglers: list[int]) -> dict[str, float]:
        metrics = lag_metrics(groups, version, self.keeps_cache)
        metrics["rollout/groups_under_way"] = float(len(self.groups))
        if self.rules.on_stale == "drop":
            metrics["rollout/dropped_stale"] = float(self.dropped["stale"])
        if self.signal_rounds:
            metrics["rollout/dropped_groups"] = float(self.dropped["signal"])
        if self.mode == "oversample":
            metrics |= straggler_metrics(groups, stragglers, self.dropped["stragglers"])
        return metrics

    def _restored(self, record: dict[str, Any]) -> GroupUnderway:
        identity = read_identity(record)
        problem = self.order.problem_at(record["position"])
        requests = self.sampler.requests_of(problem, identity, self.samples, self.sampling)
        return restore_group(
            record, problem, requests, self.sampler.task.scoring.open_group(problem, self.samples)
        )


def _forget(groups: list[GroupUnderway]) -> None:
    """Ends the samples of dropped groups, so that later replies of a tool are ignored."""
    for group in groups:
        for sample in group.samples:
            sample.stage = Stage.DONE
