"""The native engine and the reference backend as subjects."""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from tokenizers import Tokenizer

from paceline.certify.certificate import Check
from paceline.certify.subject import (
    LOGIT_TOLERANCE,
    OpenedBackend,
    Opening,
    Policy,
    Snapshot,
    with_positions,
)
from paceline.config import SpeculationConfig
from paceline.config.drafters import NATIVE
from paceline.drafting.base import Drafter
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.factory import make_drafter
from paceline.drafting.history import HistoryDrafter
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.factory import make_pacer
from paceline.engine.reference import ReferenceBackend
from paceline.engine.request_state import RequestState
from paceline.engine.sampling import Verify
from paceline.pacing.adaptive import AdaptivePacer
from paceline.pacing.strategy import (
    PLAIN,
    Decision,
    FixedPacer,
    Moment,
    Observation,
    Pacer,
    StepTime,
    Strategy,
)
from paceline.policy.decoder import Decoder

# Noise on a disturbed copy's matrices, in their own standard deviations: its drafts are often accepted and
# often rejected.
DISTURBANCE = 0.2

# Makes a new drafter for each engine, for the policy that it runs.
MakeDrafter = Callable[[Decoder], Drafter]


class NativeSubject:
    """The native engine in the policy's own type."""

    name = "native engine"
    perturbed: Sequence[Policy] = ()
    published_noise = True
    tempered_logprobs = True
    takes_sizes = True
    takes_weights = True

    def __init__(
        self,
        policy: Decoder,
        exact_policy: Policy,
        drafters: Sequence[MakeDrafter],
        tokens: int,
        settings: EngineSettings,
        adaptive: bool = False,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """Takes the `settings` that concern what is computed; only adaptive pacing uses several drafters."""
        self.policy = policy
        self.exact_policy = exact_policy
        self.settings = settings
        self.drafters = drafters
        self.tokens = tokens
        self.adaptive = adaptive
        self.tokenizer = tokenizer
        self.decode = tokenizer.decode if tokenizer is not None else None
        self.same_in_any_batch = policy.device.type == "cpu" or settings.deterministic
        self.rejects = settings.verify == Verify.REJECTION and tokens > 0
        self.same_with_any_drafter = self.same_in_any_batch and not self.rejects
        self.draft_policy = self._exact_draft_policy() if self.rejects else None
        self.exact_rejection = self.rejects and self._proposals_are_known()
        self.paced: list[OpenedBackend] = []

    def with_positions(self, positions: int) -> "NativeSubject | None":
        other = copy.copy(self)
        other.policy = with_positions(self.policy, positions)
        other.exact_policy = with_positions(self.exact_policy, positions)
        other.draft_policy = self.draft_policy and with_positions(self.draft_policy, positions)
        return other

    def _made_drafters(self) -> list[Drafter]:
        """Returns new drafters; a draft model gets the positions that the policy has."""
        made = [make(self.policy) for make in self.drafters]
        positions = self.policy.config.max_positions
        return [
            DraftModel(with_positions(drafter.policy, positions))
            if isinstance(drafter, DraftModel) and drafter.policy.config.max_positions < positions
            else drafter
            for drafter in made
        ]

    def _exact_draft_policy(self) -> Policy | None:
        """Returns what a draft model proposes from, where rounding does not hide which token that is."""
        if len(self.drafters) != 1 or self.policy.dtype not in LOGIT_TOLERANCE:
            return None
        (drafter,) = self._made_drafters()
        return widest(drafter.policy) if isinstance(drafter, DraftModel) else None

    def _proposals_are_known(self) -> bool:
        """Returns whether the oracle knows what was proposed, and from which distribution."""
        if self.draft_policy is not None:
            return True
        on_cpu = self.policy.device.type == "cpu" and self.policy.dtype in LOGIT_TOLERANCE
        return on_cpu and len(self.drafters) == 1 and not self._made_drafters()[0].has_probabilities

    def snapshot(self, policy: Decoder) -> Snapshot:
        wide = policy.dtype in LOGIT_TOLERANCE
        return Snapshot(widest(policy), () if wide else (copy.deepcopy(policy),))

    def open(self, opening: Opening) -> OpenedBackend:
        settings = replace(
            self.settings,
            max_running=opening.max_running,
            kv_tokens=opening.kv_tokens,
            prefill_tokens=opening.prefill_tokens,
        )
        drafters = self._made_drafters() if opening.tokens else []
        if opening.restless and not any(isinstance(drafter, HistoryDrafter) for drafter in drafters):
            drafters.append(HistoryDrafter())
        engine = Engine(self.policy, settings, self.tokenizer, drafters)
        self._prepare(engine)
        opened = OpenedBackend(engine, preemptions=lambda: engine.preemptions)
        if not opening.tokens:
            return opened
        engine.pacer = _RecordingPacer(self._pacer(drafters, opening), opened)
        if self.adaptive:
            self.paced.append(opened)
        # A CPU reads a step's outcome before it drafts again, so what it proposed is still there.
        reads_proposals = self.policy.device.type == "cpu"

        def record(sequences: list[RequestState], lengths: np.ndarray, gained: np.ndarray) -> None:
            for sequence, length, new in zip(sequences, lengths.tolist(), gained.tolist(), strict=True):
                if not new:
                    continue
                name, start = sequence.request.id, length - new
                opened.step_starts.setdefault(name, []).append(start)
                if reads_proposals and self.rejects and self.draft_policy is None:
                    proposed = engine.runner.proposals.tokens_SK[sequence.slot, : opening.tokens]
                    opened.proposals[name, start] = proposed.tolist()

        engine.outcomes.observer = record
        return opened

    def _prepare(self, engine: Engine) -> None:
        """Does what an engine needs before its first request; for subclasses."""

    def _pacer(self, drafters: list[Drafter], opening: Opening) -> Pacer:
        tokens = opening.tokens
        if opening.restless:
            counts = sorted({1, tokens})
            tree = self.settings.trees
            return RestlessPacer(
                [Strategy(d.name, min(n, d.max_tokens), tree) for d in drafters for n in counts]
            )
        if self.adaptive:
            pacer = make_pacer(
                SpeculationConfig(
                    pacing="adaptive", tokens=tokens, drafters=["history"], verify=self.settings.verify
                ),
                drafters,
                opening.max_running,
                seed=0,
                shape=self.policy.config,
            )
            # A certificate ends before trials are due by their usual share, and it needs changes, not speed.
            strategies = tuple(replace(s, tree=self.settings.trees) for s in pacer.settings.strategies)
            changing = replace(pacer.settings, trial_share=1.0, catch_up={}, strategies=strategies)
            return AdaptivePacer(changing)
        return FixedPacer(Strategy(drafters[0].name, tokens, self.settings.trees), opening.max_running)

    def own_checks(self) -> list[Check]:
        return [self._check_changes()] if self.adaptive and self.tokens else []

    def _check_changes(self) -> Check:
        """Checks that strategies changed at all: otherwise nothing has been shown about changes."""
        runs = [run for opened in self.paced for run in opened.strategies]
        steps = Counter(str(strategy) for run in runs for strategy in run)
        changes = sum(before != after for run in runs for before, after in pairwise(run))
        used = ", ".join(f"{name} {count}" for name, count in sorted(steps.items()))
        return Check("strategies change in mid-rollout", changes > 0, f"{changes} times; steps: {used}")


class RestlessPacer(FixedPacer):
    """A pacer that takes another strategy at every step, plain decoding among them."""

    def __init__(self, strategies: Sequence[Strategy]) -> None:
        super().__init__(PLAIN)
        self.strategies = [PLAIN, *strategies]
        self.steps = 0

    def choose(self, moment: Moment) -> Decision:
        self.steps += 1
        return Decision(self.strategies[self.steps % len(self.strategies)], moment.running, moment.context)


class _RecordingPacer:
    """Passes everything on to another pacer and records the strategies it chooses."""

    def __init__(self, pacer: Pacer, opened: OpenedBackend) -> None:
        self.pacer = pacer
        self.opened = opened

    def choose(self, moment: Moment) -> Decision:
        decision = self.pacer.choose(moment)
        self.opened.strategies[-1].append(decision.strategy)
        return decision

    def untimed(self) -> Sequence[Strategy]:
        return self.pacer.untimed()

    def take_times(self, times: Sequence[StepTime]) -> None:
        self.pacer.take_times(times)

    def observe(self, observation: Observation) -> None:
        self.pacer.observe(observation)

    def forget_times(self) -> None:
        self.pacer.forget_times()


class ReferenceSubject:
    """The reference backend, which never speculates; it shows that the checks pass what is right."""

    name = "reference backend"
    tokens = 0
    adaptive = False
    same_in_any_batch = False
    same_with_any_drafter = False
    published_noise = True
    tempered_logprobs = True
    takes_sizes = False
    takes_weights = True
    rejects = False
    exact_rejection = False
    perturbed: Sequence[Policy] = ()
    draft_policy: Policy | None = None

    def __init__(self, policy: Decoder, exact_policy: Decoder, tokenizer: Tokenizer | None = None) -> None:
        self.policy = policy
        self.exact_policy = exact_policy
        self.tokenizer = tokenizer
        self.decode = tokenizer.decode if tokenizer is not None else None

    def snapshot(self, policy: Decoder) -> Snapshot:
        return Snapshot(widest(policy))

    def with_positions(self, positions: int) -> "ReferenceSubject":
        policies = (with_positions(policy, positions) for policy in (self.policy, self.exact_policy))
        return ReferenceSubject(*policies, self.tokenizer)

    def open(self, opening: Opening) -> OpenedBackend:
        return OpenedBackend(ReferenceBackend(self.policy, opening.max_running, self.tokenizer))

    def own_checks(self) -> list[Check]:
        return []


def drafter_maker(
    name: str, policy: Decoder, settings: SpeculationConfig, tokenizer: Tokenizer | None = None
) -> MakeDrafter:
    """Returns a maker of a recipe's drafter, or of `disturbed`: the policy itself with noisy weights.

    The latter needs no trained drafter.
    """
    if name == "disturbed":
        model = disturbed(policy)
        return lambda _: DraftModel(model)
    if name not in NATIVE:
        raise ValueError(f"--drafter {name!r}: must be disturbed, {', '.join(NATIVE)}")
    return lambda own: make_drafter(name, settings, own, tokenizer)


def widest(policy: Decoder) -> Decoder:
    """Returns the same weights in double precision, in single precision on a GPU."""
    return copy.deepcopy(policy).to(torch.float64 if policy.device.type == "cpu" else torch.float32)


@torch.no_grad()
def disturbed(policy: Decoder, scale: float = DISTURBANCE) -> Decoder:
    """Returns a copy of the policy with noise of `scale` standard deviations on its matrices."""
    generator = torch.Generator().manual_seed(0)
    other = copy.deepcopy(policy)
    for parameter in other.parameters():
        if parameter.ndim > 1:
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.add_(noise * parameter.std(), alpha=scale)
    return other
