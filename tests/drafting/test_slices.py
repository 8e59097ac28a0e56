"""Learning in slices: the same gradients as in one piece, bounded memory, and stopping after any slice."""

import copy
from dataclasses import replace

import pytest
import torch

from paceline.drafting.eagle_head import EagleHead, config_for
from paceline.drafting.examples import (
    TOKEN_BYTES,
    Example,
    ExampleBuffer,
    Passage,
    host_bytes,
    longest_texts,
    passages,
)
from paceline.drafting.head_pass import HeadPass
from paceline.drafting.slices import SLICE_ROWS, SlicedLearning
from paceline.drafting.training import HeadTrainer, HeadTraining, compare_rows
from paceline.learning.batch import TrainingSequence, pack
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.policy.states import TextStates
from paceline.types import Completion, FinishReason, Group, Request, Sample, SamplingParams, Score
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


def drain(learning: SlicedLearning, chosen: list[Passage]) -> list:
    learning.plan(chosen)
    return [report for report in learning.slices(lambda: False) if report is not None]


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


def test_a_passage_that_nobody_sampled_is_left_out():
    mask = (True,) * 64 + (False,) * 64 + (True,) * 3
    sequence = replace(text(4, 131), loss_mask=mask)
    assert [(p.start, p.stop) for p in passages(example(sequence), 64)] == [(0, 64), (128, 131)]


def test_slices_are_small_and_none_is_lost(policy):
    learning = learning_of(policy)
    texts = [example(text(4, n, seed=n)) for n in (200, 20, 20, 65, 3)]
    parts = learning.cut([p for e in texts for p in passages(e, learning.passage_rows)])
    assert all(sum(p.stop - p.start for p in part) <= SLICE_ROWS["cpu"] for part in parts)
    assert sum(p.stop - p.start for part in parts for p in part) == 308
    learning.token_budget = 130  # padded to the longest text of a slice
    assert all(
        len(part) * max(4 + p.stop for p in part) <= 130 or len(part) == 1
        for part in learning.cut([p for e in texts for p in passages(e, learning.passage_rows)])
    )


def test_stopped_after_every_slice_it_learns_the_same(policy):
    texts = [example(text(6, 100, seed=n)) for n in range(3)]
    chosen = [p for e in texts for p in passages(e, 64)]
    whole, broken = learning_of(policy), learning_of(policy)
    reports = drain(whole, chosen)
    broken.plan(chosen)
    interrupted = []
    for _ in range(1000):
        calls = []
        # Asked before each slice, so nothing runs between the wish to stop and the end.
        for report in broken.slices(lambda: bool(calls) or calls.append(1) is not None):
            interrupted.append(report)
        if not broken.work:
            break
    assert len(reports) == 2 and [r for r in interrupted if r is not None] == reports
    assert len(interrupted) > 4
    for ours, theirs in zip(broken.trainer.head.parameters(), whole.trainer.head.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_new_plan_keeps_the_optimiser_step_that_has_begun(policy):
    learning = learning_of(policy, batch=2)
    old = [p for n in range(4) for p in passages(example(text(6, 60, seed=n)), 64)]
    learning.plan(old)
    slices = learning.slices(lambda: False)
    while not learning.trainer.accumulated:
        next(slices)
    new = passages(example(text(6, 60, seed=9)), 64)
    learning.plan(new)
    left = [p for part in learning.work for p in part.passages]
    assert left == [old[1], *new], "the other half of the step, then the new ones"


def saved_bytes(policy: Decoder, tokens: int, rows: int) -> int:
    """The bytes that a pass over the last `rows` tokens of a text keeps for its gradients."""
    learning = learning_of(policy, unroll=3)
    head = learning.trainer.head
    states = TextStates(torch.zeros(rows, 32), tuple(torch.zeros(tokens, 32) for _ in range(3)))
    batch, _, captured = learning.inputs([Passage(Example(text(tokens - rows, rows), 1, 0, states), 0, rows)])
    run = HeadPass(head, captured, policy.embedding.weight, batch, 3)
    known = {p.data_ptr() for p in (*head.parameters(), *policy.parameters())}
    held = [*vars(run).values(), *(kept for step in run.steps for kept in vars(step).values())]
    storages = {x.data_ptr(): x for x in (t.untyped_storage() for t in held if isinstance(t, torch.Tensor))}
    return sum(storage.nbytes() for address, storage in storages.items() if address not in known)


@pytest.mark.slow
def test_sixteen_thousand_tokens_take_memory_by_their_number_and_little_of_it(policy):
    """Of a token before the passage: its key, its value and what they are made of; no pairs of tokens."""
    rows = 64
    sizes = {tokens: saved_bytes(policy, tokens, rows) for tokens in (4000, 8000, 16000)}
    slope = (sizes[16000] - sizes[8000]) / 8000
    assert slope == pytest.approx((sizes[8000] - sizes[4000]) / 4000, rel=0.05), sizes
    layer = policy.config
    entry = 3 * 32 + 2 * 4 * 32 + 2 * layer.num_heads * layer.head_dim + 3 * 32 + 64  # floats, generously
    assert slope <= 2 * 4 * entry
    whole = saved_bytes(policy, 4000, 3900)
    assert sizes[4000] < 0.3 * whole, "what a row costs is paid for the passage alone"


@pytest.mark.slow
def test_the_late_part_of_a_response_teaches_what_the_beginning_cannot(policy):
    """The second half of a response uses other tokens, of which a head that was cut off knows nothing."""

    def two_halves(seed: int) -> TrainingSequence:
        early, late = text(10, 290, 1, 19, seed), text(0, 300, 20, 19, seed)
        return replace(
            early,
            tokens=early.tokens + late.tokens,
            loss_mask=(True,) * 590,
            rollout_logprobs=(0.0,) * 590,
        )

    seen, unseen = example(two_halves(0)), example(two_halves(1))
    late = [p for p in passages(unseen, 64) if p.start >= 320]
    overlaps = {}
    for name, stop in (("cut", 290), ("whole", 590)):
        learning = learning_of(policy, unroll=1, lr=3e-3)
        chosen = [p for p in passages(seen, 64) if p.stop <= stop]
        for _ in range(60):
            drain(learning, (chosen * 2)[:8])
        learning.compute_states([unseen])
        total, tokens = compare_rows(policy, learning.trainer.head, *learning.inputs(late))
        assert tokens == sum(p.stop - p.start for p in late)
        overlaps[name] = total / tokens
    assert overlaps["whole"] > overlaps["cut"] + 0.05, overlaps


# -- the buffer ----------------------------------------------------------------------------------------------


def states_of(sequence: TrainingSequence, value: float = 1.0) -> TextStates:
    tokens, rows = len(sequence.tokens), len(sequence.loss_mask)
    return TextStates(torch.full((rows, 8), value), (torch.full((tokens, 8), value),) * 2)


def test_the_buffer_keeps_two_steps_longest_first():
    buffer = ExampleBuffer(1 << 30)
    for step in (1, 2, 3):
        buffer.add(step, [Example(text(3, 10 * step + i), step, step - 1) for i in range(3)])
    assert [e.sequence.loss_tokens for e in buffer] == [32, 31, 30, 22, 21, 20]
    assert {(e.step, e.version) for e in buffer} == {(3, 2), (2, 1)}
    assert [e.sequence.loss_tokens for e in buffer.longest(64)] == [32, 31]
    assert [e.sequence.loss_tokens for e in buffer.longest(5)] == [32], "at least one"
    buffer.add(3, [Example(text(3, 50), 3, 2)])
    assert [e.step for e in buffer] == [3, 2, 2, 2], "a step that is made again replaces its own"
    unsampled = Example(replace(text(3, 5), loss_mask=(False,) * 5), 4, 3)
    lone = ExampleBuffer(1 << 30)
    lone.add(4, [unsampled])
    assert lone.longest(100) == []


def test_the_buffer_stays_within_its_bytes_and_lets_the_short_ones_go_first():
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


def test_the_buffer_comes_back_as_it_was():
    sequences = [replace(text(3, n), temperature=0.7) for n in (40, 30)]
    buffer = ExampleBuffer(1 << 30)
    buffer.add(7, [Example(sequences[0], 7, 6, states_of(sequences[0])), Example(sequences[1], 7, 6)])
    again = ExampleBuffer(1 << 30)
    again.load_state({name: tensor.clone() for name, tensor in buffer.state().items()})
    for ours, theirs in zip(again, buffer, strict=True):
        assert (ours.sequence, ours.step, ours.version) == (theirs.sequence, theirs.step, theirs.version)
        assert (ours.states is None) == (theirs.states is None)
    assert torch.equal(again.examples[0].states.captured_TE[1], buffer.examples[0].states.captured_TE[1])


def test_states_that_are_missing_are_computed_once(policy):
    learning = learning_of(policy)
    texts = [example(text(4, 70, seed=n)) for n in range(3)]
    chosen = [p for e in texts for p in passages(e, 64)]
    drain(learning, chosen)
    assert learning.rebuilt == 3
    before = copy.copy(texts[0].states)
    drain(learning, chosen)
    assert learning.rebuilt == 3 and texts[0].states == before
    batch = pack([texts[0].sequence], policy.device)
    hidden_TE = policy(batch.tokens_T, batch.attention.positions_T, batch.attention)
    torch.testing.assert_close(texts[0].states.hidden_RE, hidden_TE[batch.predictors_R], rtol=0, atol=1e-5)


def test_a_slice_given_up_midway_leaves_no_trace(policy):
    """Work that arrives in the middle of a slice, at every point where it is looked for."""
    texts = [example(text(5, 60)), example(text(9, 60, seed=1))]

    def learn(stop_at: int) -> tuple[int, list[torch.Tensor], list]:
        """Stops at the n-th question and goes on: returns the questions, the head, and what steps saw."""
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


def test_on_a_gpu_short_passages_fill_a_slice(policy):
    """A step of few rows takes as long as a full slice there; on a CPU it has `batch` passages."""
    texts = [example(text(5, 8, seed=seed)) for seed in range(40)]
    short = [p for e in texts for p in passages(e, 64)]
    learning = learning_of(policy, batch=4)
    learning.plan(short)
    assert [len(part.passages) for part in learning.work] == [4] * 10
    learning.policy = Decoder(policy.config, device="meta")
    learning.slice_rows = 8 * 12
    learning.plan(short)
    assert [len(part.passages) for part in learning.work] == [12, 12, 12, 4]
    assert all(part.ends_step for part in learning.work)
    learning.plan([p for e in [example(text(5, 600))] for p in passages(e, 64)])
    assert sum(part.ends_step for part in learning.work) == 3, "long ones keep to `batch`"


def test_slices_that_are_filled_up_learn_the_same_and_have_few_sizes(policy):
    """A GPU's libraries choose kernels for each new size; what fills a slice teaches nothing."""
    learning = learning_of(policy, unroll=3)
    texts = [example(text(3 + n, 20 + 7 * n, seed=n)) for n in range(12)]
    every = [p for e in texts for p in passages(e, 64)]
    parts = [every[:5], every[5:9], every[9:]]
    expected = gradients(learning, parts)
    learning.pads = False
    learning.slice_rows, learning.token_budget = 800, 1800
    for ours, theirs in zip(gradients(learning, parts), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    sizes = set()
    for count in range(1, len(every)):
        batch, hidden_RE, captured = learning.inputs(every[-count:])
        rows, tokens = len(batch.mask_R), len(batch.tokens_T)
        assert rows == len(hidden_RE) and all(len(states_TE) == tokens for states_TE in captured)
        assert int(batch.mask_R.sum()) == sum(p.stop - p.start for p in every[-count:])
        assert tokens <= learning.token_budget or sum(map(_length, every[-count:])) + 100 > 1800
        if tokens <= learning.token_budget:
            sizes.add((rows, tokens))
    assert all(rows % 200 == 0 and tokens % 300 == 0 for rows, tokens in sizes) and len(sizes) < 10


def test_what_fills_a_slice_is_no_longer_than_the_policys_texts(policy):
    """Positions beyond them have no rotation: a GPU would end the run there."""
    short = Decoder(replace(SHAPE, max_positions=90)).initialise(0)
    learning = learning_of(short, unroll=3)
    chosen = [p for n in range(3) for p in passages(example(text(4, 50, seed=n)), 64)]
    expected = gradients(learning, [chosen])
    learning.pads = False
    learning.slice_rows, learning.token_budget = 2000, 6000
    filler = learning._filler([passage.sequence for passage in chosen])
    assert max(len(sequence.tokens) for sequence in filler) == 90
    assert sum(len(sequence.loss_mask) for sequence in filler) == 500 - 150
    assert sum(len(sequence.tokens) for sequence in filler) == 1000 - 3 * 54
    assert all(sequence.prompt_length >= 5 for sequence in filler if sequence.loss_mask)
    for ours, theirs in zip(gradients(learning, [chosen]), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    learning.slice_rows = 151
    filler = learning._filler([passage.sequence for passage in chosen])
    assert sum(len(sequence.loss_mask) for sequence in filler) == 1, "no more rows than a slice may have"


def _length(passage: Passage) -> int:
    return passage.example.sequence.prompt_length + passage.stop


def test_host_memory_is_counted_with_what_a_block_holds_beside():
    """A block of pinned memory stays as long as anything in it does; equal responses share their states."""
    block = torch.zeros(100, 4)
    lone = TextStates(block[:3], (block[10:15],))
    other = TextStates(torch.ones(4, 8), (torch.ones(7, 8),))
    examples = [Example(text(3, 3), 1, 0, s) for s in (lone, lone, other, None)]
    assert host_bytes(examples) == block.nbytes + other.bytes


def test_every_part_of_sixteen_thousand_tokens_is_a_passage_with_all_before_it():
    long = text(5, 16_000)
    cut = passages(example(long), 64)
    assert [(p.start, p.stop) for p in cut] == [(start, start + 64) for start in range(0, 16_000, 64)]
    for passage in (cut[0], cut[100], cut[-1]):
        assert passage.sequence.tokens == long.tokens[: 5 + passage.stop]
        assert passage.sequence.prompt_length == 5 + passage.start
    request = Request("a", long.tokens[:5], 0, SamplingParams())
    completion = Completion(request, long.tokens[5:], (0.0,) * 16_000, FinishReason.LENGTH, ())
    (chosen,) = longest_texts([Group("a", (Sample(completion, Score(0.0, False)),))], 8192)
    assert chosen.tokens == long.tokens and len(chosen.loss_mask) == 16_000
