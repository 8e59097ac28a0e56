"""The user's rewards: their arguments, their results, and that nothing they do stops or outlives the run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.config import ConfigError, RewardConfig, TaskConfig, load_config, parse_config
from paceline.loop import train
from paceline.report.metrics import rollout_metrics
from paceline.tasks.base import Problem, Response
from paceline.tasks.make import make_task
from paceline.tasks.rewards import coroutines
from tests.loop_helpers import comparable_metrics, make_tiny_policy, tiny_overrides
from tests.tasks.test_chat import byte_tokenizer

EXAMPLES = "tests.tasks.reward_examples"
# Tells the processes that a reward of this test starts from those of others.
SLEEP = os.environ["TEST_SLEEP"] = f"1000.{os.getpid()}"
PROBLEM = Problem("p", "?", "4", {"data_source": "sums", "extra_info": {"index": 7}})


def children() -> set[int]:
    """Every living descendant of this process, by /proc."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    found = set()
    new = {os.getpid()}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - found
        found |= new
    return found


def sleepers() -> list[int]:
    return [
        int(p.parent.name)
        for p in Path("/proc").glob("[0-9]*/cmdline")
        if _read(p) == f"sleep\0{SLEEP}\0".encode()
    ]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = children()
    sleeping = set(sleepers())
    yield
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (children() - before or set(sleepers()) - sleeping):
        time.sleep(0.05)
    assert children() - before == set() and set(sleepers()) - sleeping == set()


@pytest.fixture
def scoring(tmp_path):
    opened = []

    def open_scoring(*rewards: dict, **settings):
        config = TaskConfig(
            rewards=[RewardConfig(**reward) for reward in rewards],
            train_problems=1,
            eval_problems=1,
            **settings,
        )
        opened.append(make_task(config, byte_tokenizer(), tmp_path))
        return opened[-1].scoring

    yield open_scoring
    for task in opened:
        task.close()


def score(scoring, *texts, truncated=False):
    group = scoring.open_group(PROBLEM, len(texts))
    for index, text in enumerate(texts):
        group.add(index, None if text is None else Response(text, truncated))
    return group.scores()


def score_in_time(scoring, *texts):
    """Scores, and again where a machine that paused has spent the short limit of what does not hang."""
    for _ in range(4):
        scores = score(scoring, *texts)
        fine = [s for text, s in zip(texts, scores, strict=True) if text != "hang"]
        if not any(name.endswith("/timeout") for s in fine for name in s.components):
            break
    return scores


def test_reward_functions_get_their_arguments_and_return_scores(scoring, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import helper\ndef bonus(response, by): return helper.TWO * by\n")
    (tmp_path / "helper.py").write_text("TWO = 2\n")
    rewards = scoring(
        {"function": f"{EXAMPLES}:contains", "options": {"bonus": 0.5}},
        {"function": f"{EXAMPLES}:verl_style", "weight": 10},
        {"function": f"{EXAMPLES}:everything", "weight": 100},
        {"function": f"{file}:bonus", "weight": 1000, "options": {"by": 3}, "name": "mine"},
    )
    right, wrong = score(rewards, "4", "five")
    assert right.reward == 1.5 + 10 + 100 + 6000 and right.correct
    assert right.components == {"contains": 1.5, "verl_style": 1.0, "everything": 1.0, "mine": 6.0}
    assert wrong.reward == 0.5 + 6000 and not wrong.correct, "the first reward says what is correct"


def test_builtin_scorers_give_0_to_truncated_responses(scoring):
    rewards = scoring(
        {"function": "last-number"}, {"function": f"{EXAMPLES}:length", "weight": 0.5}, extract="answer-line"
    )
    assert [s.reward for s in score(rewards, "Answer: 4", "4", None)] == [1 + 4.5, 0.5, 0.0]
    cut = score(rewards, "Answer: 4", truncated=True)[0]
    assert (cut.reward, cut.correct) == (4.5, False), "a user's function decides for itself about truncation"
    lenient = scoring({"function": "last-number"}, require_end=False)
    assert score(lenient, "4", truncated=True)[0].correct


def test_reward_that_raises_gets_failed_score_and_is_counted(scoring, caplog):
    rewards = scoring(
        {"function": f"{EXAMPLES}:raises", "failed_score": -1},
        {"function": f"{EXAMPLES}:exits"},
        {"function": f"{EXAMPLES}:length"},
    )
    scores = score(rewards, "ab", "abc")
    assert [s.reward for s in scores] == [1.0, 2.0] and not scores[0].correct
    assert scores[0].components == {
        "raises": -1.0,
        "failed/raises/error": 1.0,
        "exits": 0.0,
        "failed/exits/error": 1.0,
        "length": 2.0,
    }
    assert caplog.text.count("RuntimeError: no such luck") == 1 and "reward_examples.py" in caplog.text, (
        "said once, counted always"
    )


def test_reward_error_cannot_write_control_characters_to_the_terminal(scoring, caplog):
    rewards = scoring({"function": f"{EXAMPLES}:huge"})
    assert score(rewards, "\x1b[2J\x07 not a number")[0].components["failed/huge/error"] == 1.0
    assert "not a number" in caplog.text and "\x1b" not in caplog.text and "\x07" not in caplog.text


def test_hanging_and_dying_rewards_cost_their_time_and_nothing_else(scoring):
    rewards = scoring(
        {"function": f"{EXAMPLES}:hangs", "time_limit": 2},
        {"function": f"{EXAMPLES}:dies"},
        reward_workers=2,
    )
    before = time.monotonic()
    scores = score_in_time(rewards, "hang", "fine", "hang", "fine")
    assert [s.components["hangs"] for s in scores] == [0.0, 1.0, 0.0, 1.0]
    assert [s.components.get("failed/hangs/timeout") for s in scores] == [1.0, None, 1.0, None]
    assert all(s.components["failed/dies/died"] == 1.0 for s in scores)
    assert time.monotonic() - before < 300
    assert [s.reward for s in score_in_time(rewards, "fine")] == [1.0], "a new worker has taken over"


@pytest.mark.parametrize("text", ["nan", "none", "text", "1"])
def test_reward_scores_that_are_no_numbers_are_failures(scoring, text):
    assert (
        score(scoring({"function": f"{EXAMPLES}:not_a_number"}), text)[0].components[
            "failed/not_a_number/error"
        ]
        == 1.0
    )


@pytest.mark.slow
def test_reward_workers_are_reused_and_cheap(scoring):
    rewards = scoring({"function": f"{EXAMPLES}:process_id"}, reward_workers=2)
    score(rewards, *["x"] * 20)
    before, own = time.monotonic(), time.process_time()
    used = {s.reward for s in score(rewards, *["x"] * 500)}
    assert len(used) <= 2 and time.process_time() - own < 5, "no process is started for a call"
    assert time.monotonic() - before < 40, "nor does one wait"


def test_batched_rewards_see_the_group(scoring):
    rewards = scoring(
        {"function": f"{EXAMPLES}:rank_by_length", "batch": True},
        {"function": f"{EXAMPLES}:too_few", "batch": True},
    )
    scores = score(rewards, "aaa", "a", None, "aa")
    assert [s.components.get("rank_by_length") for s in scores] == [2.0, 0.0, None, 1.0]
    assert scores[0].components["failed/too_few/error"] == 1.0 and scores[2].components == {}


@pytest.mark.slow
def test_coroutine_rewards_wait_together_and_their_failures_are_counted(scoring):
    rewards = scoring(
        {"function": f"{EXAMPLES}:judge", "time_limit": 5},
        {"function": f"{EXAMPLES}:judge_group", "batch": True},
    )
    score(rewards, "warm")
    before = time.monotonic()
    scores = score(rewards, *["abcde"] * 60)
    assert time.monotonic() - before < 12, "0.3 s each, all at once"
    assert all(s.components == {"judge": 0.5, "judge_group": 5.0} for s in scores)
    rewards = scoring(
        {"function": f"{EXAMPLES}:judge", "time_limit": 3},
        {"function": f"{EXAMPLES}:judge_group", "batch": True},
    )
    scores = score(rewards, "hang", "raise", "a")
    assert [sorted(s.components) for s in scores] == [
        ["failed/judge/timeout", "judge", "judge_group"],
        ["failed/judge/error", "judge", "judge_group"],
        ["judge", "judge_group"],
    ]


@pytest.mark.slow
def test_coroutine_concurrency_is_bounded_and_time_limits_exclude_waiting(scoring):
    rewards = scoring({"function": f"{EXAMPLES}:judge", "time_limit": 4, "concurrency": 2})
    before = time.monotonic()
    assert [s.reward for s in score(rewards, *["abcde"] * 40)] == [0.5] * 40
    assert time.monotonic() - before > 5.9, "20 times 0.3 s, of which the last wait longer than the limit"


@pytest.mark.slow
def test_coroutine_rewards_that_cannot_be_stopped_do_not_stop_the_run(scoring, monkeypatch):
    monkeypatch.setattr(coroutines, "GRACE_SECONDS", 0.5)
    rewards = scoring({"function": f"{EXAMPLES}:stubborn", "time_limit": 0.2})
    assert score(rewards, "x")[0].components["failed/stubborn/timeout"] == 1.0
    rewards = scoring({"function": f"{EXAMPLES}:judge", "time_limit": 2})
    scores = score(rewards, "block", "a")
    assert scores[0].components["failed/judge/timeout"] == 1.0
    assert score_in_time(rewards, "ab")[0].reward == 0.2, "on a new loop"


@pytest.mark.slow
def test_reward_functions_that_cannot_be_used_fail_at_the_start(scoring, tmp_path):
    def refused(function, **more):
        with pytest.raises(ConfigError) as caught:
            scoring({"function": function, **more})
        return str(caught.value)

    assert "neither one of exact, last-number" in refused("lastnumber")
    assert "no_such_module cannot be imported (ModuleNotFoundError" in refused("no_such_module:f")
    assert "has no function 'lenght'; it has" in refused(f"{EXAMPLES}:lenght")
    assert "wants colour; a reward can have prompt, response" in refused(f"{EXAMPLES}:unknown_argument")
    assert "wants colour; a reward can have" in refused(f"{EXAMPLES}:unknown_beside_everything")
    assert "`completions` is `response` here, with `batch: true` a list" in refused(f"{EXAMPLES}:as_in_trl")
    by_position = "takes response by position alone; a reward is called by name: write it without `/` or `*`"
    assert by_position in refused(f"{EXAMPLES}:by_position")
    assert by_position in refused(f"{EXAMPLES}:by_position_and_everything")
    assert by_position in refused(f"{EXAMPLES}:any_position")
    assert "takes answer by position alone" in refused(f"{EXAMPLES}:by_position_or_not")
    assert "does not take the options size" in refused(f"{EXAMPLES}:length", options={"size": 1})
    (tmp_path / "bad.py").write_text("import os; os._exit(3)")
    assert "ended while importing (exit status 3)" in refused(f"{tmp_path}/bad.py:f")
    with pytest.raises(ConfigError, match="names length, length must differ"):
        parse_config({"task": {"rewards": [{"function": f"{EXAMPLES}:length"}] * 2}})
    with pytest.raises(ConfigError, match="reward/std is a metric of its own.*set another `name`"):
        parse_config({"task": {"rewards": [{"function": f"{EXAMPLES}:length", "name": "std"}]}})
    with pytest.raises(
        ConfigError,
        match=r"task.rewards.0.wieght: there is no such key. Did you mean 'task.rewards.0.weight'",
    ):
        parse_config({"task": {"rewards": [{"function": "exact", "wieght": 1}]}})


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["end", "kill"])
def test_reward_workers_do_not_outlive_their_run(tmp_path, ending):
    """A script that forgets to close its task, with a reward that hangs: ended normally, and killed."""
    script = tmp_path / "run.py"
    script.write_text(
        "import sys, time\n"
        "from pathlib import Path\n"
        "from paceline.config import RewardConfig, TaskConfig\n"
        "from paceline.tasks.make import make_task\n"
        "from paceline.tasks.base import Response\n"
        "from tests.tasks.test_chat import byte_tokenizer\n"
        f"rewards = [RewardConfig(function='{EXAMPLES}:hangs', time_limit=600)]\n"
        "task = make_task(TaskConfig(rewards=rewards), byte_tokenizer(), Path('.'))\n"
        "task.scoring.open_group(task.train[0], 1).add(0, Response('hang', False))\n"
        "time.sleep(1.5)\n"
        "print([p.process.pid for p in task.scoring.pool.state.alive][0], flush=True)\n"
        "sys.stdin.readline()\n"
    )
    root = Path(__file__).parent.parent.parent
    search_path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": search_path}
    process = subprocess.Popen(
        [sys.executable, str(script)],
        cwd=root,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    worker = int(process.stdout.readline())
    assert _read(Path(f"/proc/{worker}/cmdline"))
    if ending == "kill":
        process.send_signal(signal.SIGKILL)
    else:
        process.stdin.close()
    process.wait(timeout=120)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (_read(Path(f"/proc/{worker}/cmdline")) or sleepers()):
        time.sleep(0.05)
    assert not _read(Path(f"/proc/{worker}/cmdline")) and not sleepers(), (
        "the worker, and what its reward had started"
    )


@pytest.mark.slow
def test_run_with_a_moody_reward_finishes_and_repeats(tmp_path):
    """It hangs on some responses and kills its process on others; the same samples fail alike every time."""
    policy = make_tiny_policy(tmp_path / "policy")
    extra = [
        "task.rewards=[{function: 'tests.tasks.reward_examples:moody', time_limit: 2}]",
        "task.eval_problems=2",
        "rollout.prompts_per_step=2",
    ]

    def metrics_of(name: str) -> list[dict[str, float]]:
        run = train(load_config(None, [*tiny_overrides(policy, tmp_path, name, steps=2), *extra]))
        assert run.finished
        return comparable_metrics(run.summary.run)

    first, metrics = metrics_of("a"), metrics_of("b")
    if metrics != first:  # a machine that paused may have spent the limit of one of them
        third = metrics_of("c")
        assert third in (first, metrics)
        metrics = third
    trained = [m for m in metrics if m["kind"] == "train"]
    assert all(m["reward/failures"] > 0 for m in trained) and {"timeout", "died"} == {
        k.rpartition("/")[2] for m in trained for k in m if "/failed/" in k
    }


def test_reward_failures_reach_the_metrics(scoring):
    from paceline.stats import RolloutStats
    from paceline.types import Completion, FinishReason, Group, Request, Sample, SamplingParams

    scores = score(
        scoring({"function": f"{EXAMPLES}:not_a_number"}, {"function": f"{EXAMPLES}:length"}), "nan", "none"
    )
    request = Request("r", (1,), 0, SamplingParams())
    group = Group(
        "p", tuple(Sample(Completion(request, (1,), (0.0,), FinishReason.STOP, ()), s) for s in scores)
    )
    metrics = rollout_metrics([group], RolloutStats())
    assert (
        metrics["reward/failures"] == 2
        and metrics["reward/failed/not_a_number/error"] == 1.0
        and metrics["reward/length"] == 3.5
    )
