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
from paceline.certify.subject import Opened, Policy
from paceline.config import SpeculationConfig
from paceline.drafting.base import Drafter
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.factory import DrafterFactory
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.factory import make_pacer
from paceline.engine.reference import ReferenceBackend
from paceline.engine.sampling import Verify
from paceline.engine.sequence import Sequence as EngineSequence
from paceline.pacing.adaptive import AdaptivePacer
from paceline.pacing.strategy import Decision, FixedPacer, Moment, Observation, Pacer, Strategy
from paceline.policy.decoder import Decoder

DISTURBANCE = (
    0.2  # of a disturbed copy's matrices, in their own standard deviations: accepted often, rejected often
)
KV_TOKENS = 65536
DRAFTERS = ("history", "eagle", "draft_model")
MakeDrafter = Callable[[], Drafter]


class NativeSubject:
    name = "native engine"
    shaken: Sequence[Policy] = ()

    def __init__(
        self,
        policy: Decoder,
        exact_policy: Policy,
        drafters: Sequence[MakeDrafter],
        tokens: int,
        settings: EngineSettings,
        adaptive: bool = False,
    ) -> None:
        """`settings` as far as they concern what is computed. Only the adaptive pacer can use more than one
        drafter.
        """
        self.policy, self.exact_policy, self.settings = policy, exact_policy, settings
        self.drafters, self.tokens, self.adaptive = drafters, tokens, adaptive
        self.same_in_any_batch = policy.device.type == "cpu" or settings.deterministic
        self.same_with_any_drafter = self.same_in_any_batch and settings.verify == Verify.SHARED_NOISE
        self.paced: list[Opened] = []

    def open(self, tokens: int, max_running: int) -> Opened:
        settings = replace(self.settings, max_running=max_running, kv_tokens=KV_TOKENS)
        drafters = [make() for make in self.drafters] if tokens else []
        engine = Engine(self.policy, settings, drafters=drafters)
        self._prepare(engine)
        opened = Opened(engine)
        if not tokens:
            return opened
        engine.pacer = _NotingPacer(self._pacer(drafters, tokens, max_running), opened)
        self.paced.append(opened)

        def note(sequences: list[EngineSequence], lengths: np.ndarray, gained: np.ndarray) -> None:
            for sequence, length, new in zip(sequences, lengths.tolist(), gained.tolist(), strict=True):
                if new:
                    opened.step_starts.setdefault(sequence.request.id, []).append(length - new)

        engine.outcomes.observer = note
        return opened

    def _prepare(self, engine: Engine) -> None:
        """Whatever it needs before its first request."""

    def _pacer(self, drafters: list[Drafter], tokens: int, max_running: int) -> Pacer:
        if self.adaptive:
            pacer = make_pacer(
                SpeculationConfig(pacing="adaptive", tokens=tokens),
                drafters,
                max_running,
                seed=0,
                shape=self.policy.config,
            )
            # A certificate is over before a trial has been earned, and is after changes, not after speed.
            return AdaptivePacer(replace(pacer.settings, trial_share=1.0, catch_up={}))
        return FixedPacer(Strategy(drafters[0].name, tokens), max_running)

    def own_checks(self) -> list[Check]:
        return [self._check_changes()] if self.adaptive and self.tokens else []

    def _check_changes(self) -> Check:
        """A pacer that never changed its mind has shown nothing about changes."""
        runs = [run for opened in self.paced for run in opened.strategies]
        steps = Counter(str(strategy) for run in runs for strategy in run)
        changes = sum(before != after for run in runs for before, after in pairwise(run))
        used = ", ".join(f"{name} {count}" for name, count in sorted(steps.items()))
        return Check("strategies change in mid-rollout", changes > 0, f"{changes} times; steps: {used}")


class _NotingPacer:
    def __init__(self, pacer: Pacer, opened: Opened) -> None:
        self.pacer, self.opened = pacer, opened

    def choose(self, moment: Moment) -> Decision:
        decision = self.pacer.choose(moment)
        self.opened.strategies[-1].append(decision.strategy)
        return decision

    def observe(self, observation: Observation) -> None:
        self.pacer.observe(observation)

    def forget_times(self) -> None:
        self.pacer.forget_times()


class ReferenceSubject:
    """Never speculates; a check of the checks."""

    name, tokens, adaptive = "reference backend", 0, False
    same_in_any_batch = same_with_any_drafter = False
    shaken: Sequence[Policy] = ()

    def __init__(self, policy: Decoder, exact_policy: Decoder) -> None:
        self.policy, self.exact_policy = policy, exact_policy

    def open(self, tokens: int, max_running: int) -> Opened:
        return Opened(ReferenceBackend(self.policy, max_running))

    def own_checks(self) -> list[Check]:
        return []


def drafter_maker(
    name: str, policy: Decoder, settings: SpeculationConfig, tokenizer: Tokenizer | None = None
) -> MakeDrafter:
    """A recipe's drafter, or `disturbed`: the policy itself with noise on its weights, so that no drafter
    need be there.
    """
    if name == "disturbed":
        model = disturbed(policy)
        return lambda: DraftModel(model)
    if name not in DRAFTERS:
        raise ValueError(f"--drafter {name!r}: must be disturbed, {', '.join(DRAFTERS)}")
    return lambda: DrafterFactory(settings, tokenizer=tokenizer).make(name, policy)


def widest(policy: Decoder) -> Decoder:
    """The very same weights in double precision, in single on a GPU."""
    return copy.deepcopy(policy).to(torch.float64 if policy.device.type == "cpu" else torch.float32)


@torch.no_grad()
def disturbed(policy: Decoder, scale: float = DISTURBANCE) -> Decoder:
    generator = torch.Generator().manual_seed(0)
    other = copy.deepcopy(policy)
    for parameter in other.parameters():
        if parameter.ndim > 1:
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.add_(noise * parameter.std(), alpha=scale)
    return other
