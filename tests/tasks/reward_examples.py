"""Reward functions and tools as users write them, good and bad; `test_rewards.py` runs them in workers."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time

from paceline.tasks.base import Done, Observation

# More descriptors than a worker has; the connection's number is the one that it has in the tests' process.
MANY = 4096


def length(response):
    return len(response)


def contains(response, answer, bonus=0.0):
    return {"score": float(answer in response) + bonus, "correct": answer in response}


def verl_style(data_source, solution_str, ground_truth, extra_info=None):
    return float(data_source == "sums" and solution_str == ground_truth and extra_info["index"] == 7)


def as_in_trl(prompts, completions, **kwargs):
    return [1.0 for _ in completions]


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
    return {"nan": float("nan"), "none": None, "text": "many", "1": "1"}[response]


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


def unknown_beside_everything(colour, **known):
    return 1.0


def by_position(response, /):
    return 1.0


def by_position_and_everything(response, /, **known):
    return 1.0


def by_position_or_not(answer="", /, response=""):
    return 1.0


def any_position(*response):
    return 1.0


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


def forks(response):
    """The child comes back from here, too, later than its parent and with another score."""
    if os.fork() == 0:
        time.sleep(0.05)
        return -100.0
    return len(response)


def forks_first(response):
    """The child comes back before its parent does."""
    if os.fork() == 0:
        return -100.0
    time.sleep(0.05)
    return len(response)


def forks_and_leaves(response):
    """The parent goes, and the child comes back with a score."""
    if os.fork():
        os._exit(0)
    return -100.0


def forks_and_raises(response):
    if os.fork() == 0:
        raise RuntimeError("the child's")
    return len(response)


def forks_with_multiprocessing(response):
    import multiprocessing

    with multiprocessing.get_context("fork").Pool(2) as pool:
        return sum(pool.map(len, list(response)))


def daemonises(response):
    """Leaves a process behind that has left its session and has no parent."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(3, MANY)
            os.execvp("sleep", ["sleep", os.environ["TEST_SLEEP"]])
        os._exit(0)
    if response == "die":
        time.sleep(0.3)
        os._exit(1)
    if response == "hang":
        time.sleep(1000)
    return 1.0


def prints(response):
    print(f"printed about {response}")
    print("an error line", file=sys.stderr)
    os.write(1, b"past Python\n")
    subprocess.run(["echo", "by a child"], check=True)
    return 1.0


def prints_much(response):
    for _ in range(50):
        os.write(1, b"x" * (1 << 20))
    return 1.0


def takes_memory(response):
    if response == "much":
        return len(bytearray(3 * 10**9)) / 3e9
    return len(bytearray(10**7)) / 1e7


def closes_everything(response):
    os.closerange(0, MANY)
    return 1.0


def reopens_everything(response):
    """Its next file gets the number that the connection had."""
    os.closerange(3, MANY)
    for number in range(8):
        os.open(f"{os.environ['TEST_FOLDER']}/{number}", os.O_CREAT | os.O_RDWR)
    return 1.0


def writes_into_the_connection(response):
    for descriptor in range(3, MANY):
        with contextlib.suppress(OSError):
            os.write(descriptor, b"\xff" * 100)
    return 1.0


def huge(response):
    return float(response)


def imports_slowly(response):
    import slow_to_import  # type: ignore[import-not-found]

    return slow_to_import.ONE


def counts_signals(response):
    """Sends its own process what a scheduler sends to every process of a job."""
    import signal

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(os.getpid(), number)
    child = subprocess.Popen(["sleep", "100"])
    child.terminate()
    return float(child.wait() == -signal.SIGTERM)


def long_observation(problem, conversation):
    return Observation("x" * (1 << 29))
