"""Tests whether sampled tokens follow the probabilities they should have been drawn from.

Token n falls into bin b with probability p_n(b), which differs from token to token because the context does.
Given everything before it, that is all that is known about it; so counts minus expectations are a sum of
martingale differences whose covariance is known, S = sum_n (diag(p_n) - p_n p_n^T), and d^T S^-1 d is
chi-square distributed for many tokens (the martingale central limit theorem, Brown 1971). With one context
this is Pearson's chi-square test. Conditioning on anything that was decided before the token, such as that a
step got as far as its third position, changes nothing.

Where p_n is known only up to rounding, perturbed copies of it show how far that alone may shift counts. A
shift of m makes the statistic noncentral chi-square with m^T S^-1 m, and tokens that p_n rules out may appear
as often as the copies let them.
"""

from dataclasses import dataclass

import torch

# Variance of a bin's count; smaller bins are pooled, since their counts are far from normal.
MIN_VARIANCE = 25.0

# Factor on what the copy that moved most explains: the backend is one more copy, and may have moved farther.
ROUNDING_MARGIN = 2.0

# Tokens ruled out by rounding that no copy happened to show.
UNSEEN = 0.5

# Eigenvalues of the covariance below this share of the largest belong to bins that always fall together.
MIN_EIGENVALUE = 1e-6


@dataclass(frozen=True)
class FrequencyTest:
    """The result of a test of frequencies."""

    statistic: float  # chi-square, summed over strata
    degrees: int  # 0: too little randomness to test
    p_value: float
    tokens: int
    observed_top: float  # share of the tokens that were their context's most likely one
    expected_top: float
    ruled_out: int = 0  # tokens that should not have been possible
    explained: float = 0.0  # how many of those rounding may explain
    shift: float = 0.0  # of the statistic, that rounding may explain


def test_frequencies(
    probabilities_NB: torch.Tensor,
    observed_N: torch.Tensor,
    stratum_N: torch.Tensor | None = None,
    perturbed_NSB: torch.Tensor | None = None,
) -> FrequencyTest:
    """Tests the tokens' bins `observed_N` against their probabilities.

    Each stratum is tested separately and the statistics are added; which stratum a token belongs to must be
    known before the token.
    """
    probabilities_NB = probabilities_NB.double()
    perturbed_SNB = (
        probabilities_NB.new_zeros(0, *probabilities_NB.shape)
        if perturbed_NSB is None
        else perturbed_NSB.double().transpose(0, 1)
    )
    ruled_out_NB = probabilities_NB <= 0
    impossible_N = ruled_out_NB.gather(1, observed_N.unsqueeze(1)).squeeze(1)
    explained = (
        UNSEEN + ROUNDING_MARGIN * float((perturbed_SNB * ruled_out_NB).sum((1, 2)).max())
        if perturbed_SNB.numel()
        else 0.0
    )
    possible = (~impossible_N).nonzero().flatten()
    strata = (
        [possible]
        if stratum_N is None
        else [possible[stratum_N[possible] == s] for s in stratum_N[possible].unique()]
    )
    statistic, degrees, shift_S = _summed_chi_square(probabilities_NB, observed_N, perturbed_SNB, strata)
    shift = ROUNDING_MARGIN * float(shift_S.max()) if len(shift_S) else 0.0
    ruled_out = int(impossible_N.sum())
    p_value = chi_square_tail(statistic, degrees, shift)
    if ruled_out:  # two tests, hence twice the smaller p-value (Bonferroni)
        p_value = min(1.0, 2 * p_value, 2 * poisson_tail(ruled_out, explained))
    top_N = probabilities_NB[:, 0]
    return FrequencyTest(
        statistic=statistic,
        degrees=degrees,
        p_value=p_value,
        tokens=len(observed_N),
        observed_top=float((observed_N == 0).double().mean()),
        expected_top=float(top_N.mean()),
        ruled_out=ruled_out,
        explained=explained,
        shift=shift,
    )


test_frequencies.__test__ = False  # not one of pytest's


def _summed_chi_square(
    probabilities_NB: torch.Tensor,
    observed_N: torch.Tensor,
    perturbed_SNB: torch.Tensor,
    strata: list[torch.Tensor],
) -> tuple[float, int, torch.Tensor]:
    """Returns the sums of `_chi_square` over strata, given as indices of tokens."""
    statistic = 0.0
    degrees = 0
    shift_S = probabilities_NB.new_zeros(len(perturbed_SNB))
    for index in strata:
        part_statistic, part_degrees, part_shift_S = _chi_square(
            probabilities_NB[index], observed_N[index], perturbed_SNB[:, index]
        )
        statistic += part_statistic
        degrees += part_degrees
        shift_S = shift_S + part_shift_S
    return statistic, degrees, shift_S


def _chi_square(
    probabilities_NB: torch.Tensor, observed_N: torch.Tensor, perturbed_SNB: torch.Tensor
) -> tuple[float, int, torch.Tensor]:
    """Returns the statistic, its degrees of freedom, and its noncentrality under each perturbed copy."""
    pools_B = _pools((probabilities_NB * (1 - probabilities_NB)).sum(0))
    count = int(pools_B.max()) + 1
    if count < 2:
        return 0.0, 0, torch.zeros(len(perturbed_SNB), dtype=torch.float64)
    pooled_NP = torch.zeros(len(observed_N), count, dtype=torch.float64).index_add_(
        1, pools_B, probabilities_NB
    )
    # Bins add up to the number of tokens, so the last one is redundant.
    expected_P = pooled_NP.sum(0)[:-1]
    pooled_NP = pooled_NP[:, :-1]
    difference_P = torch.bincount(pools_B[observed_N], minlength=count).double()[:-1] - expected_P
    shift_SB = perturbed_SNB.sum(1) - probabilities_NB.sum(0)
    shift_SP = torch.zeros(len(shift_SB), count, dtype=torch.float64).index_add_(1, pools_B, shift_SB)[:, :-1]
    covariance_PP = torch.diag(expected_P) - pooled_NP.T @ pooled_NP
    values, vectors = torch.linalg.eigh(covariance_PP)
    kept = values > values.max() * MIN_EIGENVALUE
    along = vectors.T[kept] @ difference_P
    shift_along = shift_SP @ vectors[:, kept]
    return float((along**2 / values[kept]).sum()), int(kept.sum()), (shift_along**2 / values[kept]).sum(1)


def _pools(variance_B: torch.Tensor) -> torch.Tensor:
    """Returns the pool of each bin: neighbours share one until their count varies enough.

    Bins that are left at the end join the last pool.
    """
    pools = []
    pool = 0
    gathered = 0.0
    for variance in variance_B.tolist():
        pools.append(pool)
        gathered += variance
        if gathered >= MIN_VARIANCE:
            pool += 1
            gathered = 0.0
    if gathered < MIN_VARIANCE:
        pools = [min(p, max(0, pool - 1)) for p in pools]
    return torch.tensor(pools)


def chi_square_tail(statistic: float, degrees: int, noncentrality: float = 0.0) -> float:
    """Returns the probability of a statistic at least as large.

    A noncentral chi-square is a central one with 2 j more degrees of freedom, where j is Poisson distributed
    with half the noncentrality as its mean.
    """
    if degrees == 0:
        return 1.0
    half = noncentrality / 2
    more_J = torch.arange(int(half + 12 * half**0.5) + 13 if half else 1, dtype=torch.float64)
    tails_J = torch.special.gammaincc(degrees / 2 + more_J, torch.full_like(more_J, statistic / 2))
    if not half:
        return float(tails_J)
    weights_J = (
        more_J * torch.tensor(half, dtype=torch.float64).log() - half - torch.lgamma(more_J + 1)
    ).exp()
    return float((weights_J * tails_J).sum())


def poisson_tail(count: int, mean: float) -> float:
    """Returns the probability of `count` or more events."""
    if count == 0:
        return 1.0
    case = torch.tensor([count, mean], dtype=torch.float64)
    return float(torch.special.gammainc(case[0], case[1]))


def holm(p_values: list[float]) -> list[float]:
    """Returns p-values adjusted for their number (Holm 1979), in the given order.

    Calling anything below alpha wrong then has an error rate of alpha over all of them.
    """
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, p_values[index] * (len(p_values) - rank)))
        adjusted[index] = largest
    return adjusted
