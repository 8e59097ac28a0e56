"""Do sampled tokens follow the probabilities they should have been drawn from?

Token n falls into bin b with probability p_n(b), which differs from token to token because the context does. Given everything
before it, that is all that may be said about it; so counts minus expectations are a sum of martingale differences whose
covariance is known, S = sum_n (diag(p_n) - p_n p_n^T), and d^T S^-1 d is chi-square distributed for many tokens (the martingale
central limit theorem, Brown 1971). With one context this is Pearson's chi-square test. Conditioning on anything that was
decided before the token, such as that a step got as far as its third position, changes nothing.
"""

from dataclasses import dataclass

import torch

MIN_VARIANCE = 25.0  # of a bin's count; smaller bins are pooled, since their counts are far from normal


@dataclass(frozen=True)
class FrequencyTest:
    statistic: float
    degrees: int  # 0: too little randomness to say anything
    p_value: float
    tokens: int
    observed_top: float  # share of the tokens that were their context's most likely one
    expected_top: float
    resolution: float  # the deviation of that share that would be five standard deviations


def test_frequencies(probabilities_NB: torch.Tensor, observed_N: torch.Tensor, stratum_N: torch.Tensor | None = None) -> FrequencyTest:
    """`observed_N` is each token's bin. Strata are tested each for itself and their statistics added; they must be known before the token."""
    probabilities_NB = probabilities_NB.double()
    statistic, degrees = 0.0, 0
    impossible = bool((probabilities_NB.gather(1, observed_N.unsqueeze(1)) <= 0).any())
    strata = [torch.arange(len(observed_N))] if stratum_N is None else [(stratum_N == s).nonzero().flatten() for s in stratum_N.unique()]
    for index in strata:
        part_statistic, part_degrees = _chi_square(probabilities_NB[index], observed_N[index])
        statistic, degrees = statistic + part_statistic, degrees + part_degrees
    p_value = 0.0 if impossible else _chi_square_tail(statistic, degrees)
    top_N = probabilities_NB[:, 0]
    tokens = len(observed_N)
    deviation = float((top_N * (1 - top_N)).sum().sqrt())
    return FrequencyTest(
        statistic, degrees, p_value, tokens, float((observed_N == 0).double().mean()), float(top_N.mean()), 5 * deviation / max(1, tokens)
    )


test_frequencies.__test__ = False  # not one of pytest's


def _chi_square(probabilities_NB: torch.Tensor, observed_N: torch.Tensor) -> tuple[float, int]:
    pools_B = _pools((probabilities_NB * (1 - probabilities_NB)).sum(0))
    count = int(pools_B.max()) + 1
    if count < 2:
        return 0.0, 0
    pooled_NP = torch.zeros(len(observed_N), count, dtype=torch.float64).index_add_(1, pools_B, probabilities_NB)
    # Bins add up to the number of tokens, so the last one says nothing new.
    pooled_NP, expected_P = pooled_NP[:, :-1], pooled_NP.sum(0)[:-1]
    difference_P = torch.bincount(pools_B[observed_N], minlength=count).double()[:-1] - expected_P
    covariance_PP = torch.diag(expected_P) - pooled_NP.T @ pooled_NP
    values, vectors = torch.linalg.eigh(covariance_PP)
    kept = values > values.max() * 1e-6  # bins that always fall together
    along = vectors.T[kept] @ difference_P
    return float((along**2 / values[kept]).sum()), int(kept.sum())


def _pools(variance_B: torch.Tensor) -> torch.Tensor:
    """Which pool each bin goes to: neighbours together until their count varies enough; what is left at the end joins the last."""
    pools, pool, gathered = [], 0, 0.0
    for variance in variance_B.tolist():
        pools.append(pool)
        gathered += variance
        if gathered >= MIN_VARIANCE:
            pool, gathered = pool + 1, 0.0
    if gathered < MIN_VARIANCE:
        pools = [min(p, max(0, pool - 1)) for p in pools]
    return torch.tensor(pools)


def _chi_square_tail(statistic: float, degrees: int) -> float:
    if degrees == 0:
        return 1.0
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def holm(p_values: list[float]) -> list[float]:
    """Adjusted p-values, in the given order: any below alpha means that something is wrong, with an error rate of alpha over all (Holm 1979)."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, p_values[index] * (len(p_values) - rank)))
        adjusted[index] = largest
    return adjusted
