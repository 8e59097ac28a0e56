"""The native engine and the reference backend as subjects."""

import copy
from collections.abc import Callable

import numpy as np
import torch

from paceline.backends.drafters import make_drafter
from paceline.backends.reference import ReferenceBackend
from paceline.certify.subject import Opened
from paceline.config import SpeculationConfig
from paceline.drafting.base import Drafter
from paceline.drafting.draft_model import DraftModel
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.sampling import Verify
from paceline.engine.sequence import Sequence
from paceline.pacing.strategy import FixedPacer, Strategy
from paceline.policy.decoder import Decoder

DISTURBANCE = 0.2  # of a disturbed copy's matrices, in their own standard deviations: accepted often, rejected often
KV_TOKENS = 65536
DRAFTERS = ("history", "eagle", "draft_model")


class NativeSubject:
    def __init__(
        self, policy: Decoder, exact_policy: Decoder, make_drafter: Callable[[], Drafter], tokens: int, verify: str, deterministic: bool = False
    ) -> None:
        self.policy, self.exact_policy = policy, exact_policy
        self.make_drafter = make_drafter
        self.tokens, self.verify, self.deterministic = tokens, verify, deterministic
        self.name = "native engine"
        self.same_in_any_batch = policy.device.type == "cpu" or deterministic
        self.same_with_any_drafter = self.same_in_any_batch and verify == Verify.SHARED_NOISE

    def open(self, tokens: int, max_running: int) -> Opened:
        settings = EngineSettings(max_running=max_running, kv_tokens=KV_TOKENS, deterministic=self.deterministic, verify=self.verify)
        if not tokens:
            return Opened(Engine(self.policy, settings))
        drafter = self.make_drafter()
        engine = Engine(self.policy, settings, drafters=[drafter], pacer=FixedPacer(Strategy(drafter.name, tokens), max_running))
        opened = Opened(engine)

        def note(sequences: list[Sequence], lengths: np.ndarray, gained: np.ndarray) -> None:
            for sequence, length, new in zip(sequences, lengths.tolist(), gained.tolist(), strict=True):
                if new:
                    opened.step_starts.setdefault(sequence.request.id, []).append(length - new)

        engine.outcomes.observer = note
        return opened


class ReferenceSubject:
    """Never speculates; a check of the checks."""

    def __init__(self, policy: Decoder, exact_policy: Decoder) -> None:
        self.policy, self.exact_policy = policy, exact_policy
        self.name, self.tokens = "reference backend", 0
        self.same_in_any_batch = self.same_with_any_drafter = False

    def open(self, tokens: int, max_running: int) -> Opened:
        return Opened(ReferenceBackend(self.policy, max_running))


def drafter_maker(name: str, policy: Decoder, settings: SpeculationConfig) -> Callable[[], Drafter]:
    """A recipe's drafter, or `disturbed`: the policy itself with noise on its weights, so that no drafter need be there."""
    if name == "disturbed":
        model = disturbed(policy)
        return lambda: DraftModel(model)
    if name not in DRAFTERS:
        raise ValueError(f"--drafter {name!r}: must be disturbed, {', '.join(DRAFTERS)}")
    return lambda: make_drafter(name, policy, settings)


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
