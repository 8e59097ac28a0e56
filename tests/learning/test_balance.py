"""Micro-batches over ranks: everything once, equal rounds, within the budget, balanced by cost."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.learning.balance import PADDING, SequenceCost, cut
from paceline.learning.batch import TrainingSequence, split_by_tokens
from paceline.policy.shapes import SHAPES

COST = SequenceCost(1000.0)


def sequences(lengths: list[int]) -> list[TrainingSequence]:
    return [TrainingSequence((1,) * n, 1, (True,) * (n - 1), (0.0,) * (n - 1), 1.0, 1.0) for n in lengths]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(2, 300), max_size=60), st.integers(1, 7), st.integers(64, 400))
def test_cut_uses_every_sequence_once_in_equal_rounds(lengths, ranks, budget):
    given_ones = sequences(lengths)
    rounds = cut(given_ones, budget, ranks, COST)
    assert all(len(parts) == ranks for parts in rounds)
    found = [id(sequence) for parts in rounds for part in parts for sequence in part]
    assert sorted(found) == sorted(id(sequence) for sequence in given_ones)
    for part in (part for parts in rounds for part in parts):
        assert len(part) <= 1 or sum(len(s.tokens) for s in part) <= budget
    assert all(part for parts in rounds[:-1] for part in parts), "only the last round may have holes"
    assert all(any(parts) for parts in rounds), "no round for nothing"


def test_cut_for_one_rank_equals_split_by_tokens():
    given_ones = sequences([70, 3, 200, 64, 64, 90])
    assert cut(given_ones, 128, 1, COST) == [[part] for part in split_by_tokens(given_ones, 128)]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_cut_balances_long_tails(ranks):
    """Ranks wait for the dearest of each round; by tokens alone long sequences would hold up the others."""
    rng = random.Random(0)
    lengths = [min(6000, int(rng.lognormvariate(6.3, 1.0)) + 50) for _ in range(512)]
    given_ones = sequences(lengths)
    rounds = cut(given_ones, 16384, ranks, COST)
    waited = sum(ranks * max(sum(map(COST, part)) for part in parts) for parts in rounds)
    assert waited < 1.05 * sum(map(COST, given_ones))
    plain = split_by_tokens(given_ones, 16384)
    dealt = [plain[i : i + ranks] for i in range(0, len(plain), ranks)]
    assert waited < sum(ranks * max(sum(map(COST, part)) for part in parts) for parts in dealt)


def test_sequence_cost_is_that_of_the_operations():
    """Attention takes as many operations as the products where the formula says so."""
    shape = SHAPES["qwen3-8b"]
    cost = SequenceCost.of(shape)
    tokens = round(cost.even_length)
    products = 6 * shape.num_parameters * tokens
    attention = 6 * shape.num_layers * shape.num_heads * shape.head_dim * tokens**2
    assert attention == pytest.approx(products, rel=1e-3)
    assert cost(sequences([100])[0]) < 1.01 * 100


def test_padding_is_outside_the_loss():
    assert PADDING.loss_tokens == 0 and len(PADDING.tokens) - PADDING.prompt_length == len(PADDING.loss_mask)
