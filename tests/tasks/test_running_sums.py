"""The built-in task: disjoint problems, exact scoring, a resumable order."""

import random

import pytest

from paceline.policy.tokenizer import character_tokenizer, load_tokenizer, save_tokenizer
from paceline.tasks.order import ProblemOrder
from paceline.tasks.running_sums import ALPHABET, RunningSums, draw_problem


def total_of(prompt: str) -> int:
    return sum(int(c) for c in prompt if c.isdigit())


def test_running_sums_problems_are_unique_disjoint_and_reproducible():
    task = RunningSums(0, 128, 512)
    prompts = [p.prompt for p in (*task.train, *task.held_out)]
    assert len(task.train) == 128 and len(task.held_out) == 512 and len(set(prompts)) == 640
    assert all(p.answer == str(total_of(p.prompt)) for p in task.train)
    assert prompts == [
        p.prompt for p in (*RunningSums(0, 128, 512).train, *RunningSums(0, 128, 512).held_out)
    ]
    assert prompts != [p.prompt for p in RunningSums(1, 128, 512).train]


def test_running_sums_lengths_have_a_long_tail():
    counts = sorted(len(p.prompt) // 2 for p in RunningSums(0, 2000, 1).train)
    assert counts[0] == 2 and counts[-1] >= 20 and 4 <= counts[1000] <= 6


@pytest.mark.parametrize(
    "response, truncated, correct",
    [
        ("#25", False, True),
        ("a9:9;b8:17;c8:25;#25", False, True),
        ("#24", False, False),
        ("#25", True, False),
        ("#25;", False, False),
        ("25", False, False),
        ("#025", False, False),
        ("", False, False),
        ("#1#25", False, True),
    ],
)
def test_running_sums_scores_the_number_after_the_last_hash(response, truncated, correct):
    task = RunningSums(0, 1, 1)
    problem = draw_problem(random.Random(0)).__class__(id="x", prompt="a9b8c8=", answer="25")
    score = task.score(problem, response, truncated)
    assert score.correct is correct and score.reward == float(correct)


def test_running_sums_tokenizer_round_trips(tmp_path):
    tokenizer = character_tokenizer(ALPHABET)
    save_tokenizer(tokenizer, tmp_path)
    for t in (tokenizer, load_tokenizer(tmp_path)):
        ids = t.encode("a9b8=a9:9;#17").ids
        assert len(ids) == 13 and t.decode(ids) == "a9b8=a9:9;#17"
        assert t.decode([*ids, 0]) == "a9b8=a9:9;#17", "the end token is not part of the text"


def test_problem_order_resumes_anywhere():
    problems = RunningSums(0, 10, 1).train
    whole = ProblemOrder(problems, seed=3).take(45)
    assert sorted(p.id for p in whole[10:20]) == sorted(p.id for p in problems), (
        "every epoch visits each problem once"
    )
    assert whole[:10] != whole[10:20]
    for start in (0, 7, 10, 31):
        assert ProblemOrder(problems, 3, position=start).take(14) == whole[start : start + 14]
    order = ProblemOrder(problems, 3)
    assert [p for n in (3, 9, 1, 12) for p in order.take(n)] == whole[:25]
