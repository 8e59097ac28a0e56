"""avg@n and pass@k against counting, and evaluation noise that does not depend on training."""

import itertools
import sys
import types

import numpy
import pytest

from paceline.config import ConfigError, load_config
from paceline.report.writers import make_writers
from paceline.rollout.evaluation import estimate, estimate_reward, pass_at_k, summarise
from paceline.types import (
    Completion,
    FinishReason,
    Group,
    Purpose,
    Request,
    Sample,
    SamplingParams,
    Score,
    request_seed,
)


@pytest.mark.parametrize(
    "samples, correct, k", [(5, 2, 1), (5, 2, 3), (6, 0, 2), (6, 6, 2), (4, 3, 4), (8, 1, 8)]
)
def test_pass_at_k_counts_every_choice(samples, correct, k):
    outcomes = [i < correct for i in range(samples)]
    choices = list(itertools.combinations(outcomes, k))
    assert pass_at_k(samples, correct, k) == pytest.approx(sum(any(c) for c in choices) / len(choices))


def test_estimate_interval_counts_problems_not_samples():
    """Eight samples of one problem are not eight problems."""
    values = [0.0, 1.0] * 50
    assert estimate(values).value == 0.5
    assert estimate(values, samples=8).margin == pytest.approx(1.96 * 0.5025 / 10, rel=0.03)


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("problems, samples", [(1, 1), (8, 1), (512, 4)])
def test_estimate_interval_has_a_width_at_0_and_100_percent(value, problems, samples):
    """At 0 and 100% Wilson's interval is [0, z^2 / (n + z^2)] or its mirror image."""
    found = estimate([value] * problems, samples)
    width = 1.96**2 / (problems + 1.96**2)
    assert (found.low, found.high) == pytest.approx((0, width) if value == 0 else (1 - width, 1))
    assert found.margin > 0 and "±" not in str(found)


@pytest.mark.parametrize("chance", [0.02, 0.5, 0.97])
@pytest.mark.parametrize("spread", [0.0, 0.4])
def test_estimate_interval_covers_the_truth_95_percent_of_the_time(chance, spread):
    """64 problems x 4 samples, 2000 times; with `spread`, problems differ in how often they are solved."""
    rng = numpy.random.default_rng(0)
    half = spread * min(chance, 1 - chance)
    difficulty = chance + half * rng.choice([-1.0, 1.0], size=(2000, 64))
    values = rng.binomial(4, difficulty) / 4
    covered = [(e := estimate(list(row), samples=4)).low <= chance <= e.high for row in values]
    assert 0.93 <= numpy.mean(covered) <= 1.0
    assert all((e := estimate(list(row), 4)).low <= e.value <= e.high for row in values[:100])


def make_group(name: str, outcomes: list[bool]) -> Group:
    samples = []
    for i, correct in enumerate(outcomes):
        request = Request(f"{name}/{i}", (1,), i, SamplingParams())
        reason = FinishReason.STOP if correct else FinishReason.LENGTH
        samples.append(
            Sample(
                Completion(request, (1,) * (i + 1), (0.0,) * (i + 1), reason, ()),
                Score(float(correct), correct),
            )
        )
    return Group(name, tuple(samples))


def test_summarise_reports_accuracy_pass_at_k_and_lengths():
    evaluation = summarise(
        [make_group("a", [True, False]), make_group("b", [False, False]), make_group("c", [True, True])],
        [1, 2],
    )
    assert evaluation.accuracy.value == pytest.approx(0.5)
    assert evaluation.pass_at[1].value == pytest.approx(0.5) and evaluation.pass_at[2].value == pytest.approx(
        2 / 3
    )
    assert evaluation.mean_length == 1.5 and evaluation.truncated == 0.5
    assert evaluation.metrics()["eval/pass@2"] == pytest.approx(2 / 3)


def test_request_seed_differs_for_every_request():
    cases = itertools.product(Purpose, (0, 1), (0, 1, 2), ("a", "b"), (0, 1), range(4))
    seeds = [request_seed(*case) for case in cases]
    assert len(set(seeds)) == len(seeds) and all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert request_seed(Purpose.TRAIN, 0, 1, "a", 0, 0) == request_seed(Purpose.TRAIN, 0, 1, "a", 0, 0)


@pytest.mark.parametrize("writer", ["tensorboard", "wandb", "trackio", "mlflow"])
def test_optional_writers_name_the_extra_to_install(writer, tmp_path, monkeypatch):
    import builtins

    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if writer in name:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match=rf"report.{writer} = true needs the package {writer}: pip install"):
        make_writers(load_config(None, [f"report.{writer}=true"]), tmp_path)


class FakeRun:
    """What W&B and Trackio return: it is given metrics, and finished."""

    def __init__(self, **named):
        self.named, self.logged, self.finished = named, [], False

    def log(self, metrics, step):
        self.logged.append((step, metrics))

    def finish(self):
        self.finished = True


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_runs_of_wandb_and_trackio_get_every_step_and_are_continued(name, tmp_path, monkeypatch):
    runs = []
    module = types.SimpleNamespace(init=lambda **named: runs.append(FakeRun(**named)) or runs[-1])
    monkeypatch.setitem(sys.modules, name, module)
    (writer,) = make_writers(load_config(None, [f"report.{name}=true"]), tmp_path / "run-7")
    writer.write(3, {"reward/mean": 0.5})
    writer.close()
    (run,) = runs
    assert run.logged == [(3, {"reward/mean": 0.5})] and run.finished
    assert run.named["name"] == "run-7" and run.named["resume"] == "allow"
    assert run.named["config"]["learning"]["algorithm"] == "grpo"


def test_mlflow_run_gets_every_step_and_is_found_again(tmp_path, monkeypatch):
    tracking = pytest.importorskip("mlflow.tracking", reason="needs mlflow: pip install -e '.[mlflow]'")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/runs.db")
    config = load_config(None, ["report.mlflow=true"])
    for step in (1, 2):
        (writer,) = make_writers(config, tmp_path / "run-7")
        writer.write(step, {"reward/mean": step / 4, "speculation/eagle/accepted_1": 0.5})
        writer.close()
    client = tracking.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("paceline").experiment_id])
    assert run.info.run_name == "run-7" and run.data.params["learning.algorithm"] == "grpo"
    values = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(value.step, value.value) for value in values] == [(1, 0.25), (2, 0.5)]


def test_reward_interval_is_wilsons_for_shares_and_normal_beyond():
    right = [[1.0, 0.0], [1.0, 1.0]] * 8
    assert estimate_reward(right) == estimate([0.5, 1.0] * 8, 2)
    scores = numpy.random.default_rng(0).normal(-3, 2, size=(400, 1))
    found = estimate_reward(scores.tolist())
    assert found.value == pytest.approx(scores.mean())
    assert found.margin == pytest.approx(1.96 * scores.std(ddof=1) / 20)
