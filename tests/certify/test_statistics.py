"""p-values against scipy where contexts are equal, and uniform where they are not."""

import pytest
import torch
from scipy import stats

from paceline.certify.statistics import chi_square_tail, holm, test_frequencies


def draw(probabilities_NB: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.multinomial(probabilities_NB, 1, generator=torch.Generator().manual_seed(seed)).squeeze(1)


def test_frequencies_of_one_context_are_pearsons_test():
    p = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    observed = draw(p.expand(2000, -1), 1)
    result = test_frequencies(p.expand(2000, -1), observed)
    expected = stats.chisquare(torch.bincount(observed, minlength=4), (p * 2000).numpy())
    assert (
        result.degrees == 3
        and result.statistic == pytest.approx(expected.statistic)
        and result.p_value == pytest.approx(expected.pvalue)
    )


def contexts(seed: int, tokens: int = 1500) -> torch.Tensor:
    """Every token with probabilities of its own, some nearly certain."""
    logits = torch.randn(tokens, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    return logits.softmax(-1).sort(descending=True).values


@pytest.mark.slow
def test_p_values_are_uniform_over_many_contexts():
    values = [
        test_frequencies(contexts(i), draw(contexts(i), 1000 + i), torch.arange(1500) % 2).p_value
        for i in range(120)
    ]
    assert stats.kstest(values, "uniform").pvalue > 0.01


def test_frequencies_show_a_small_bias():
    probabilities = contexts(0, 20000)
    biased = probabilities.clone()
    biased[:, 0] *= 1.3
    assert test_frequencies(probabilities, draw(biased, 5)).p_value < 1e-6


def test_frequencies_handle_impossible_tokens_and_certain_contexts():
    certain = torch.tensor([[1.0, 0.0, 0.0]]).expand(500, -1)
    assert test_frequencies(certain, torch.zeros(500, dtype=torch.int64)).p_value == 1.0
    assert test_frequencies(certain, torch.tensor([1] + [0] * 499)).p_value == 0.0


def perturbed(probabilities: torch.Tensor, by: float, seed: int) -> torch.Tensor:
    """What rounding makes of them: some tokens' logits are moved."""
    noise = torch.randn(
        probabilities.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return (probabilities.log() + by * noise).softmax(-1)


def test_frequencies_excuse_what_rounding_explains():
    """The backend is one more perturbed copy: without the copies it would fail, and a bias still does."""
    context = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    rows = 20000
    failures = 0
    bare = 0
    caught = 0
    for seed in range(30):
        copies = torch.stack([perturbed(context, 0.05, 100 * seed + i) for i in range(4)])
        drawn = draw(copies[3].expand(rows, -1), seed)
        known = context.expand(rows, -1), drawn, None, copies[:3].expand(rows, -1, -1)
        failures += test_frequencies(*known).p_value < 0.01
        bare += test_frequencies(*known[:2]).p_value < 0.01
        biased = draw((copies[3] * torch.tensor([1.6, 1, 1, 1])).expand(rows, -1), seed)
        caught += test_frequencies(known[0], biased, None, known[3]).p_value < 0.01
    assert failures <= 5 and bare > 20 and caught > 25


def test_frequencies_excuse_tokens_that_only_rounding_makes_possible():
    certain = torch.tensor([[1.0, 0.0, 0.0]]).expand(500, -1)
    # Five are expected, ten explained and half a one unseen.
    sometimes = torch.tensor([[0.99, 0.01, 0.0]]).expand(500, -1).unsqueeze(1)
    few, many = (
        test_frequencies(certain, torch.tensor([1] * n + [0] * (500 - n)), None, sometimes) for n in (8, 40)
    )
    assert (
        few.ruled_out == 8
        and few.explained == pytest.approx(10.5)
        and few.p_value > 0.5
        and many.p_value < 1e-6
    )
    assert many.p_value == pytest.approx(2 * stats.poisson.sf(39, 10.5))


def test_shifted_statistic_is_noncentral_chi_square():
    for statistic, degrees, shift in ((30.0, 12, 0.0), (30.0, 12, 7.5), (400.0, 30, 350.0), (5.0, 1, 2.0)):
        expected = stats.ncx2.sf(statistic, degrees, shift) if shift else stats.chi2.sf(statistic, degrees)
        assert chi_square_tail(statistic, degrees, shift) == pytest.approx(expected, rel=1e-6)


def test_holm():
    values = [0.01, 0.04, 0.03, 0.005]
    assert holm(values) == pytest.approx([0.03, 0.06, 0.06, 0.02])  # Holm's own procedure by hand
