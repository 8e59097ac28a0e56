"""Reward functions and tools as users write them, good and bad; `test_rewards.py` runs them in workers."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time

from paceline.tasks.base import Done, Observation


def length(response):
    return len(response)


def contains(response, answer, bonus=0.0):
    return {"score": float(answer in response) + bonus, "correct": answer in response}


def verl_style(data_source, solution_str, ground_truth, extra_info=None):
    return float(data_source == "sums" and solution_str == ground_truth and extra_info["index"] == 7)


def everything(**known):
    return float(known["extracted"] == known["answer"] and not known["truncated"])


def raises(response):
    raise RuntimeError("no such luck")


def exits(response):
    sys.exit(3)


def dies(response):
    os._exit(1)


def hangs(response):
    """Pure Python, so nothing but the end of its process stops it."""
    if response == "hang":
        subprocess.Popen(["sleep", os.environ["TEST_SLEEP"]])  # and what it started must go with it
        while True:
            pass
    return 1.0


def moody(response):
    mood = sum(map(ord, response))
    if mood % 5 == 0:
        while True:
            pass
    if mood % 5 == 1:
        os._exit(1)
    return len(response) / 24


def not_a_number(response):
    return {"nan": float("nan"), "none": None, "text": "many"}[response]


def process_id(response):
    return os.getpid()


def rank_by_length(response, answer):
    """Batched: needs the whole group."""
    ordered = sorted(response, key=len)
    return [ordered.index(text) for text in response]


def too_few(response):
    return [1.0]


def unknown_argument(response, colour):
    return 0.0


async def judge(response):
    if response == "raise":
        raise RuntimeError("refused")
    if response == "block":
        time.sleep(4)
    await asyncio.sleep(1000 if response == "hang" else 0.3)
    return len(response) / 10


async def stubborn(response):
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(1000)


async def judge_group(response):
    await asyncio.sleep(0.01)
    return [len(text) for text in response]


def echo_twice(problem, conversation):
    """A tool: answers the first two responses."""
    sampled = [turn for turn in conversation if turn.sampled]
    return Observation(f"{len(sampled)};") if len(sampled) <= 2 else Done()


def broken_tool(problem, conversation):
    raise RuntimeError("out of order")


def wrong_tool(problem, conversation):
    return "text"


def garbled_tool(problem, conversation):
    return Observation(17)
