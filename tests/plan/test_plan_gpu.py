"""The plan against a GPU's own count of bytes, over steps of rollout and learning
(`bench/gpu_plan_check.py`).
"""

import pytest

from bench.gpu_plan_check import check

pytestmark = pytest.mark.gpu


def test_planned_peaks_are_measured_peaks():
    planned, measured = check("qwen3-1.7b-full")
    assert planned.learning == pytest.approx(measured.learning, rel=0.1)
    assert planned.rollout == pytest.approx(measured.rollout, rel=0.1)
