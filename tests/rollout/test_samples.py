"""Saved groups: what is written is read again, and what cannot be learned from is refused."""

import math
from dataclasses import replace

import pytest

from paceline.policy.tokenizer import character_tokenizer
from paceline.rollout.samples import read_groups, write_groups
from tests.learning.samples import make_groups

TOKENIZER = character_tokenizer("0123456789+-= abcdefghijklmnopqrst")


def test_saved_groups_are_read_as_they_were(tmp_path):
    groups = make_groups()
    write_groups(tmp_path / "a.jsonl", groups, TOKENIZER)
    assert read_groups(tmp_path / "a.jsonl") == groups


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused(tmp_path, reward):
    """Not a number everywhere would pass for rewards that are all equal."""
    groups = make_groups()
    scored = tuple(replace(s, score=replace(s.score, reward=reward)) for s in groups[1].samples)
    write_groups(tmp_path / "a.jsonl", [groups[0], replace(groups[1], samples=scored)], TOKENIZER)
    with pytest.raises(ValueError, match=f"a.jsonl:2 is not a saved group.*the reward of 1/0 is {reward}"):
        read_groups(tmp_path / "a.jsonl")
