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
from paceline.certify.subject import OpenedBackend, Policy
from paceline.config import SpeculationConfig
from paceline.drafting.base import Drafter
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.factory import DrafterFactory
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.factory import make_pacer
from paceline.engine.reference import ReferenceBackend
from paceline.engine.request_state import RequestState
from paceline.engine.sampling import Verify
from paceline.pacing.adaptive import AdaptivePacer
from paceline.pacing.strategy import Decision, FixedPacer, Moment, Observation, Pacer, Strategy
from paceline.policy.decoder import Decoder

# Noise on a disturbed copy's matrices, in their own standard deviations: its drafts are often accepted and
# often rejected.
DISTURBANCE = 0.2

# Tokens of an engine's KV pool.
KV_TOKENS = 65536

# A recipe's drafters.
DRAFTERS = ("history", "eagle", "draft_model")

# Makes a new drafter for each engine.
MakeDrafter = Callable[[], Drafter]


class NativeSubject:
    """The native engine in the policy's own type."""

    name = "native engine"
    perturbed: Sequence[Policy] = ()

    def __init__(
        self,
        policy: Decoder,
        exact_policy: Policy,
        drafters: Sequence[MakeDrafter],
        tokens: int,
        settings: EngineSettings,
        adaptive: bool = False,
    ) -> None:
        """Takes the `settings` that concern what is computed; only adaptive pacing uses several drafters."""
        self.policy = policy
        self.exact_policy = exact_policy
        self.settings = settings
        self.drafters = drafters
        self.tokens = tokens
        self.adaptive = adaptive
        self.same_in_any_batch = policy.device.type == "cpu" or settings.deterministic
        self.same_with_any_drafter = self.same_in_any_batch and settings.verify == Verify.SHARED_NOISE
        self.paced: list[OpenedBackend] = []

    def open(self, tokens: int, max_running: int) -> OpenedBackend:
        settings = replace(self.settings, max_running=max_running, kv_tokens=KV_TOKENS)
        drafters = [make() for make in self.drafters] if tokens else []
        engine = Engine(self.policy, settings, drafters=drafters)
        self._prepare(engine)
        opened = OpenedBackend(engine)
        if not tokens:
            return opened
        engine.pacer = _RecordingPacer(self._pacer(drafters, tokens, max_running), opened)
        self.paced.append(opened)

        def record(sequences: list[RequestState], lengths: np.ndarray, gained: np.ndarray) -> None:
            for sequence, length, new in zip(sequences, lengths.tolist(), gained.tolist(), strict=True):
                if new:
                    opened.step_starts.setdefault(sequence.request.id, []).append(length - new)

        engine.outcomes.observer = record
        return opened

    def _prepare(self, engine: Engine) -> None:
        """Does what an engine needs before its first request; for subclasses."""

    def _pacer(self, drafters: list[Drafter], tokens: int, max_running: int) -> Pacer:
        if self.adaptive:
            pacer = make_pacer(
                SpeculationConfig(pacing="adaptive", tokens=tokens),
                drafters,
                max_running,
                seed=0,
                shape=self.policy.config,
            )
            # A certificate ends before trials are due by their usual share, and it needs changes, not speed.
            strategies = tuple(replace(s, tree=self.settings.trees) for s in pacer.settings.strategies)
            changing = replace(pacer.settings, trial_share=1.0, catch_up={}, strategies=strategies)
            return AdaptivePacer(changing)
        return FixedPacer(Strategy(drafters[0].name, tokens, self.settings.trees), max_running)

    def own_checks(self) -> list[Check]:
        return [self._check_changes()] if self.adaptive and self.tokens else []

    def _check_changes(self) -> Check:
        """Checks that strategies changed at all: otherwise nothing has been shown about changes."""
        runs = [run for opened in self.paced for run in opened.strategies]
        steps = Counter(str(strategy) for run in runs for strategy in run)
        changes = sum(before != after for run in runs for before, after in pairwise(run))
        used = ", ".join(f"{name} {count}" for name, count in sorted(steps.items()))
        return Check("strategies change in mid-rollout", changes > 0, f"{changes} times; steps: {used}")


class _RecordingPacer:
    """Passes everything on to another pacer and records the strategies it chooses."""

    def __init__(self, pacer: Pacer, opened: OpenedBackend) -> None:
        self.pacer = pacer
        self.opened = opened

    def choose(self, moment: Moment) -> Decision:
        decision = self.pacer.choose(moment)
        self.opened.strategies[-1].append(decision.strategy)
        return decision

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
    perturbed: Sequence[Policy] = ()

    def __init__(self, policy: Decoder, exact_policy: Decoder) -> None:
        self.policy = policy
        self.exact_policy = exact_policy

    def open(self, tokens: int, max_running: int) -> OpenedBackend:
        return OpenedBackend(ReferenceBackend(self.policy, max_running))

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
        return lambda: DraftModel(model)
    if name not in DRAFTERS:
        raise ValueError(f"--drafter {name!r}: must be disturbed, {', '.join(DRAFTERS)}")
    return lambda: DrafterFactory(settings, tokenizer=tokenizer).make(name, policy)


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
