"""An eagle head that follows the policy while it learns.

    learner's forward ──states──┐                                    ┌── while rewards are computed
    engine's steps ────states───┼──▶ buffer ──▶ slices of learning ◀─┼── after the update, within a budget
    rollout ──the longest texts─┘                     │              └── `work`: other idle time
                                      own copy of the head ──mean of the newest──publish──▶ engine

States come from passes that happen anyway; texts that no pass left any for are run once more. Under shared
noise nothing of it can change a completion, gradients end at the head, and the engine's head is written by
`publish_drafter` alone. `when.py` decides when it learns, `slices.py` how, `publishing.py` what is published.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from paceline.config import Config, ConfigError, OnlineDrafterConfig
from paceline.drafting.averaging import WeightAverage
from paceline.drafting.eagle_head import EagleHead
from paceline.drafting.examples import Example, ExampleBuffer, host_bytes, passages
from paceline.drafting.follower import HeadFollower
from paceline.drafting.judging import HeadJudge
from paceline.drafting.learning_time import LearningTime
from paceline.drafting.publishing import UNANSWERED, Drafting, Probation, restore
from paceline.drafting.slices import SlicedLearning
from paceline.drafting.step_texts import StepTexts
from paceline.drafting.training import HeadStep, HeadTrainer, HeadTraining
from paceline.drafting.when import DriftMonitor
from paceline.policy.decoder import Decoder
from paceline.policy.states import TextStates
from paceline.types import Group

# Where time is short, one update's tokens by this are enough to learn from, if no others have states: making
# them costs a pass through the whole policy.
ENOUGH = 4


class OnlineDrafter(HeadFollower):
    """Trains a copy of the drafting head during a run, and publishes it."""

    def __init__(
        self,
        policy: Decoder,
        head: EagleHead,
        config: OnlineDrafterConfig,
        seed: int,
        warn: Callable[[str], None],
        drafting: Drafting | None = None,
        warmup: int = 0,
    ) -> None:
        """`warmup`: updates over which the learning rate rises; there may be one a step."""
        super().__init__(policy, head, config, warn, drafting)
        self.seed = seed
        training = HeadTraining(
            lr=config.lr,
            schedule="constant",
            unroll=config.unroll,
            batch_sequences=config.batch,
            warmup=warmup,
        )
        self.trainer = HeadTrainer(policy, self.head, training)
        self.average = WeightAverage(self.trainer.optimiser.masters())
        self.learning = SlicedLearning(policy, self.trainer, config.batch)
        self.buffer = ExampleBuffer(int(config.buffer_gb * 1e9))
        self.judge = HeadJudge(policy, self.learning, self.buffer)
        self.texts = StepTexts(policy, self.head.config.captured_layers, self.buffer, config, warn)
        self.time = LearningTime(config, warn)
        self._reports: list[HeadStep] = []
        self._learned_tokens = 0
        self._told_not_finite = False
        self.tells = config.is_asked_for  # whether it warns that it has no time to learn
        self._tokens = self._tokens_of(learned=0)

    # -- the order of a step ----------------------------------------------------------------------

    def expect(self, groups: Sequence[Group]) -> None:
        """Chooses the texts to learn from, and requests their states from the learner's pass."""
        self.texts.choose(groups, self._tokens, with_states=self._uses_states)

    @property
    def _uses_states(self) -> bool:
        """Whether this step's states are learned from, or used to judge a new head."""
        is_new = self.publisher.watches or self.probation.is_due(self.average.updates)
        return is_new or (self.due and self.time.learns_now)

    @property
    def wants_states(self) -> bool:
        """Whether the engine is to record states; where time is short, only if the learner leaves too few."""
        return self._uses_states and (self.config.when != "auto" or self.texts.are_passed_over)

    def charge(self, seconds: float) -> None:
        self.time.charge(seconds, owed=self.due)

    def note_wait(self, seconds: float) -> None:
        self.time.note_wait(seconds)

    @property
    def needs_memory(self) -> bool:
        learns = self.due and self.time.learns_now
        return learns or self.publisher.suspect or self.probation.is_due(self.average.updates)

    def follow(
        self, step: int, recorded: Mapping[tuple[int, ...], TextStates], step_seconds: float = 0.0
    ) -> dict[str, float]:
        """Adds the step's texts to the buffer and lets the head learn if it is due; returns metrics.

        `recorded` are states that the engine kept, for texts that the learner skipped; `step_seconds` is
        what the step took so far.
        """
        owes = self.due or self._uses_states
        copying, pinning = self.texts.tap.take_seconds()
        self.time.charge(copying, owed=owes)
        self.time.charge_apart(pinning)
        began, counted = time.perf_counter(), self.time.displaced
        asked = self.texts.want_states
        examples = self.texts.take_in(step, recorded)
        with_states = sum(example.states is not None for example in examples)
        self.time.begin(step_seconds)
        proven = self.probation.proven
        if self.publisher.settle(step, self._judge):
            self._restart()
        else:
            self._prove()  # by texts that it has not learned from
            if self.due:
                self._learn_in_turn(step)
        self.buffer.shrink()
        if self.probation.proven and (self._reports or not proven):
            self.publish(step)
        if self.time.learns_now:
            self._tokens = self._tokens_of(self._learned_tokens)
        # Slices and comparisons have counted themselves.
        self.time.charge(time.perf_counter() - began - (self.time.displaced - counted), owed=owes)
        self.time.look_ahead(used_states=asked)
        return self.take_metrics() | {
            "drafter/texts": float(len(examples)),
            "drafter/texts_with_states": float(with_states),
        }

    def _learn_in_turn(self, step: int) -> None:
        """Learns after the policy's update: all that is planned, or as much as the budget has time for."""
        # What slices take may be known from an earlier trial.
        if self.time.learns_now and not self._is_out_of_reach:
            enough = self._update_tokens // ENOUGH if self.time.limited else None
            self.plan(str(step), self.buffer.offered(self._tokens, enough), self._tokens)
            if not self.time.saving:  # else idle time has work
                for _ in self.slices(lambda: not self.time.allows_slice, idle=False):
                    pass
        if self._is_out_of_reach:
            if self.tells:
                self.time.reach.tell()
            self._rest()

    def _prove(self) -> None:
        """Decides whether what was learned may draft; a head that does not become good enough is dropped."""
        updates, drafting = self.average.updates, self.publisher.current.weights
        if self.probation.passes(updates, self.average.mean, drafting, self._judge) or not updates:
            return
        if self.config.when != "always" and self.probation.is_hopeless(updates):
            self._rest()
        if not self.due:
            restore(self.head, drafting)
            self._restart()

    @property
    def _is_out_of_reach(self) -> bool:
        """Whether no update would come about in steps like this one.

        Idle time comes on top, so where there was any the answer is no.
        """
        if self._reports or self.time.idle:
            return False
        return self.time.is_out_of_reach(max(1.0, self._update_tokens / self.learning.slice_rows))

    @property
    def _update_tokens(self) -> int:
        """Response tokens of an update, of full passages."""
        return self.config.batch * self.learning.passage_rows

    def _rest(self) -> None:
        """Stops learning until acceptance has drifted from what it is now."""
        self.learning.abandon()
        self.auto.rest()
        self.drift = DriftMonitor()
        self.due = False

    def _tokens_of(self, learned: int) -> int:
        """Returns how many response tokens the next step is to offer, after one that learned from so many.

        States cost copies, so `auto`, whose time may be short, asks for twice what it learned from, and for
        at least one optimiser step.
        """
        if self.config.when != "auto":
            return self.config.tokens
        return min(self.config.tokens, max(2 * learned, self._update_tokens))

    @property
    def has_work(self) -> bool:
        """Whether idle time would be used."""
        return self.config.when == "auto" and self.due and bool(self.learning.work)

    def work(self, should_stop: Callable[[], bool]) -> Iterator[None]:
        """Learns in idle time: yields after each slice, ends when no slice or no time is left.

        `should_stop` is called before every slice, which takes milliseconds on a GPU.
        """
        if not self.has_work:
            return
        for _ in self.slices(should_stop, idle=True):
            yield

    def learn_while(self, waiting: Callable[[], bool]) -> None:
        """Learns as long as `waiting` returns True; a slice that outlasts it counts as displacing others."""
        for _ in self.work(lambda: not (waiting() and self.time.allows_idle_slice)):
            if not waiting():
                self.time.outlasted()

    # -- learning ---------------------------------------------------------------------------------

    def plan(self, order: str, examples: Sequence[Example], tokens: int) -> None:
        """Plans work of so many response tokens: passages of these texts, in an order of their own."""
        chosen = [p for e in examples for p in passages(e, self.learning.passage_rows)]
        random.Random(f"{self.seed}/{order}").shuffle(chosen)
        kept = []
        for passage in chosen:  # one text alone may be longer than what a step learns from
            if tokens <= 0:
                break
            kept.append(passage)
            tokens -= passage.stop - passage.start
        self.learning.plan(kept)

    def slices(self, should_stop: Callable[[], bool], idle: bool) -> Iterator[HeadStep | None]:
        """Does the planned work slice by slice; yields what an optimiser step saw after the one that made it.

        `idle`: in idle time. Out of memory, the rest is dropped.
        """
        out_of_memory = False
        slices = self.learning.slices(should_stop)
        while True:
            start, rebuilt = time.perf_counter(), self.learning.rebuilt
            try:
                report = next(slices, self)
            except torch.OutOfMemoryError:
                out_of_memory = True
                break
            if report is self:
                break
            seconds = time.perf_counter() - start
            self.time.note_slice(seconds, idle, through_head=rebuilt == self.learning.rebuilt)
            if report is not None:
                self._note_update(report)
            yield report
        if out_of_memory:
            # Not where the error is caught: the traceback keeps the tensors that must be released alive.
            self._halve_budget()

    def _note_update(self, report: HeadStep) -> None:
        if not math.isfinite(report.grad_norm):
            self._go_back()
            return
        self._reports.append(report)
        self.average.update(self.trainer.optimiser.masters())
        self._learned_tokens += int(report.tokens)
        if self.config.when == "auto":
            self.auto.note_update(report.mean_overlap)
            if not self.auto.learning:
                self._rest()

    def _go_back(self) -> None:
        """Restores the head that drafts: gradients are not finite, and later ones would not be either."""
        self.learning.abandon()
        restore(self.head, self.publisher.current.weights)
        self._restart()
        if not self._told_not_finite:
            self._told_not_finite = True
            self.warn(
                "the eagle head's gradients are not finite: it continues from the version that drafts; lower "
                f"rollout.speculation.online.lr = {self.config.lr:g}"
            )

    def _halve_budget(self) -> None:
        """A drafter that learns less costs time; a run that ends costs everything."""
        self.learning.abandon()
        torch.cuda.empty_cache()
        self.learning.token_budget //= 2
        self.learning.slice_rows = max(1, self.learning.slice_rows // 2)
        self.warn(
            "no memory for the eagle head to learn in: the rest of this step is left out, from now on "
            f"{self.learning.slice_rows} tokens at a time"
        )

    def _judge(self, weights: Mapping[str, torch.Tensor]) -> float | None:
        """Returns how well a head of these weights drafts, at the expense of the time to learn in.

        None where no text can be judged by, or there is no memory for it.
        """
        began = time.perf_counter()
        overlap, out_of_memory = None, False
        unanswered = max(self.probation.unanswered, self.publisher.unanswered)
        makes_states = unanswered >= UNANSWERED - 1 and not self.time.limited
        try:
            overlap = self.judge.quality_of(self.head, weights, makes_states=makes_states)
        except torch.OutOfMemoryError:
            out_of_memory = True
        if out_of_memory and makes_states:  # else no text could ever be judged by
            self._halve_budget()
        self.time.charge_apart(time.perf_counter() - began)
        return overlap

    def take_metrics(self) -> dict[str, float]:
        """Returns what learning did since the last call, and resets the counters."""
        reports, self._reports = self._reports, []
        tokens, self._learned_tokens = self._learned_tokens, 0
        rebuilt, self.learning.rebuilt = self.learning.rebuilt, 0
        metrics = {
            "drafter/updates": float(len(reports)),
            "drafter/version": float(self.publisher.current.version),
            "drafter/rollbacks": float(self.publisher.rollbacks),
            "drafter/rebuilt": float(rebuilt),
            "memory/drafter_buffer_gb": host_bytes([*self.buffer, *self.learning.examples]) / 1e9,
            **self.time.take_metrics(),
        }
        if reports:
            metrics |= {
                "drafter/tokens": float(tokens),
                "drafter/kl": statistics.mean(report.divergence[0] for report in reports),
                "drafter/overlap": statistics.mean(report.overlap[0] for report in reports),
                "drafter/mean_overlap": statistics.mean(report.mean_overlap for report in reports),
                "drafter/grad_norm": statistics.mean(report.grad_norm for report in reports),
            }
        return metrics

    def take_head(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Replaces the head by these weights, with a new optimiser, and publishes them."""
        restore(self.head, weights)
        self._restart()
        self.publish(version)

    def _restart(self) -> None:
        self.trainer.restart()
        self.average.restart(self.trainer.optimiser.masters())
        self.probation = Probation()
        self.auto.restart()

    @property
    def has_learned(self) -> bool:
        return self.average.updates > 0 or super().has_learned

    def learned_weights(self) -> dict[str, torch.Tensor]:
        """Returns the mean of the newest weights in the head's type, where the head is."""
        dtype = self.head.fc.weight.dtype
        return {name: mean.to(dtype, copy=True) for name, mean in self.average.mean.items()}

    def weights(self) -> dict[str, torch.Tensor]:
        device = self.head.fc.weight.device
        if device.type == "meta":
            return {}
        if self.probation.proven:
            return {name: tensor.to("cpu", copy=True) for name, tensor in self.learned_weights().items()}
        if device.type == "cuda":  # what was published is complete then
            torch.cuda.current_stream(device).synchronize()
        return dict(self.publisher.current.weights)


def make_online(
    policy: Decoder,
    head: nn.Module | None,
    config: Config,
    warn: Callable[[str], None],
    drafting: Drafting | None = None,
) -> OnlineDrafter | None:
    """Returns the trainer of a copy of `head`, the one that drafts; None where the recipe asks for none.

    `drafting` receives the trained head. `auto` lets a head learn where there is one.
    """
    speculation = config.rollout.speculation
    if not config.rollout.head_may_learn or (head is None and speculation.online.when == "auto"):
        return None
    if head is None:
        raise ConfigError(
            f"rollout.speculation.online.when = {speculation.online.when!r}: no eagle head drafts for this "
            f"policy (rollout.speculation.eagle_path = {speculation.eagle_path!r}); make one with "
            "`paceline drafter train` and name its folder there"
        )
    drafter = OnlineDrafter(policy, head, speculation.online, config.run.seed, warn, drafting)
    drafter.tells = speculation.asks_to_learn
    return drafter
