"""Kernels run interpreted on a machine without a GPU, and for real (marked `gpu`) on one with."""

import numpy as np
import pytest

from paceline.kernels.triton_support import INTERPRETED
from tests.quick_interpreter import quicken

if INTERPRETED:
    quicken()


@pytest.fixture(params=[pytest.param("cpu", id="interpreted"), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    if request.param == "cpu":
        pytest.importorskip("triton", reason="triton is not installed: its kernels cannot be interpreted")
        if not INTERPRETED:
            pytest.skip("kernels are compiled here, not interpreted")
    return request.param


@pytest.fixture
def independent_rows(monkeypatch):
    """Makes a row of an interpreted product independent of the other rows, as it is on a GPU.

    The interpreter asks a BLAS, which may add up in another order for another number of rows. Here every
    element is added up from the first place to the last, so what lies at another place still shows.
    """
    interpreter = pytest.importorskip("triton.runtime.interpreter")

    def create_dot(self, a, b, d, *precision):
        assert a.data.dtype == b.data.dtype == np.float32, "other types are not handled here"
        total = np.zeros_like(d.data)
        for k in range(a.data.shape[1]):
            total += a.data[:, k, None] * b.data[k]
        return interpreter.TensorHandle(total + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
