"""Saved groups: what is written is read again, and what cannot be learned from is refused."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.policy.tokenizer import character_tokenizer
from paceline.rollout.samples import read_groups, write_groups
from tests.learning.samples import make_groups

TOKENIZER = character_tokenizer("0123456789+-= abcdefghijklmnopqrst")


def test_read_groups_returns_what_write_groups_wrote(tmp_path):
    groups = make_groups()
    write_groups(tmp_path / "a.jsonl", groups, TOKENIZER)
    assert read_groups(tmp_path / "a.jsonl") == groups


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_read_groups_refuses_a_reward_that_is_not_finite(tmp_path, reward):
    """Not a number everywhere would pass for rewards that are all equal."""
    groups = make_groups()
    scored = tuple(replace(s, score=replace(s.score, reward=reward)) for s in groups[1].samples)
    write_groups(tmp_path / "a.jsonl", [groups[0], replace(groups[1], samples=scored)], TOKENIZER)
    with pytest.raises(ValueError, match=f"a.jsonl:2 is not a saved group.*the reward of 1/0 is {reward}"):
        read_groups(tmp_path / "a.jsonl")


def damaged(tmp_path, change) -> Path:
    """Writes two groups, the second one's record changed."""
    path = tmp_path / "a.jsonl"
    write_groups(path, make_groups(), TOKENIZER)
    first, second = map(json.loads, path.read_text().splitlines())
    change(second)
    path.write_text(f"{json.dumps(first)}\n{json.dumps(second)}\n")
    return path


@pytest.mark.parametrize(
    "change, problem",
    [
        (lambda group: group["samples"].clear(), "it has no samples"),
        (lambda group: group["samples"][1]["logprobs"].pop(), "1/1 has 6 tokens and 5 logprobs"),
        (lambda group: group["samples"][1]["logprobs"].append(None), "1/1 has a logprob that is no number"),
        (lambda group: group["samples"][1]["tokens"].append(-1), "1/1 has a token that is no id"),
        (lambda group: group["samples"][1]["tokens"].append("x"), "1/1 has a token that is no id"),
        (lambda group: group["samples"][1]["request"]["prompt"].append(0.5), "1/1 has a token that is no id"),
        (lambda group: group["samples"][1]["request"]["prompt"].clear(), "1/1 has no prompt"),
        (lambda group: group["samples"][1]["segments"][-1].update(stop=99), "1/1 has a segment up to 99"),
        (lambda group: group["samples"][1].update(request="x"), "AttributeError"),
    ],
)
def test_read_groups_refuses_an_inconsistent_group(change, problem, tmp_path):
    path = damaged(tmp_path, change)
    with pytest.raises(ValueError, match=f"a.jsonl:2 is not a saved group.*{problem}"):
        read_groups(path)


@pytest.mark.parametrize("content, problem", [(b"", "holds no group"), (b"\xff\xfe{}", "is no text")])
def test_read_groups_refuses_a_file_without_groups(content, problem, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=f"a.jsonl {problem}"):
        read_groups(tmp_path / "a.jsonl")


def test_write_groups_keeps_the_old_file_when_it_fails(tmp_path):
    """Killed or failed in the middle of a file: it is the old one, and nothing else counts as saved."""
    path = tmp_path / "step_000001.jsonl"
    write_groups(path, make_groups(), TOKENIZER)
    before = path.read_bytes()

    def groups():
        yield make_groups(seed=1)[0]
        assert path.read_bytes() == before, "a kill here would leave a file that is cut off"
        assert list(tmp_path.glob("step_*")) == [path]
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_groups(path, groups(), TOKENIZER)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
