"""Brings curves with their own x values onto one list, and thins long ones without losing their extremes."""

from collections.abc import Mapping, Sequence

import numpy as np

# A column of numbers, NaN where there is none.
Column = np.ndarray


def aligned(curves: Sequence[tuple[Column, Column]]) -> tuple[Column, list[Column]]:
    """Returns all x values in order, and each curve's values there."""
    if not curves:
        return np.zeros(0), []
    xs = np.unique(np.concatenate([curve_xs for curve_xs, _ in curves]))
    columns = []
    for curve_xs, ys in curves:
        full = np.full(len(xs), np.nan)
        full[np.searchsorted(xs, curve_xs)] = ys
        columns.append(full)
    return xs, columns


def thinned(xs: Column, ys: Column, limit: int) -> tuple[Column, Column]:
    """Returns at most `limit` points: of each stretch of the curve its lowest and its highest value.

    So a single outlier among a hundred thousand steps is still there.
    """
    finite = np.isfinite(ys)
    if not finite.all():
        xs, ys = xs[finite], ys[finite]
    count = len(xs)
    if count <= limit:
        return xs, ys
    size = -(-count // max(1, (limit - 4) // 2))  # points of a stretch
    whole = count // size * size
    stretches = ys[:whole].reshape(-1, size)
    starts = np.arange(0, whole, size)
    places = [stretches.argmin(axis=1) + starts, stretches.argmax(axis=1) + starts]
    if whole < count:
        places += [[whole + ys[whole:].argmin(), whole + ys[whole:].argmax()]]
    order = np.unique(np.concatenate([[0, count - 1], *places]))
    return xs[order], ys[order]


def averaged(xs: Column, columns: Mapping[str, Column], limit: int) -> tuple[Column, dict[str, Column]]:
    """Returns at most `limit` points of curves that are stacked: the mean of each stretch of x values.

    Means add up; lowest and highest values would not. A value that is missing counts as 0.
    """
    filled = {name: np.nan_to_num(numbers, nan=0.0) for name, numbers in columns.items()}
    if len(xs) <= limit:
        return xs, filled
    edges = np.linspace(0, len(xs), limit + 1).astype(int)
    sizes = np.diff(edges)
    means = {name: np.add.reduceat(numbers, edges[:-1]) / sizes for name, numbers in filled.items()}
    return xs[edges[:-1]], means
