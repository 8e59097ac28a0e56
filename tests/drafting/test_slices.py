"""Learning in slices: the same gradients as in one piece, bounded memory, and stopping after any slice."""

from dataclasses import replace

import pytest
import torch

from paceline.drafting.eagle_head import EagleHead, config_for
from paceline.drafting.examples import (
    TOKEN_BYTES,
    Example,
    ExampleBuffer,
    Passage,
    passages,
)
from paceline.drafting.slices import SlicedLearning
from paceline.drafting.training import HeadTrainer, HeadTraining
from paceline.learning.batch import TrainingSequence
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


def example(sequence: TrainingSequence) -> Example:
    return Example(sequence, 1, 0)


def learning_of(policy: Decoder, unroll: int = 2, batch: int = 4, lr: float = 1e-3) -> SlicedLearning:
    settings = HeadTraining(lr=lr, schedule="constant", unroll=unroll, batch_sequences=batch)
    return SlicedLearning(policy, HeadTrainer(policy, head_for(policy), settings), batch)


def gradients(learning: SlicedLearning, parts: list[list[Passage]]) -> list[torch.Tensor]:
    """The sums over these slices, without an update."""
    for part in parts:
        learning.compute_states([p.example for p in part])
        learning._accumulate(part, lambda: False)
    found = [p.grad.clone() for p in learning.trainer.head.parameters()]
    learning.trainer.discard()
    return found


def test_passages_together_are_the_whole_response(policy):
    """Each with all the text before it, and whatever is packed with it: nothing attends across texts."""
    learning = learning_of(policy, unroll=1)
    texts = [example(text(5, 150)), example(text(9, 70, seed=1))]
    whole = [Passage(e, 0, len(e.sequence.loss_mask)) for e in texts]
    cut = [p for e in texts for p in passages(e, 64)]
    assert [(p.start, p.stop) for p in cut] == [(0, 64), (64, 128), (128, 150), (0, 64), (64, 70)]
    expected = gradients(learning, [[whole[0]], [whole[1]]])
    for parts in ([whole], [[p] for p in cut], [cut[:2], cut[2:]]):
        for ours, theirs in zip(gradients(learning, parts), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


# -- the buffer ----------------------------------------------------------------------------------------------


def states_of(sequence: TrainingSequence, value: float = 1.0) -> TextStates:
    tokens, rows = len(sequence.tokens), len(sequence.loss_mask)
    return TextStates(torch.full((rows, 8), value), (torch.full((tokens, 8), value),) * 2)


def test_example_buffer_stays_within_its_bytes_and_drops_short_ones_first():
    sequences = [text(3, n) for n in (40, 30, 20, 10)]
    made = [Example(s, 1, 0, states_of(s)) for s in sequences]
    total = sum(TOKEN_BYTES * len(e.sequence.tokens) + e.states.bytes for e in made)
    states = [e.states.bytes for e in made]
    for limit, kept, with_states in (
        (total, 4, 4),
        (total - states[3], 4, 3),
        (total - states[3] - 1, 4, 2),
        (total - sum(states) - 1, 3, 0),
    ):
        buffer = ExampleBuffer(limit)
        buffer.add(1, [replace(e) for e in made])
        assert buffer.bytes <= limit
        assert (len(buffer), sum(e.states is not None for e in buffer)) == (kept, with_states)
        assert [e.sequence.loss_tokens for e in buffer] == [40, 30, 20, 10][:kept]


def test_slice_abandoned_midway_leaves_no_trace(policy):
    """Work that arrives in the middle of a slice, at every point where it is looked for."""
    texts = [example(text(5, 60)), example(text(9, 60, seed=1))]

    def learn(stop_at: int) -> tuple[int, list[torch.Tensor], list]:
        """Stops at the n-th question and resumes: returns the questions, the head, and what steps saw."""
        learning = learning_of(policy, unroll=3, batch=2, lr=1e-2)
        learning.gives_up = True
        learning.slice_rows = 20  # two slices to a step of the optimiser
        learning.plan([p for e in texts for p in passages(e, 20)])
        asked, reports = 0, []

        def should_stop() -> bool:
            nonlocal asked
            asked += 1
            return asked == stop_at

        while learning.work:
            reports += [report for report in learning.slices(should_stop) if report is not None]
        return asked, [p.detach().clone() for p in learning.trainer.head.parameters()], reports

    questions, expected, reports = learn(stop_at=0)
    # Asked before each of six slices, and within it at three steps forward, three comparisons and three steps
    # backward.
    assert questions >= 6 * 10 and len(reports) == 3
    for stop_at in range(1, questions, 7):
        _, found, again = learn(stop_at)
        assert again == reports, stop_at
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), stop_at


def test_slice_filler_is_no_longer_than_the_policys_texts(policy):
    """Positions beyond them have no rotation: a GPU would end the run there."""
    short = Decoder(replace(SHAPE, max_positions=90)).initialise(0)
    learning = learning_of(short, unroll=3)
    chosen = [p for n in range(3) for p in passages(example(text(4, 50, seed=n)), 64)]
    expected = gradients(learning, [chosen])
    learning.pads = False
    learning.slice_rows, learning.token_budget = 2000, 6000
    for ours, theirs in zip(gradients(learning, [chosen]), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
