"""Learning in slices: the same gradients as in one piece, bounded memory, and stopping after any slice."""

from dataclasses import replace

import pytest
import torch

from paceline.config import OnlineDrafterConfig
from paceline.drafting.eagle_head import EagleHead, config_for
from paceline.drafting.examples import Example, Passage, passages
from paceline.drafting.head_learner import HeadLearner
from paceline.drafting.training import teacher_states
from paceline.learning.batch import TrainingSequence, pack
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.policy.states import TextStates
from tests.drafting.heads import random_head

SHAPE = DecoderConfig("llama", 40, 32, 64, 3, 4, 2, 8, 17000, eos_token_ids=(0,), tie_embeddings=False)


@pytest.fixture(scope="module")
def policy() -> Decoder:
    """A small policy with opinions: its logits differ by several nats."""
    policy = Decoder(SHAPE).initialise(0)
    for parameter in policy.parameters():
        if parameter.ndim > 1:
            parameter.data *= 12
    return policy


def head_for(policy: Decoder) -> EagleHead:
    return random_head(EagleHead(config_for(policy.config)), policy, 0)


def text(prompt: int, response: int, first: int = 1, size: int = 39, seed: int = 0) -> TrainingSequence:
    """A text of tokens from `first` on, `size` different ones."""
    generator = torch.Generator().manual_seed(seed)
    tokens = (torch.randint(0, size, (prompt + response,), generator=generator) + first).tolist()
    return TrainingSequence(tuple(tokens), prompt, (True,) * response, (0.0,) * response, 0.0, 1.0)


def example(sequence: TrainingSequence, policy: Decoder) -> Example:
    batch = pack([sequence], policy.device)
    hidden_TE, captured = teacher_states(policy, batch, config_for(policy.config).captured_layers)
    return Example(sequence, TextStates(hidden_TE[batch.predictors_R], tuple(captured)))


def learner_of(policy: Decoder, lr: float = 1e-3) -> HeadLearner:
    return HeadLearner(policy, head_for(policy), OnlineDrafterConfig(lr=lr), 0, print)


def gradients(learner: HeadLearner, parts: list[list[Passage]]) -> list[torch.Tensor]:
    """The sums over these slices, without an update."""
    for part in parts:
        learner.trainer.accumulate_rows(*learner.slicing.packed(part))
    found = [p.grad.clone() for p in learner.trainer.head.parameters()]
    learner.trainer.discard()
    return found


def test_passages_together_are_the_whole_response(policy, monkeypatch):
    """Each with all the text before it, and whatever is packed with it: nothing attends across texts."""
    monkeypatch.setattr("paceline.drafting.head_learner.UNROLL", 1)  # a draft ends where a passage does
    learner = learner_of(policy)
    texts = [example(text(5, 150), policy), example(text(9, 70, seed=1), policy)]
    whole = [Passage(e, 0, len(e.sequence.loss_mask)) for e in texts]
    cut = [p for e in texts for p in passages(e, 64)]
    assert [(p.start, p.stop) for p in cut] == [(0, 64), (64, 128), (128, 150), (0, 64), (64, 70)]
    expected = gradients(learner, [[whole[0]], [whole[1]]])
    for parts in ([whole], [[p] for p in cut], [cut[:2], cut[2:]]):
        for ours, theirs in zip(gradients(learner, parts), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_updates_are_as_large_as_the_tokens_that_they_are_meant_for(policy):
    learner = learner_of(policy)
    made = example(text(5, 150), policy)
    chosen = passages(made, 10)
    slicing = learner.slicing
    slicing.update_rows = 40

    def sizes(count: int, most: int = 99) -> list[int]:
        updates, size = [], 0
        for part in slicing.updates(chosen[:count], most):
            size += sum(passage.rows for passage in part.passages)
            if part.ends_update:
                updates.append(size)
                size = 0
        return updates

    assert sizes(15) == [40, 40, 40, 30] and sizes(13) == [40, 40, 40], "a small rest is left out"
    assert sizes(15, most=2) == [40, 40] and sizes(1) == [10] and sizes(0) == []
    slicing.slice_rows = 20
    assert sizes(8) == [40, 40] and len(slicing.updates(chosen[:8], 99)) == 4


def test_slice_abandoned_midway_leaves_no_trace(policy):
    """Work that arrives in the middle of a slice, at every point where it is looked for."""
    texts = [example(text(5, 60), policy), example(text(9, 60, seed=1), policy)]

    def learn(stop_at: int) -> tuple[int, list[torch.Tensor], list]:
        """Stops at the n-th question and resumes: returns the questions, the head, and what updates saw."""
        learner = learner_of(policy, lr=1e-2)
        learner.slicing.slice_rows, learner.slicing.update_rows = 20, 40  # two slices to an update
        learner.plan("order", texts)
        asked, reports = 0, []

        def should_stop() -> bool:
            nonlocal asked
            asked += 1
            return asked == stop_at

        while learner.work:
            reports += learner.learn(should_stop)
        return asked, list(learner.weights().values()), reports

    questions, expected, reports = learn(stop_at=0)
    # Asked before each of six slices, and within it at five steps forward, five comparisons and five steps
    # backward.
    assert questions >= 6 * 15 and len(reports) == 3
    for stop_at in range(1, questions, 11):
        _, found, again = learn(stop_at)
        assert again == reports, stop_at
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), stop_at


def test_slice_filler_is_no_longer_than_the_policys_texts(policy):
    """Positions beyond them have no rotation: a GPU would end the run there."""
    short = Decoder(replace(SHAPE, max_positions=90)).initialise(0)
    learner = learner_of(short)
    chosen = [p for n in range(3) for p in passages(example(text(4, 50, seed=n), short), 64)]
    expected = gradients(learner, [chosen])
    learner.slicing.pads = False
    learner.slicing.slice_rows, learner.slicing.token_budget = 2000, 6000
    for ours, theirs in zip(gradients(learner, [chosen]), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
