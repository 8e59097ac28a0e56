"""Levenberg-Marquardt over the logarithms of positive parameters, on relative errors. Small on purpose: numpy
is all it needs.
"""

from collections.abc import Callable

import numpy as np


def fit_positive(
    predict: Callable[[np.ndarray], np.ndarray],
    measured: np.ndarray,
    start: np.ndarray,
    iterations: int = 200,
) -> np.ndarray:
    """Parameters > 0 that minimise sum(log(predict / measured)^2)."""
    theta = np.log(np.asarray(start, dtype=float))
    target = np.log(np.asarray(measured, dtype=float))

    def residual(t: np.ndarray) -> np.ndarray:
        return np.log(np.maximum(predict(np.exp(t)), 1e-30)) - target

    damping, current = 1e-2, residual(theta)
    for _ in range(iterations):
        jacobian = np.stack(
            [(residual(theta + step) - current) / 1e-5 for step in 1e-5 * np.eye(len(theta))], axis=1
        )
        normal, gradient = jacobian.T @ jacobian, jacobian.T @ current
        move = np.linalg.solve(
            normal + damping * (np.diag(np.diag(normal)) + 1e-9 * np.eye(len(theta))), -gradient
        )
        tried = theta + np.clip(move, -1.0, 1.0)
        new = residual(tried)
        if new @ new < current @ current:
            if current @ current - new @ new < 1e-12:
                return np.exp(tried)
            theta, current, damping = tried, new, damping / 3
        else:
            damping *= 4
            if damping > 1e8:
                break
    return np.exp(theta)
