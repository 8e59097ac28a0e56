"""A replica's head in idle time: from the engine's own states, on a copy, term by term."""

import pytest
import torch

from paceline.config import load_config
from paceline.drafting.eagle import EagleDrafter
from paceline.drafting.eagle_folder import load_eagle
from paceline.drafting.replica_trainer import ReplicaTrainer, record_bytes
from paceline.engine.engine import Engine, EngineSettings
from paceline.models.source import BUILTIN_POLICY
from paceline.pacing.strategy import FixedPacer, Strategy
from paceline.policy.huggingface import load_policy
from paceline.types import Request, SamplingParams
from tests.drafting.online_helpers import same
from tests.drafting.test_states import assert_aligned


@pytest.fixture(scope="module")
def policy():
    return load_policy(BUILTIN_POLICY, torch.float32)


@pytest.fixture
def head(policy):
    return load_eagle("builtin-eagle", policy, torch.float32)


def config_of(*overrides: str):
    learns = ["rollout.speculation.drafters=[eagle]", "rollout.speculation.online.lr=1e-2"]
    return load_config(None, ["cluster.replicas=2", *learns, *overrides])


def replica(policy, head, *overrides: str) -> tuple[Engine, ReplicaTrainer]:
    settings = EngineSettings(max_running=4, kv_tokens=2048, request_tokens=96, max_proposal=3)
    engine = Engine(
        policy, settings, drafters=[EagleDrafter(head)], pacer=FixedPacer(Strategy("eagle", 3), 4)
    )
    trainer = ReplicaTrainer(policy, head, config_of(*overrides), engine.recording, print)
    trainer.learner.slicing.update_rows = 60  # two responses
    return engine, trainer


def generate(engine: Engine, count: int = 4, tokens: int = 30, first: int = 0) -> list:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    engine.submit([Request(str(i), (3 + i % 9, 9, 4, 8), i, sampling) for i in range(first, first + count)])
    return list(engine.completions())


def snapshot(head) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in head.named_parameters()}


def never() -> bool:
    return False


def test_replica_trainer_trains_a_copy_from_states_that_the_engine_computed_anyway(policy, head):
    engine, trainer = replica(policy, head)
    drafting = snapshot(head)
    tokens = {completion.request.id: completion.tokens for completion in generate(engine)}
    trainer.begin(1)
    learned_from = {id(p.example): p.example for part in trainer.learner.work for p in part.passages}.values()
    assert len(learned_from) == 4
    assert not trainer.slice(never), "all of it"
    assert trainer.tokens == sum(map(len, tokens.values())) and trainer.updates == 2
    assert trainer.updates * 0.1 < trainer.overlap < trainer.updates
    assert same(snapshot(head), drafting), "what drafts is as it was"
    learned = trainer.weights()
    assert not same(learned, drafting)
    layers = head.config.captured_layers
    for example in learned_from:
        assert_aligned(policy, layers, example.sequence, example.states)
    engine.publish_drafter(1, learned)
    assert same(snapshot(head), learned)
    again = {completion.request.id: completion.tokens for completion in generate(engine)}
    assert again == tokens, "whatever drafts"


def test_stopped_term_resumes_and_the_next_begins_from_what_was_published(policy, head):
    engine, trainer = replica(policy, head)
    generate(engine)
    trainer.begin(1)
    asked = []
    # Enough for the first optimiser step, not for all.
    assert trainer.slice(lambda: trainer.updates == 1 or asked.append(1) is not None), "there is more"
    halfway, tokens = trainer.weights(), trainer.tokens
    assert trainer.updates == 1
    trainer.begin(1)
    assert same(trainer.weights(), halfway), "work came in between: it resumes"
    assert not trainer.slice(never) and trainer.updates == 2 and trainer.tokens > tokens
    steps = trainer.learner.trainer.optimiser.steps
    trainer.begin(1)
    assert not trainer.slice(never) and trainer.updates == 2, "no text twice in a term"
    generate(engine, count=2, first=4)
    trainer.begin(1)
    assert not trainer.slice(never) and trainer.updates == 3, "what has come since"
    published = {name: tensor + 1 for name, tensor in snapshot(head).items()}
    trainer.take_head(published)
    trainer.begin(2)
    assert (trainer.tokens, trainer.updates) == (0.0, 0) and same(trainer.weights(), published)
    optimiser = trainer.learner.trainer.optimiser
    assert optimiser.steps == steps + 1 and optimiser.states[0].momentum.any(), "its moments stay"


def test_small_steps_of_several_terms_add_up_in_bf16():
    """Rounded to bf16 after every term they would be lost: weights travel as masters."""
    policy = load_policy(BUILTIN_POLICY, torch.bfloat16)
    head = load_eagle("builtin-eagle", policy, torch.bfloat16)
    _, trainer = replica(policy, head)
    name, parameter = next(iter(trainer.learner.head.named_parameters()))
    begun = trainer.weights()[name]
    assert parameter.dtype == torch.bfloat16 and begun.dtype == torch.float32
    for term in range(1, 9):
        trainer.begin(term)
        trainer.learner.trainer.optimiser.masters()[name].add_(begun.abs() * 2.0**-11)  # an eighth of a step
        trainer.take_head(trainer.weights())
    trainer.begin(9)
    moved = (trainer.weights()[name] - begun).abs().sum() / begun.abs().sum()
    assert pytest.approx(float(moved), rel=1e-3) == 8 * 2.0**-11
    assert not torch.equal(trainer.learner.head.get_parameter(name).float(), begun), "and reach what drafts"


def test_replica_learns_from_states_of_the_newest_weights_within_their_bytes(policy, head, monkeypatch):
    monkeypatch.setattr("paceline.drafting.replica_trainer.RECORD_BYTES", 1_000_000)
    engine, trainer = replica(policy, head)
    recorder = engine.drafters["eagle"].recorder
    assert record_bytes(config_of()) == 500_000 >= recorder.shape.bytes > 0
    assert recorder.shape.finished_bytes == 2_000_000
    generate(engine)
    trainer.note_weights(1)
    trainer.begin(1)
    assert not trainer.learner.work and not trainer.slice(never) and trainer.updates == 0
    monkeypatch.setattr("paceline.drafting.replica_trainer.RECORD_BYTES", 100_000)
    engine, trainer = replica(policy, head)
    assert engine.drafters["eagle"].recorder is None, "not one row of 96 tokens fits 50 KB"
