"""What a step is said to take on a CPU: its own work, whatever else the machine does meanwhile."""

import time

import pytest
import torch

from paceline.engine.step_timer import StepTimer


def work(seconds: float) -> float:
    """Returns the processor time that it took: a virtual machine that stands still may be charged for it."""
    start = now = time.thread_time()
    while now < start + seconds:
        now = time.thread_time()
    return now - start


def test_step_timer_counts_work_but_not_waiting_for_the_processor():
    """Else a strategy that was timed while the machine was busy would look slow for thousands of steps."""
    timer = StepTimer(torch.device("cpu"))
    timer.begin()
    drafting = work(0.02)
    time.sleep(0.3)
    timer.note_drafted()
    verifying = work(0.04)
    time.sleep(0.3)
    assert timer.finish().seconds() == pytest.approx((drafting, verifying), abs=0.015)


def test_step_timer_reports_prefills_in_wall_clock_time():
    """It is taken off what a rollout's steps took by that clock."""
    timer = StepTimer(torch.device("cpu"))
    timer.begin()
    with timer.prefill():
        time.sleep(0.05)
    timing = timer.finish()
    assert timing.disturbed and timing.prefill_seconds() >= 0.05
