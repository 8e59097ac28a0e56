"""Kernels run interpreted on a machine without a GPU, and for real (marked `gpu`) on one with."""

import pytest

from paceline.kernels.triton_support import INTERPRETED


@pytest.fixture(params=[pytest.param("cpu", id="interpreted"), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    if request.param == "cpu":
        pytest.importorskip("triton", reason="triton is not installed: its kernels cannot be interpreted")
        if not INTERPRETED:
            pytest.skip("kernels are compiled here, not interpreted")
    return request.param
