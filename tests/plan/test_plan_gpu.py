"""The plan against a GPU's own count of bytes, over steps of rollout and learning."""

import pytest
import torch

from benchmarks.memory import bench_memory
from paceline.config import load_config
from paceline.policy.shapes import SHAPES

pytestmark = pytest.mark.gpu

SETTINGS = [
    "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=8",
    "rollout.max_running=64",
    "rollout.max_tokens=96",
    "eval.max_tokens=96",
    "task.max_prompt_tokens=192",
]


def test_planned_peaks_are_measured_peaks():
    point = bench_memory(load_config(None, SETTINGS), SHAPES["qwen3-1.7b"], torch.bfloat16, steps=2)
    assert point.planned.learning == pytest.approx(point.measured.learning, rel=0.1)
    assert point.planned.rollout == pytest.approx(point.measured.rollout, rel=0.1)
