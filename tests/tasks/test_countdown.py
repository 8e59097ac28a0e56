"""Countdown: problems with solutions, a strict verifier, searches that are true and long-tailed."""

import math
import random
import re
import statistics
import time

import pytest

from paceline.config import ConfigError, load_config
from paceline.policy.tokenizer import EOS, character_tokenizer
from paceline.tasks.base import Problem
from paceline.tasks.countdown import Countdown, draw_problem, parse_options
from paceline.tasks.countdown_answer import solves
from paceline.tasks.countdown_search import RENDERINGS, write_search
from paceline.tasks.make import task_alphabet
from tests.tasks.countdown_oracle import reachable, value_and_numbers

SMALL = load_config("countdown-small").task.options
LARGE = load_config("countdown").task.options


def problem_of(numbers, target):
    return Problem("x", "", "", {"numbers": tuple(numbers), "target": target})


# -- problems -----------------------------------------------------------------------------------------------


def test_countdown_problems_are_a_pure_function_of_the_seed():
    one, again, other = (Countdown(LARGE, seed, 40, 20) for seed in (3, 3, 4))
    assert [*one.train, *one.held_out] == [*again.train, *again.held_out]
    assert one.train != other.train
    assert len(one.train) == 40 and len(one.held_out) == 20
    assert Countdown(LARGE, 3, 60, 1).train[:40] == one.train


@pytest.mark.parametrize("options", [SMALL, pytest.param(LARGE, marks=pytest.mark.slow)])
def test_countdown_problems_keep_to_the_options_and_have_a_solution(options):
    task = Countdown(options, 0, 60, 20)
    limits = parse_options(options)
    for problem in [*task.train, *task.held_out]:
        numbers, target = problem.extra["numbers"], problem.extra["target"]
        assert limits.min_numbers <= len(numbers) <= limits.max_numbers
        assert max(numbers) <= limits.max_number and min(numbers) >= 1
        assert limits.min_target <= target <= limits.max_target
        assert problem.prompt == task.rendering.ask(numbers, target)
        assert target in reachable(numbers)
        value, used = value_and_numbers(problem.answer)
        assert value == target and sorted(used) == sorted(numbers)


def test_countdown_held_out_problems_occur_nowhere_else():
    """Neither in another order of the numbers, nor among the demonstrations."""

    def keys(problems):
        return {(tuple(sorted(p.extra["numbers"])), p.extra["target"]) for p in problems}

    task = Countdown(SMALL, 0, 256, 256)
    held_out = keys(task.held_out)
    assert len(held_out) == 256 and len(keys(task.train)) == 256
    assert not held_out & keys(task.train)
    assert not held_out & keys(d.problem for d in task.demonstrations(2000, 0))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"numbers": 4}, r"task\.options\.numbers: countdown has no such option; it knows min_numbers"),
        ({"max_numbers": 9}, r"task\.options\.max_numbers = 9: Input should be less than or equal to 6"),
        ({"max_number": "many"}, r"task\.options\.max_number = 'many'"),
        ({"min_numbers": 5}, r"min_numbers = 5 is above task\.options\.max_numbers = 4; lower the one"),
        ({"max_value": 50}, r"max_target = 100 is above task\.options\.max_value = 50"),
        ({"rendering": "prose"}, r"task\.options\.rendering = 'prose': .*'words' or 'compact'"),
        ({"min_numbers": 2, "max_numbers": 2, "max_number": 2}, r"gave \d+ different problems.*lower them"),
    ],
)
def test_countdown_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Countdown({"min_target": 2} | options, 0, 20, 20)


def test_countdown_options_are_refused_for_other_tasks():
    with pytest.raises(ConfigError, match="only to countdown, reasoning-gym"):
        load_config(None, ["task.options={min_numbers: 3}"])


# -- answers ------------------------------------------------------------------------------------------------


def random_expression(rng: random.Random, numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0]) if rng.random() < 0.9 else f"({numbers[0]})"
    cut = rng.randint(1, len(numbers) - 1)
    left, right = random_expression(rng, numbers[:cut]), random_expression(rng, numbers[cut:])
    space = rng.choice(("", " "))
    text = f"{left}{space}{rng.choice('+-*/')}{space}{right}"
    return f"({text})" if rng.random() < 0.6 else text


def test_countdown_verifier_agrees_with_pythons_parser():
    rng = random.Random(0)
    verdicts = []
    for _ in range(4000):
        numbers = [rng.randint(1, 12) for _ in range(rng.randint(2, 5))]
        used = rng.choice((numbers, rng.sample(numbers, len(numbers)), numbers[1:], [*numbers, numbers[0]]))
        text = random_expression(rng, used)
        try:
            value, found = value_and_numbers(text)
            targets = {int(value), int(value) + 1}
        except ZeroDivisionError:
            value, found, targets = None, used, {1}
        for target in targets:
            expected = value == target and sorted(found) == sorted(numbers)
            assert solves(text, numbers, target) is expected, (text, numbers, target)
            verdicts.append(expected)
    assert 500 < sum(verdicts) < len(verdicts) / 2


@pytest.mark.parametrize(
    "answer, correct",
    [
        ("(5*3)+7", True),
        (" 7 + 5 * 3 ", True),
        ("((7)+(5*3))", True),
        ("5*(3+7)-28", False),
        ("7+15", False),
        ("5*3+7=22", False),
        ("5×3+7", False),
        ("٥*3+7", False),
        ("５*3+7", False),
        ("²", False),
        ("05*3+7", False),
        ("5.0*3+7", False),
        ("5**3+7", False),
        ("5//3+7", False),
        ("-5*3+37", False),
        ("+7+5*3", False),
        ("7+-5*-3", False),
        ("7 5*3", False),
        ("5(3)+7", False),
        ("(5)(3)+7", False),
        ("()5*3+7", False),
        ("(5*3)+7)", False),
        ("((5*3)+7", False),
        (")5*3+7(", False),
        ("5*3+7+", False),
        ("5*3+7\n22", False),
        ("5*3+7/0", False),
        ("7/(5-5)+3", False),
        ("__import__('os')", False),
        ("", False),
    ],
)
def test_countdown_verifier_reads_answers_strictly(answer, correct):
    assert solves(answer, [3, 5, 7], 22) is correct


def test_countdown_verifier_accepts_fractions_and_negative_intermediate_values():
    assert solves("8/(3-8/3)", [3, 3, 8, 8], 24)
    assert solves("3-5+24", [3, 5, 24], 22)
    assert not solves("8/(4-4)", [4, 4, 8], 8)


@pytest.mark.parametrize("rendering, marker", [("words", "Answer: "), ("compact", "#")])
def test_countdown_scores_only_the_end_of_a_response(rendering, marker):
    task = Countdown(LARGE | {"rendering": rendering}, 0, 1, 1)
    problem = problem_of([3, 5, 7], 22)
    right = f"{marker}(5*3)+7"

    def correct(text, truncated=False):
        return task.score(problem, text, truncated).correct

    assert correct(right) and correct(f"{right}\n") and correct(f"{marker}3+5\n{right}")
    assert not correct(right, truncated=True)
    assert not correct(f"{right}\nor {marker}3*5*7") and not correct(f"{right}\nI think")
    assert not correct("(5*3)+7") and not correct("") and not correct(marker)
    assert not correct(f"{marker}none") and not correct(f"{marker}?")
    assert correct(f"no {right}") is (rendering == "compact"), "words: the answer has a line of its own"


@pytest.mark.parametrize(
    "hostile",
    [
        "(" * 100_000,
        "#" * 100_000,
        "#" + "(" * 99_999 + "7",
        "#" + "7+" * 50_000 + "7",
        "#" + "9" * 100_000,
        "#" + " " * 100_000 + "(5*3)+7",
        "\n" * 100_000 + "Answer: " + "-" * 190,
        "Answer: " * 12_500,
        "#" + "(" * 95 + "5*3+7" + ")" * 95,
        "#(5*3)+7" + "\u2003" * 100_000 + "x",
        "#" + "９" * 150,
        "#" + "999999*" * 27 + "999999",
        "#5*3+7\x00",
        "#" + "\ud800" * 100,
    ],
    ids=range(14),
)
def test_countdown_scores_hostile_responses_quickly(hostile):
    start = time.process_time()
    for rendering in RENDERINGS:
        task = Countdown(LARGE | {"rendering": rendering}, 0, 1, 1)
        correct = task.score(problem_of([3, 5, 7], 22), hostile, False).correct
        assert correct is (rendering == "compact" and "5*3+7))" in hostile)
    assert time.process_time() - start < 1.0


# -- searches -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [SMALL, LARGE, LARGE | {"patience": 0, "min_numbers": 3, "max_numbers": 3}]
)
def test_countdown_search_has_only_true_lines(options):
    """Equations hold, tables are what the equations leave, going back leads to a table that was there."""
    task = Countdown(options, 0, 4, 4)
    limits = parse_options(options)
    separator = r">\d+;|>\d+(?=#)|[;\[\]<#]|(?: for \d+)?\n| leaves |back to |Answer: "
    for demonstration in task.demonstrations(150, 5):
        numbers = demonstration.problem.extra["numbers"]
        table: list[int] = list(numbers)
        seen = [sorted(table)]
        parts = [part for part in re.split(separator, demonstration.response)[:-1] if part]
        for part in parts:
            if "=" not in part:
                values = [int(value) for value in part.split(",")]
                assert sorted(values) in seen, "a table that an equation left, or one to go back to"
                table = values
                continue
            left, _, right = part.partition("=")
            value, (a, b) = value_and_numbers(left)
            assert value == int(right) and 1 <= value <= limits.max_value and a >= b
            rest = table.copy()
            rest.remove(a)
            rest.remove(b)
            seen.append(sorted([*rest, int(right)]))


@pytest.mark.parametrize("options", [SMALL, LARGE])
def test_countdown_search_ends_in_a_right_answer_or_gives_up(options):
    task = Countdown(options, 0, 4, 4)
    given_up = 0
    for demonstration in task.demonstrations(300, 1):
        if demonstration.response.endswith(task.rendering.gave_up):
            given_up += 1
        else:
            assert task.score(demonstration.problem, demonstration.response, False).correct
    assert 40 < given_up < 200
    patient = Countdown(options | {"patience": 0}, 0, 4, 4)
    for demonstration in patient.demonstrations(40, 1):
        assert patient.score(demonstration.problem, demonstration.response, False).correct


def test_countdown_searches_are_a_pure_function_of_problem_and_seed():
    task = Countdown(SMALL, 0, 4, 4)
    assert list(task.demonstrations(50, 1)) == list(task.demonstrations(50, 1))
    assert list(task.demonstrations(50, 1))[:20] == list(task.demonstrations(20, 1))
    assert list(task.demonstrations(50, 1)) != list(task.demonstrations(50, 2))
    searches = {write_search([3, 7, 8, 9], 60, 999, 0, task.rendering, str(seed)) for seed in range(20)}
    assert len(searches) > 15


def test_countdown_compact_searches_keep_to_their_alphabet():
    config = load_config("countdown-small").task
    alphabet = task_alphabet(config)
    tokenizer = character_tokenizer(alphabet)
    task = Countdown(SMALL, 0, 4, 4)
    used = set()
    for demonstration in task.demonstrations(200, 1):
        text = demonstration.problem.prompt + demonstration.response
        encoded = tokenizer.encode(text)
        assert tokenizer.decode(encoded.ids) == text and EOS not in encoded.tokens
        used |= set(encoded.tokens)
    assert used <= set(alphabet) and len(used) > 0.9 * len(alphabet), "a token for each number and symbol"


@pytest.mark.slow
def test_countdown_search_lengths_are_log_normal_with_a_heavy_tail():
    task = Countdown(LARGE, 0, 4, 4)
    lengths = sorted(len(d.response) for d in task.demonstrations(1500, 0))
    p50, p90, p99 = (lengths[int(share * len(lengths))] for share in (0.5, 0.9, 0.99))
    assert p90 > 2.5 * p50 and p99 > 5 * p50 and lengths[-1] > 8 * p50
    logs = [math.log(length) for length in lengths]
    mean, deviation = statistics.mean(logs), statistics.pstdev(logs)
    skew = statistics.mean(((x - mean) / deviation) ** 3 for x in logs)
    assert 0.8 < deviation < 1.4 and abs(skew) < 0.4, "a normal distribution of logarithms has no skew"


def test_countdown_problems_do_not_depend_on_the_rendering():
    words, compact = (
        draw_problem(random.Random(1), parse_options(LARGE | {"rendering": rendering}))
        for rendering in RENDERINGS
    )
    assert words.id == compact.id and words.prompt != compact.prompt


def test_processes_write_the_demonstrations_that_one_would(monkeypatch):
    task = Countdown({}, 0, 8, 8)
    alone = list(task.demonstrations(12, 3))
    monkeypatch.setattr("paceline.tasks.countdown.WORTH_PROCESSES", 1)
    assert list(task.demonstrations(12, 3)) == alone
