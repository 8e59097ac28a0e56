"""Levenberg-Marquardt over the logarithms of positive parameters, on relative errors.

scipy has a general one, but it is no dependency of the package, and this needs only numpy.
"""

from collections.abc import Callable

import numpy as np

DIFFERENCE = 1e-5  # step of the numerical derivatives, in logarithms
FIRST_DAMPING = 1e-2
MAX_DAMPING = 1e8  # beyond this no step helps
CONVERGED = 1e-12  # an improvement of the sum of squares that ends the search


def fit_positive(
    predict: Callable[[np.ndarray], np.ndarray],
    measured: np.ndarray,
    start: np.ndarray,
    iterations: int = 200,
) -> np.ndarray:
    """Returns the parameters > 0 that minimise sum(log(predict / measured)^2)."""
    theta = np.log(np.asarray(start, dtype=float))
    target = np.log(np.asarray(measured, dtype=float))
    identity = np.eye(len(theta))

    def residual(t: np.ndarray) -> np.ndarray:
        return np.log(np.maximum(predict(np.exp(t)), 1e-30)) - target

    current = residual(theta)
    damping = FIRST_DAMPING
    for _ in range(iterations):
        columns = [(residual(theta + step) - current) / DIFFERENCE for step in DIFFERENCE * identity]
        jacobian = np.stack(columns, axis=1)
        normal = jacobian.T @ jacobian
        damped = normal + damping * (np.diag(np.diag(normal)) + 1e-9 * identity)
        move = np.linalg.solve(damped, -(jacobian.T @ current))
        tried = theta + np.clip(move, -1.0, 1.0)
        new = residual(tried)
        if new @ new < current @ current:
            if current @ current - new @ new < CONVERGED:
                return np.exp(tried)
            theta, current = tried, new
            damping /= 3
        else:
            damping *= 4
            if damping > MAX_DAMPING:
                break
    return np.exp(theta)
