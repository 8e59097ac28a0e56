"""Acceptance measured in one pass equals what drafting token by token finds, and the shipped head is as good
as promised.
"""

import itertools
import random

import pytest
import torch

from paceline.config import load_config
from paceline.drafting.acceptance import Acceptance, accepted, measure_acceptance, walk
from paceline.drafting.eagle import EagleDrafter
from paceline.drafting.eagle_folder import BUILTIN_EAGLE, load_eagle
from paceline.drafting.eagle_head import EagleHead, config_for
from paceline.drafting.training import HeadTraining, train_offline
from paceline.engine.engine import Engine, EngineSettings
from paceline.kernels.noise import gumbel
from paceline.learning.batch import training_sequence
from paceline.pacing.strategy import FixedPacer, Strategy
from paceline.policy.decoder import Decoder
from paceline.rollout.responses import held_out_responses, training_responses
from paceline.session import Session, open_session
from paceline.types import Completion, FinishReason, Request, SamplingParams, Segment
from tests.drafting.eagle_oracle import Draft, policy_states

DEPTH = 5


@pytest.fixture(scope="module")
def session():
    session = open_session(load_config("default", ["run.device=cpu", "rollout.max_running=32"]))
    yield session
    session.close()


@pytest.fixture(scope="module")
def shipped(session) -> EagleHead:
    return load_eagle(BUILTIN_EAGLE, session.policy, torch.float32)


def follow(policy: Decoder, head: EagleHead, completion: Completion, known: int) -> Acceptance:
    """Generates the response again, drafting token by token; the draft continues with its own tokens."""
    request = completion.request
    text, temperature = [*request.prompt, *completion.tokens], request.sampling.temperature
    _, states = policy_states(policy, text, head.config.captured_layers)
    found = Acceptance.nothing(DEPTH)
    place = len(request.prompt) + known
    while place < len(text):
        draft = Draft(policy, head, states, text, place - 2)
        right = 0
        for step in range(DEPTH):
            scores = draft.logits()
            if temperature:
                noise = gumbel(
                    torch.tensor(request.seed), torch.tensor(place + step), policy.config.vocab_size
                )
                scores = scores / temperature + noise[head.draft_to_target]
            token = int(head.draft_to_target[scores.argmax()])
            if place + step >= len(text) or token != text[place + step]:
                break
            right += 1
            found.accepted_at[step] += 1
            draft.step(token)
        found.steps += 1
        emitted = min(right + 1, len(text) - place)
        found.tokens += emitted
        place += emitted
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "temperature, known",
    [(0.0, 0), (1.0, 1), (1.0, 0), (0.7, 0)],
)
def test_acceptance_in_one_pass_equals_drafting_token_by_token(session: Session, shipped, temperature, known):
    completions = held_out_responses(session.sampler, session.config, 3, temperature)
    measured = measure_acceptance(session.policy, shipped, completions, DEPTH, known).shared_noise
    with torch.no_grad():
        parts = [follow(session.policy, shipped, completion, known) for completion in completions]
    assert measured.tokens == sum(part.tokens for part in parts) and measured.steps == sum(
        part.steps for part in parts
    )
    assert measured.accepted_at == [sum(part.accepted_at[i] for part in parts) for i in range(DEPTH)]
    assert measured.accepted_at[1] > 0


@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.slow), 0.0])
def test_acceptance_in_one_pass_equals_a_rollout(session: Session, shipped, temperature):
    """The engine with this drafter takes as many steps as the walk says."""
    completions = held_out_responses(session.sampler, session.config, 24, temperature)
    measured = measure_acceptance(session.policy, shipped, completions, DEPTH).shared_noise
    settings = EngineSettings(max_running=8, kv_tokens=4096)
    engine = Engine(
        session.policy,
        settings,
        drafters=[EagleDrafter(shipped)],
        pacer=FixedPacer(Strategy("eagle", DEPTH), 1000),
    )
    engine.submit([completion.request for completion in completions])
    assert {done.request.id: done.tokens for done in engine.completions()} == {
        c.request.id: c.tokens for c in completions
    }
    drafts = engine.take_stats().drafts["eagle"]
    assert drafts.drafts == pytest.approx(measured.steps, rel=0.01), "a score may round differently, no more"
    assert drafts.accept_length == pytest.approx(measured.accept_length, rel=0.01)


def test_acceptance_under_rejection_is_the_overlap(session: Session):
    """Summed over the policy's distribution, the chance is the overlap 1 - TV (Leviathan et al. 2023,
    corollary 3.6).
    """
    head = EagleHead(config_for(session.policy.config, draft_vocab=30))
    head.draft_to_target.copy_(torch.arange(10, 40))
    generator = torch.Generator().manual_seed(0)
    logits_V, draft_D = torch.randn(48, generator=generator) * 2, torch.randn(30, generator=generator) * 2
    temperature_R, every_R = torch.full((48,), 0.8), torch.arange(48)
    _, chance_R = accepted(
        head, logits_V.expand(48, -1), draft_D.expand(48, -1), every_R, temperature_R, torch.zeros(48, 30)
    )
    p_V, q_V = (
        (logits_V / 0.8).softmax(0),
        torch.zeros(48).index_copy(0, head.draft_to_target, (draft_D / 0.8).softmax(0)),
    )
    assert float((p_V * chance_R).sum()) == pytest.approx(float(torch.minimum(p_V, q_V).sum()), abs=1e-6)
    assert chance_R[:10].sum() == 0 == chance_R[40:].sum(), "a token that cannot be drafted is not accepted"


def test_walk_is_the_mean_over_all_outcomes():
    """Every pattern of accepted and rejected tokens, weighted by its chance, played out literally."""
    rng = random.Random(0)
    count, depth, known = 5, 3, 1
    chances = [
        [rng.random() if start + step < count else 0.0 for step in range(depth)] for start in range(count)
    ]
    total = Acceptance.nothing(depth)
    walk(chances, known, total)
    cells = [(start, step) for start in range(count) for step in range(depth) if start + step < count]
    expected = Acceptance.nothing(depth)
    for outcome in itertools.product((0, 1), repeat=len(cells)):
        right = dict(zip(cells, outcome, strict=True))
        weight = 1.0
        for (start, step), value in right.items():
            weight *= chances[start][step] if value else 1 - chances[start][step]
        place = known
        while place < count:
            run = next((step for step in range(depth) if not right.get((place, step))), depth)
            for step in range(run):
                expected.accepted_at[step] += weight
            for step in range(min(run + 1, depth, count - place)):
                expected.tried_at[step] += weight
            expected.steps += weight
            place += run + 1
    assert total.steps == pytest.approx(expected.steps) and total.accepted_at == pytest.approx(
        expected.accepted_at
    )
    assert total.tokens == count - known and total.tried_at == pytest.approx(expected.tried_at)
    assert total.rate_at(1) == pytest.approx(expected.accepted_at[1] / expected.tried_at[1])
    walk([[0.5]], 1, total)  # nothing is left to generate
    assert total.tokens == count - known and total.steps == pytest.approx(expected.steps)


def test_measure_acceptance_of_the_shortest_texts(session: Session):
    """A response without entries before its first token, and one token long: nothing to draft, nothing to
    fail.
    """
    head = EagleHead(config_for(session.policy.config)).initialise(session.policy, 0)
    request = Request("r", (5,), 1, SamplingParams())
    completion = Completion(request, (7,), (0.0,), FinishReason.LENGTH, (Segment(0, 1, 0),))
    measured = measure_acceptance(session.policy, head, [completion], DEPTH)
    assert (
        measured.shared_noise.tokens == 1 == measured.shared_noise.steps
        and measured.rejection.accept_length == 1.0
    )


@pytest.mark.slow
def test_shipped_head_emits_more_than_three_tokens_a_step(session: Session, shipped):
    """More than three tokens per step of the policy at k = 5 on held-out problems, by either rule."""
    completions = held_out_responses(session.sampler, session.config, 64, 1.0)
    measured = measure_acceptance(session.policy, shipped, completions, DEPTH)
    assert measured.shared_noise.accept_length > 3 and measured.rejection.accept_length > 3
    assert sum(file.stat().st_size for file in BUILTIN_EAGLE.iterdir()) < 1 << 20


@pytest.mark.slow
def test_trained_head_drafts_for_the_policy(session: Session):
    """A fifth of the shipped head's training, which already doubles the tokens per step; from the policy's
    own responses.
    """
    head = EagleHead(config_for(session.policy.config)).initialise(session.policy, 0)
    sequences = [
        training_sequence(completion)
        for completion in training_responses(session.sampler, session.config, 1024)
    ]
    train_offline(
        session.policy, head, sequences, HeadTraining(steps=300, lr=3e-3, unroll=4, batch_sequences=16)
    )
    measured = measure_acceptance(
        session.policy, head, held_out_responses(session.sampler, session.config, 128, 1.0), DEPTH
    )
    assert measured.shared_noise.accept_length > 2
