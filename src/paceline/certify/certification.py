"""One subject being certified: its runs, the oracle's verdicts on them, and the resulting checks.

plain decoding of every setting ──▶ the oracle judges every token ──▶ everything else must give the same:
other batches, speculation of several depths, preemption, pauses, turns, new weights, stops, limits
"""

import copy
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.certify import scenes
from paceline.certify.bookkeeping import problems_of
from paceline.certify.certificate import Check
from paceline.certify.judge import Judge, Step, steps_of
from paceline.certify.parity import check_logprobs
from paceline.certify.plan import SCENES, Plan
from paceline.certify.requests import (
    LONG_POSITIONS,
    ODD_SEED_SETTING,
    SETTINGS,
    between,
    drawn_requests,
    grid_requests,
    long_context_requests,
    odd_seed_requests,
    sibling_requests,
)
from paceline.certify.scenes import Scene
from paceline.certify.subject import BrokenContract, Opening, Subject, rounded_copies
from paceline.certify.tally import Tally
from paceline.certify.uncertainty import Uncertainty, measure, wide_tolerance
from paceline.types import Completion, Request

# Tokens that a step may propose at most; deeper proposals are not tried.
DEEPEST = 15

# Requests that run together by default.
MAX_RUNNING = 128

# The same for an adaptive pacer, which speculates only while few requests run.
ADAPTIVE_MAX_RUNNING = 16

# Requests of a round that is drawn at random, and tokens that each may have.
DRAWN_REQUESTS = 48
MOST_DRAWN = 320

NEVER_SPECULATES = "this backend does not speculate"
SETS_NO_SIZES = "the size of its cache and of its chunks cannot be set"

Progress = Callable[[str], None]


@dataclass
class Certification:
    """One subject being certified: what all its checks share."""

    subject: Subject
    plan: Plan
    prompts: list[tuple[int, ...]]
    progress: Progress = lambda _: None
    checks: list[Check] = field(default_factory=list)
    judge: Judge = field(init=False)
    tally: Tally = field(init=False)
    plain: dict[str, Completion] = field(default_factory=dict)  # by request
    problems: list[str] = field(default_factory=list)
    completions: int = 0

    @property
    def exact(self) -> bool:
        """Whether tokens of speculating steps can be judged exactly."""
        return self.subject.published_noise and (not self.subject.rejects or self.subject.exact_rejection)

    def attempt(self, name: str, function: Callable[[], None]) -> None:
        """Runs a part; a backend that raises has failed it."""
        self.progress(name)
        try:
            function()
        except BrokenContract as error:
            self.checks.append(Check(name, False, str(error)))
        except Exception as error:  # noqa: BLE001 - any error of a backend is its failure, not the certificate's
            self.checks.append(Check(name, False, f"{type(error).__name__}: {error}", raised=True))

    def play(self) -> None:
        """Runs the plan's scenes and lists the others; one without a check or a reason has failed."""
        others = [name for name in SCENES if name not in self.plan.scenes]
        if others:
            self.leave_out("scenes", f"{', '.join(others)}: {self.plan.why_fewer}")
        for name in self.plan.scenes:
            known = len(self.checks)
            self.attempt(name, getattr(self, name))
            if len(self.checks) == known:
                self.checks.append(Check(name, False, "nothing was shown, and nothing says why"))

    def leave_out(self, name: str, why: str) -> None:
        self.checks.append(Check(name, None, why, promised=False, left_out=True))

    def begin(self) -> Uncertainty | None:
        """Decodes every setting plainly, and returns how far rounding moves logits there."""
        plan, subject = self.plan, self.subject
        requests = grid_requests(self.prompts, plan.settings, plan.samples, plan.tokens, plan.seed)
        requests += odd_seed_requests(self.prompts, plan.tokens)
        _, completions = scenes.run(subject, Opening(0, MAX_RUNNING), requests)
        self.plain = {completion.request.id: completion for completion in completions}
        uncertainty = measure(subject, completions[:: max(1, len(completions) // 40)])
        rounded = bool(rounded_copies(subject))
        tolerance = uncertainty.tolerance if rounded else wide_tolerance(subject, completions[:40])
        self.judge = Judge(subject, tolerance)
        listed = {*SETTINGS, *plan.settings, ODD_SEED_SETTING}
        self.tally = Tally(len(rounded_copies(subject)), subject.tokens, listed)
        if rounded:
            self.checks.append(Check("what rounding moves", None, uncertainty.describe(), promised=False))
        if subject.perturbed:
            self.checks += check_logprobs(subject, completions[:48], "{}", tell_distance=True)
        self._check_own_logprobs(completions, "plain")
        self.note(completions, [[Step(0)] * len(c.tokens) for c in completions], 0)
        return uncertainty

    def note(self, completions: list[Completion], steps: list[list[Step]], proposed: int) -> Check | None:
        """Judges a run's tokens; returns the check of the whole run where its tokens can be judged."""
        self.completions += len(completions)
        self.problems += problems_of(self.subject, completions)
        if not self.subject.published_noise:
            return None
        if proposed and self.subject.rejects:
            if not self.exact:
                return None
            verdicts = self.judge.rejection(completions, steps, proposed)
        else:
            verdicts = self.judge.shared_noise(completions)
        count = self.tally.add(completions, verdicts, steps, proposed)
        return count.check(
            "", f"{count.tokens} tokens as the oracle says", (), self.tally.chance(count.tokens)
        )

    def scene(self, name: str, scene: Scene, proposed: int) -> None:
        if scene.versions:
            self.judge.versions = scene.versions
        steps = [steps_of(completion, scene.opened) for completion in scene.completions]
        judged = self.note(scene.completions, steps, proposed)
        self.judge.versions = {}
        if not scene.happened:
            self.checks.append(Check(name, False, f"{scene.shown}: nothing was shown"))
            return
        parts = [scene.shown]
        passed, p_value = (None, None) if judged is None else (judged.passed, judged.p_value)
        if judged is not None:
            parts.append(judged.detail)
        promised = self._promises_same(proposed)
        if scene.same_as is not None and (promised or judged is None):
            same = sum(_bits(a) == _bits(b) for a, b in zip(scene.completions, scene.same_as, strict=True))
            parts.append(f"{same} of {len(scene.same_as)} completions identical to plain decoding's")
            if promised and same < len(scene.same_as):
                passed, p_value = False, None
        says = passed is not None or p_value is not None
        self.checks.append(Check(name, passed, "; ".join(parts), p_value, promised=says))

    def _check_own_logprobs(self, completions: list[Completion], how: str) -> None:
        """Checks the logprobs of a generator with noise of its own; under truncation they are not defined."""
        if not self.subject.published_noise:
            tempered = "" if self.subject.tempered_logprobs else " and at temperatures other than 0 and 1"
            self.leave_out(f"logprobs, {how}", f"under truncation{tempered}, where they are not defined")
            whole = [c for c in completions if not c.request.sampling.truncates]
            if not self.subject.tempered_logprobs:
                whole = [c for c in whole if c.request.sampling.temperature in (0.0, 1.0)]
            self.checks += check_logprobs(self.subject, whole, f"{{}}, {how}")

    def _promises_same(self, proposed: int) -> bool:
        return self.subject.same_with_any_drafter if proposed else self.subject.same_in_any_batch

    def some(self, count: int) -> tuple[list[Request], list[Completion]]:
        """Returns requests of every setting, and what plain decoding gave."""
        every = list(self.plain.values())
        chosen = every[:: max(1, 2 * len(every) // count)][: count // 2]
        # The rest are siblings of some of them, which share a prompt while they wait together.
        groups = {completion.request.group for completion in chosen[: count // 6]}
        known = {completion.request.id for completion in chosen}
        chosen += [c for c in every if c.request.group in groups and c.request.id not in known]
        return [completion.request for completion in chosen], chosen

    def siblings(self, label: str) -> tuple[list[Request], list[Completion]]:
        """Returns groups whose responses differ in length, and what plain decoding gives."""
        requests = sibling_requests(self.prompts, 5, 6, self.plan.seed, label, self.plan.settings)
        return requests, scenes.run(self.subject, Opening(), requests)[1]

    # -- the parts --------------------------------------------------------------------------------

    def speculate(self) -> None:
        """Runs every setting with speculation: all in one batch, and those that do not truncate alone."""
        running = ADAPTIVE_MAX_RUNNING if self.subject.adaptive else MAX_RUNNING
        requests = [c.request for c in self.plain.values()]
        opened, completions = scenes.run(self.subject, Opening(self.subject.tokens, running), requests)
        scene = Scene(completions, opened, "every setting in one batch", same_as=list(self.plain.values()))
        self.scene(f"{self.subject.tokens} proposed", scene, self.subject.tokens)
        whole = [request for request in requests if not request.sampling.truncates]
        opened, completions = scenes.run(self.subject, Opening(self.subject.tokens, running), whole)
        self._check_own_logprobs(completions, "speculating")
        scene = Scene(completions, opened, "nobody truncates", same_as=[self.plain[r.id] for r in whole])
        self.scene(f"{self.subject.tokens} proposed, no truncation", scene, self.subject.tokens)

    def batches(self) -> None:
        for running, count in ((1, 6), (5, 32)):
            requests, plain = self.some(count)
            opened, completions = scenes.run(self.subject, Opening(0, running), requests)
            name = "one at a time" if running == 1 else f"{running} at a time"
            self.scene(f"plain, {name}", Scene(completions, opened, name, same_as=plain), 0)

    def depths(self) -> None:
        tokens = self.subject.tokens
        if not tokens:
            return self.leave_out("other numbers of proposed tokens", NEVER_SPECULATES)
        for proposed in sorted({1, min(2 * tokens + 1, DEEPEST), DEEPEST} - {tokens}):
            requests, plain = self.some(24)
            opened, completions = scenes.run(self.subject, Opening(proposed, 24), requests)
            self.scene(
                f"{proposed} proposed", Scene(completions, opened, "24 at a time", same_as=plain), proposed
            )

    def restless(self) -> None:
        """Changes the strategy at every step; by rejection the tokens would depend on it."""
        if not self.subject.tokens:
            return self.leave_out("restless strategies", NEVER_SPECULATES)
        if self.subject.rejects:
            why = "by rejection tokens depend on the strategy, and which one ran is not known outside"
            return self.leave_out("restless strategies", why)
        requests, plain = self.some(48)
        scene = scenes.restless(self.subject, self.subject.tokens, requests, plain)
        self.scene("restless strategies", scene, self.subject.tokens)

    def preempted(self) -> None:
        """Preempts requests on purpose, plain and speculating."""
        if not self.subject.takes_sizes:
            return self.leave_out("requests preempted on purpose", SETS_NO_SIZES)
        for proposed in sorted({0, min(1, self.subject.tokens)}):
            scene = scenes.preempted(self.subject, proposed, self.prompts, 12, self.plan.seed)
            self.scene(f"preempted, {proposed} proposed", scene, proposed)

    def chunks(self) -> None:
        if not self.subject.takes_sizes:
            return self.leave_out("prefill in small chunks", SETS_NO_SIZES)
        requests, plain = self.some(32)
        scene = scenes.small_chunks(self.subject, self.subject.tokens, requests, plain)
        self.scene("prefill in small chunks", scene, self.subject.tokens)

    def paused(self) -> None:
        requests, plain = self.siblings("paused")
        scene = scenes.paused(self.subject, self.subject.tokens, requests, plain)
        self.scene("paused and resumed", scene, self.subject.tokens)

    def aborted(self) -> None:
        requests, plain = self.siblings("aborted")
        scene = scenes.aborted(self.subject, self.subject.tokens, requests, plain)
        self.scene("some aborted", scene, self.subject.tokens)

    def continued(self) -> None:
        scene = scenes.continued(self.subject, self.subject.tokens, self.prompts, self.plan.seed)
        self.scene("continued in turns", scene, self.subject.tokens)

    def asleep(self) -> None:
        subject = self.subject
        scene = scenes.continued(subject, subject.tokens, self.prompts, self.plan.seed, turns=2, sleeps=True)
        self.scene("asleep in between", scene, subject.tokens)

    def weights(self) -> None:
        if not self.subject.takes_weights:
            return self.leave_out("new weights in between", "its weights are its own")
        requests = sibling_requests(self.prompts, 6, 8, self.plan.seed, "weights", self.plan.settings)
        scene = scenes.new_weights(self.subject, self.subject.tokens, requests)
        self.scene("new weights in between", scene, self.subject.tokens)

    def endings(self) -> None:
        """Ends responses by stop tokens, stop texts, the end token and max_tokens, anywhere in a step."""
        if self.subject.decode is None:
            self.leave_out("stop texts", "without a tokenizer there are none")
        requests = scenes.ending_requests(self.subject, list(self.plain.values()), 20, self.plan.seed)
        _, plain = scenes.run(self.subject, Opening(0, 48), requests)
        self.note(plain, [[Step(0)] * len(c.tokens) for c in plain], 0)
        opened, completions = scenes.run(self.subject, Opening(self.subject.tokens, 48), requests)
        reasons = [str(c.finish_reason) for c in completions]
        shown = f"{reasons.count('stop')} stops and {reasons.count('length')} limits"
        self.scene("stops and limits", Scene(completions, opened, shown, same_as=plain), self.subject.tokens)

    def limit(self) -> None:
        """Reaches the policy's last position."""
        longest = self.subject.policy.config.max_positions
        if longest > LONG_POSITIONS:
            why = f"{longest} tokens, more than the {LONG_POSITIONS} that are certified"
            return self.leave_out("the last position", why)
        requests = scenes.limit_requests(self.subject, self.prompts, self.plan.seed)
        _, plain = scenes.run(self.subject, Opening(0, 4), requests)
        opened, completions = scenes.run(self.subject, Opening(self.subject.tokens, 4), requests)
        self.scene(
            "the last position",
            Scene(completions, opened, f"{longest} tokens", same_as=plain),
            self.subject.tokens,
        )

    def long(self) -> None:
        """Asks behind thousands of tokens, up to the last position, and fills the cache in chunks."""
        subject = self.subject.with_positions(LONG_POSITIONS)
        if subject is None:
            return self.leave_out("long contexts", f"not certified with {LONG_POSITIONS} positions")
        requests = long_context_requests(subject.policy.config.vocab_size, self.plan.seed)
        _, plain = scenes.run(subject, Opening(0, 4), requests)
        own = copy.copy(self)  # the checks and the tally are the same
        own.subject = subject
        tolerance = self.judge.tolerance
        if not rounded_copies(subject):
            tolerance = max(tolerance, wide_tolerance(subject, plain))
        own.judge = Judge(subject, tolerance)
        own.note(plain, [[Step(0)] * len(c.tokens) for c in plain], 0)
        opened, completions = scenes.run(subject, Opening(subject.tokens, 16, prefill_tokens=700), requests)
        lengths = sorted({len(request.prompt) for request in requests})
        shown = f"prompts of {lengths[0]} to {lengths[-1]} tokens, 700 at a time"
        own.scene("long contexts", Scene(completions, opened, shown, same_as=plain), subject.tokens)
        self.completions = own.completions

    def drawn(self) -> None:
        """Draws at random what all other requests and engines have at listed values only."""
        subject = self.subject
        for round_ in range(self.plan.drawn):
            rng = random.Random(f"certify drawn {self.plan.seed} {round_}")
            longest = min(MOST_DRAWN, subject.policy.config.max_positions - DEEPEST)
            vocab_size, shortest = subject.policy.config.vocab_size, 1 + subject.rejects
            requests = drawn_requests(rng, self.prompts, vocab_size, DRAWN_REQUESTS, shortest, longest)
            _, plain = scenes.run(subject, Opening(0, rng.randint(1, 64)), requests)
            self.note(plain, [[Step(0)] * len(c.tokens) for c in plain], 0)
            opening = Opening(
                round(between(rng, 1, DEEPEST)) if subject.tokens else 0,
                max_running=rng.randint(2, 64),
                kv_tokens=rng.randint(2 * MOST_DRAWN, 12 * MOST_DRAWN),
                prefill_tokens=rng.randint(1, 200),
            )
            opened, completions = scenes.run(subject, opening, requests)
            shown = f"{opening.max_running} at a time"
            if subject.takes_sizes:
                shown += f", {opening.prefill_tokens} tokens of a prompt, {opening.kv_tokens} of the cache"
            name = f"drawn at random, {opening.tokens} proposed"
            self.scene(name, Scene(completions, opened, shown, same_as=plain), opening.tokens)

    def more(self, end: float) -> None:
        """Takes further samples until about `end`."""
        rounds = 0
        while True:
            began = time.perf_counter()
            rounds += 1
            requests = grid_requests(
                self.prompts, self.plan.settings, self.plan.samples, self.plan.tokens, self.plan.seed + rounds
            )
            opened, completions = scenes.run(
                self.subject, Opening(self.subject.tokens, MAX_RUNNING), requests
            )
            scene = Scene(completions, opened, "further seeds")
            self.scene(f"round {rounds} of further samples", scene, self.subject.tokens)
            if 2 * time.perf_counter() - began > end:
                return

    def conclude(self) -> None:
        subject = self.subject
        shown = f"{self.completions} completions"
        detail = (
            f"{len(self.problems)} problems in {shown}, the first: {self.problems[0]}"
            if self.problems
            else shown
        )
        self.checks.append(Check("ends, reasons, segments, lists", not self.problems, detail))
        if not subject.published_noise:
            return
        if not subject.perturbed:
            self.checks.append(self.tally.logprob_check(str(subject.policy.dtype).removeprefix("torch.")))
        self.checks += self.tally.setting_checks()
        if subject.tokens and self.exact:
            self.checks += self.tally.place_checks(subject.tokens)


def _bits(completion: Completion) -> tuple:
    """Returns what must be the same; an aborted response's reason is its own."""
    return completion.tokens, completion.logprobs
