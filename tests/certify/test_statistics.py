"""p-values against scipy where contexts are equal, and uniform where they are not."""

import pytest
import torch
from scipy import stats

from paceline.certify.statistics import holm, test_frequencies


def draw(probabilities_NB: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.multinomial(probabilities_NB, 1, generator=torch.Generator().manual_seed(seed)).squeeze(1)


def test_one_context_is_pearsons_test():
    p = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    observed = draw(p.expand(2000, -1), 1)
    result = test_frequencies(p.expand(2000, -1), observed)
    expected = stats.chisquare(torch.bincount(observed, minlength=4), (p * 2000).numpy())
    assert result.degrees == 3 and result.statistic == pytest.approx(expected.statistic) and result.p_value == pytest.approx(expected.pvalue)


def contexts(seed: int, tokens: int = 1500) -> torch.Tensor:
    """Every token with probabilities of its own, some nearly certain."""
    logits = torch.randn(tokens, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    return logits.softmax(-1).sort(descending=True).values


def test_p_values_are_uniform_over_many_contexts():
    values = [test_frequencies(contexts(i), draw(contexts(i), 1000 + i), torch.arange(1500) % 2).p_value for i in range(120)]
    assert stats.kstest(values, "uniform").pvalue > 0.01


def test_a_small_bias_shows():
    probabilities = contexts(0, 20000)
    biased = probabilities.clone()
    biased[:, 0] *= 1.3
    assert test_frequencies(probabilities, draw(biased, 5)).p_value < 1e-6


def test_impossible_tokens_and_certain_contexts():
    certain = torch.tensor([[1.0, 0.0, 0.0]]).expand(500, -1)
    assert test_frequencies(certain, torch.zeros(500, dtype=torch.int64)).p_value == 1.0
    assert test_frequencies(certain, torch.tensor([1] + [0] * 499)).p_value == 0.0


def test_holm():
    values = [0.01, 0.04, 0.03, 0.005]
    assert holm(values) == pytest.approx([0.03, 0.06, 0.06, 0.02])  # Holm's own procedure by hand
