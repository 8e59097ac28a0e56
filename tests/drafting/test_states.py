"""States that passes leave behind: the learner's own and the engine's, held against a pass of their own.

Neighbouring states differ, so a state that lies one place beside its token is found out.
"""

import pytest
import torch

from paceline.config import load_config
from paceline.drafting.eagle import EagleDrafter
from paceline.drafting.eagle_folder import load_eagle
from paceline.drafting.state_tap import StateTap
from paceline.drafting.training import teacher_states
from paceline.engine.engine import Engine, EngineSettings
from paceline.learning.batch import TrainingSequence, pack, training_sequence
from paceline.learning.learner import Learner
from paceline.models.source import BUILTIN_POLICY
from paceline.pacing.strategy import FixedPacer, Strategy
from paceline.policy.huggingface import load_policy
from paceline.policy.states import TextStates
from paceline.types import Completion, FinishReason, Group, Request, Sample, SamplingParams, Score, Segment

LAYERS = (1, 2, 3)


@pytest.fixture(scope="module")
def policy():
    return load_policy(BUILTIN_POLICY, torch.float32)


@pytest.fixture(scope="module")
def head(policy):
    return load_eagle("builtin-eagle", policy, torch.float32)


def assert_aligned(policy, layers, sequence: TrainingSequence, states: TextStates, tolerance=1e-4) -> None:
    """The states are those of a pass over this text alone, each at its token, and at no neighbour's."""
    batch = pack([sequence], policy.device)
    hidden_TE, captured = teacher_states(policy, batch, layers)
    expected = [hidden_TE[batch.predictors_R], *captured]
    found = [states.hidden_RE, *states.captured_TE]
    last = len(sequence.tokens) - 1  # an engine never runs a response's last token
    for place, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours.shape == theirs.shape and not ours.requires_grad
        stop = len(theirs) if place == 0 else last
        torch.testing.assert_close(ours[:stop], theirs[:stop], rtol=0, atol=tolerance)
        assert not torch.allclose(ours[: stop - 1], theirs[1:stop], rtol=0, atol=tolerance)
        assert not torch.allclose(ours[1:stop], theirs[: stop - 1], rtol=0, atol=tolerance)


def groups_of_texts() -> list[Group]:
    """Two groups that teach something, and one whose rewards are all the same, which the learner skips."""
    groups = []
    for number, rewards in enumerate(((0.0, 1.0), (1.0, 0.0), (1.0, 1.0))):
        samples = []
        for place, reward in enumerate(rewards):
            prompt = tuple((number + place + i) % 9 + 3 for i in range(4 + number))
            tokens = tuple((5 * i + 3 * place + number) % 11 + 2 for i in range(9 + 7 * place + number))
            request = Request(f"{number}/{place}", prompt, place, SamplingParams())
            segments = (Segment(0, len(tokens), 0, True),)
            completion = Completion(request, tokens, (-1.0,) * len(tokens), FinishReason.STOP, segments)
            samples.append(Sample(completion, Score(reward, reward > 0)))
        groups.append(Group(str(number), tuple(samples)))
    return groups


def learner_of(*overrides: str) -> Learner:
    config = load_config(None, ["run.device=cpu", "learning.lr=1e-3", *overrides])
    return Learner(load_policy(BUILTIN_POLICY, torch.float32), config)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("learning.numerics=exact",),
        ("learning.kl_coef=0.1",),
        ("policy.activation_checkpointing=true", "learning.micro_batch_tokens=64"),
    ],
    ids=["plain", "exact", "with a reference", "recomputed in small batches"],
)
def test_learners_pass_keeps_the_states_of_the_policy_before_the_update(overrides, policy):
    """And the update is the same, bit for bit, as one that is not watched."""
    groups = groups_of_texts()
    texts = [training_sequence(sample.completion) for group in groups for sample in group.samples]
    watched, plain = learner_of(*overrides), learner_of(*overrides)
    tap = StateTap(LAYERS)
    tap.choose(texts)
    watched.capture_states = tap.watch
    metrics = watched.update(groups)
    found = {example.sequence.tokens: example.states for example in tap.take()}
    assert metrics == plain.update(groups)
    for (name, ours), (_, theirs) in zip(
        watched.policy.named_parameters(), plain.policy.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    skipped = {text.tokens for text in texts[4:]}
    expected = {text.tokens for text in texts} - (
        skipped if "learning.kl_coef=0.1" not in overrides else set()
    )
    assert set(found) == expected
    for text in texts:
        if text.tokens in found:
            assert_aligned(policy, LAYERS, text, found[text.tokens])
    assert tap.watch(texts) is None, "nothing is expected any more"


def engine_of(policy, head, strategy: Strategy, record: int, **settings) -> Engine:
    made = EngineSettings(max_running=4, kv_tokens=2048, request_tokens=96, max_proposal=5, **settings)
    engine = Engine(policy, made, drafters=[EagleDrafter(head)], pacer=FixedPacer(strategy, 4))
    engine.recording.record_states(record)
    return engine


def generate(engine: Engine, count: int = 7) -> list[Completion]:
    requests = [
        Request(
            str(i), tuple((3 + i + j) % 9 + 3 for j in range(5 + i % 3)), i, SamplingParams(max_tokens=40)
        )
        for i in range(count)
    ]
    engine.submit(requests)
    return list(engine.completions())


@pytest.mark.parametrize(
    "strategy, settings",
    [(Strategy("eagle", 3), {}), (Strategy("eagle", 5, tree=True), {"trees": True})],
    ids=["chains", "trees"],
)
def test_engine_records_states_of_accepted_tokens_only(strategy, settings, policy, head):
    engine = engine_of(policy, head, strategy, 1 << 26, **settings)
    completions = generate(engine)
    accepted = engine.take_stats().drafts["eagle"]
    assert 0 < accepted.accepted < accepted.proposed, "some drafts are kept, some are not"
    found = engine.recording.take_states()
    assert (
        len(found) == len({c.request.prompt + c.tokens for c in completions})
        and not engine.recording.take_states()
    )
    for completion in completions:
        text = training_sequence(completion)
        states = found[text.tokens]
        assert_aligned(policy, head.config.captured_layers, text, states)
        (states.hidden_RE @ torch.ones(len(states.hidden_RE[0]), requires_grad=True)).sum().backward()


def test_recorded_states_of_a_tree_are_those_of_its_path(policy, head, monkeypatch):
    """Siblings lie at one place; whatever comes last there must be the one that was sampled."""
    settings = EngineSettings(max_running=4, kv_tokens=2048, request_tokens=96, max_proposal=15, trees=True)
    strategy = Strategy("eagle", 15, tree=True)
    engine = Engine(policy, settings, drafters=[EagleDrafter(head, 2)], pacer=FixedPacer(strategy, 4))
    engine.recording.record_states(1 << 26)
    recorder, sideways = engine.drafters["eagle"].recorder, []
    step = recorder.step

    def watched(seen) -> None:
        if seen.way_RQ is not None:
            way_RQ = seen.way_RQ - seen.way_RQ[:, :1]
            sideways.append(int((way_RQ > torch.arange(way_RQ.shape[1])).any(1).sum()))
        step(seen)

    monkeypatch.setattr(recorder, "step", watched)
    completions = generate(engine)
    assert sum(sideways) > 10, "paths leave the first child"
    found = engine.recording.take_states()
    for completion in completions:
        text = training_sequence(completion)
        assert_aligned(policy, head.config.captured_layers, text, found[text.tokens])


def test_recorded_row_that_ends_at_its_last_place_writes_nothing_beyond_it(policy, head):
    """What is proposed past the end of the longest request has no place in the record."""
    prompt, tokens = (3, 9, 4, 8, 5, 7), 26
    settings = EngineSettings(
        max_running=2, kv_tokens=2048, request_tokens=len(prompt) + tokens, max_proposal=7
    )
    engine = Engine(
        policy, settings, drafters=[EagleDrafter(head)], pacer=FixedPacer(Strategy("eagle", 7), 2)
    )
    engine.recording.record_states(1 << 26)
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    engine.submit([Request(str(i), prompt, i, sampling) for i in range(4)])
    completions = list(engine.completions())
    found = engine.recording.take_states()
    assert len(found) == len(completions) == 4
    for completion in completions:
        text = training_sequence(completion)
        assert len(text.tokens) == settings.request_tokens
        assert_aligned(policy, head.config.captured_layers, text, found[text.tokens])
