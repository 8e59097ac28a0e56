"""The built-in policies' maker: honest demonstrations, and a folder of the shipped shape."""

import random

import pytest

from benchmarks.make_builtin import builtin_config, demonstration, main
from paceline.models.source import BUILTIN_POLICIES
from paceline.policy.config import read_config
from paceline.policy.tokenizer import load_tokenizer
from paceline.tasks.running_sums import RunningSums, draw_problem

pytestmark = pytest.mark.slow


def test_careful_demonstrations_are_right_and_sometimes_slip():
    rng = random.Random(1)
    task = RunningSums(0, 1, 1)
    problems = [draw_problem(rng) for _ in range(200)]
    texts = [demonstration(p, rng, careful=True) for p in problems]
    assert all(task.score(p, t, False).correct for p, t in zip(problems, texts, strict=True))
    assert 0.2 < sum("/" in t for t in texts) / 200 < 0.9
    guesses = [task.score(p, demonstration(p, rng, careful=False), False).correct for p in problems]
    assert sum(guesses) < 60


@pytest.mark.parametrize("family, shipped", [("llama", "builtin"), ("qwen3_moe", "builtin-moe")])
def test_make_builtin_writes_a_folder_of_the_shipped_shape(family, shipped, tmp_path):
    main([str(tmp_path / "out"), "--family", family, "--careful-steps", "1", "--mixed-steps", "1"])
    assert read_config(tmp_path / "out") == read_config(BUILTIN_POLICIES[shipped]) == builtin_config(family)
    tokenizers = (load_tokenizer(folder) for folder in (tmp_path / "out", BUILTIN_POLICIES[shipped]))
    assert len({tokenizer.to_str() for tokenizer in tokenizers}) == 1
    with pytest.raises(SystemExit):
        main([str(tmp_path / "out")])
