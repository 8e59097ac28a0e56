"""Certifying under the adaptive pacer: strategies change in mid-rollout and nothing else does."""

import pytest
import torch

from paceline.certify.certificate import Certificate
from paceline.certify.native import NativeSubject, disturbed
from paceline.certify.plan import Plan
from paceline.certify.run import certify
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.history import HistoryDrafter
from paceline.engine import sampling
from paceline.engine.settings import EngineSettings
from paceline.pacing.adaptive import AdaptivePacer
from paceline.pacing.strategy import PLAIN, Decision, Strategy
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder

PROMPTS = [(3, 4, 5), (9, 2, 7, 1), (11, 12)]
PLAN = Plan(samples=2, tokens=10, scenes=(), frequencies=None)


@pytest.fixture(scope="module")
def policies() -> tuple[Decoder, Decoder]:
    policy = Decoder(DecoderConfig("llama", 24, 32, 48, 1, 2, 1, 16, 512, eos_token_ids=(0,))).initialise(0)
    policy.head.weight.data.mul_(14)
    exact = Decoder(policy.config, torch.float64)
    exact.load_state_dict(policy.state_dict())
    return policy, exact


@pytest.fixture(autouse=True)
def restless(monkeypatch):
    """Which strategy is fastest depends on the machine: here each decision stands for three steps."""

    def choose(self, moment):
        every = [PLAIN, *self.settings.strategies]
        self.steps += 1
        return Decision(every[self.steps // 3 % len(every)], moment.running, moment.context)

    monkeypatch.setattr(AdaptivePacer, "choose", choose)


def run(policies, plan: Plan = PLAN, **settings) -> Certificate:
    model = disturbed(policies[0], 0.4)
    makers = [lambda _: DraftModel(model), lambda _: HistoryDrafter()]
    return certify(
        NativeSubject(*policies, makers, 2, EngineSettings(**settings), adaptive=True), PROMPTS, plan, {}
    )


def find(certificate: Certificate, name: str):
    return [check for check in certificate.checks if name in check.name]


def test_engine_passes_while_strategies_change(policies):
    certificate = run(policies)
    assert certificate.passed, certificate.table()
    (changes,) = find(certificate, "strategies change")
    assert changes.passed and all(
        name in changes.detail for name in ("plain", "draft_model:1", "draft_model:2", "history:2")
    )
    assert len(find(certificate, " proposed")) == 2 and find(certificate, "after 1 accepted")


@pytest.mark.slow
def test_engine_that_depends_on_the_strategy_is_caught(policies, monkeypatch):
    """Steps that verify sample with other noise than plain ones: the right distribution, other tokens."""
    sound = sampling.sample

    def other_noise(logits, temperature, seed, position):
        wide = len(seed) > 1 and bool((seed[1:] == seed[:-1]).any())  # several queries of one row
        return sound(logits, temperature, seed + wide, position)

    monkeypatch.setattr(sampling, "sample", other_noise)
    certificate = run(policies)
    assert any(not check.passed for check in find(certificate, "2 proposed")), certificate.table()


def test_pacer_that_never_changes_fails_the_check_of_changes(policies, monkeypatch):
    monkeypatch.setattr(
        AdaptivePacer,
        "choose",
        lambda self, moment: Decision(Strategy("draft_model", 1), moment.running, moment.context),
    )
    certificate = run(policies)
    assert not certificate.passed and [
        check.name for check in certificate.checks if check.passed is False
    ] == ["strategies change in mid-rollout"]
