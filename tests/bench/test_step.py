"""`bench step`: cells are whole runs, made once and read back; what is promised about their tokens."""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

from paceline.bench import step as bench_step
from paceline.bench.step import measure_cells, plan_cells, read_cells
from paceline.bench.step_cell import CELL_FILE
from paceline.bench.step_figures import STAGES, make_figures, stage_seconds
from paceline.bench.step_identity import compare_with_plain
from paceline.bench.step_settings import SETTINGS, cell_config, parse_settings
from paceline.cli.bench_tables import step_lines
from paceline.cli.main import app
from paceline.config import ConfigError, load_config
from paceline.session import open_session
from paceline.tasks.order import ProblemOrder
from paceline.tasks.rewards.scoring import GroupScoring
from paceline.types import Purpose

TINY = [
    "run.device=cpu",
    "run.threads=1",
    "task.train_problems=8",
    "task.eval_problems=4",
    "rollout.prompts_per_step=3",
    "rollout.samples_per_prompt=4",
    "rollout.max_tokens=40",
]
COMPARED = "plain,paced,mine:eagle;rollout.speculation.pacing=fixed;rollout.speculation.tokens=5"


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["bench", "step", *arguments], catch_exceptions=False)


def command(folder: Path, *more: str) -> list[str]:
    sizes = ["--steps", "2", "--first-steps", "1", "--repeats", "1"]
    return ["default", *TINY, "--settings", COMPARED, *sizes, "--out", str(folder), *more]


def tiny_cells(folder: Path, repeats: int = 1):
    return plan_cells("default", TINY, parse_settings(COMPARED), 2, repeats, folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A whole table, made as a person would, and what the command said."""
    folder = tmp_path_factory.mktemp("step")
    files = ["--json", str(folder / "step.json"), "--plot", str(folder / "step.svg")]
    result = invoke(*command(folder / "cells", *files))
    assert result.exit_code == 0, result.output
    return folder, result.output


@pytest.fixture
def copied(made, tmp_path):
    """A copy of the cells to do harm to."""
    shutil.copytree(made[0] / "cells", tmp_path / "cells")
    return tmp_path / "cells"


@pytest.fixture
def launched(made, monkeypatch):
    """Cells that would have been run, which are copied instead."""
    names = []

    def copy(cell):
        names.append(cell.name)
        shutil.rmtree(cell.folder, ignore_errors=True)
        shutil.copytree(made[0] / "cells" / cell.setting.name / "repeat_1", cell.folder)
        config = cell.config.model_dump_json()  # JSON is YAML
        (cell.folder / "config.yaml").write_text(config)

    monkeypatch.setattr(bench_step, "run_in_process", copy)
    return names


# -- the table ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_step_table_has_every_setting_and_states_that_tokens_agree(made):
    folder, said = made
    header, *_ = [line for line in said.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in header.strip("|").split("|")] == ["", "plain", "paced", "mine"]
    assert said.count("yes, 2 steps") == 2 and "NO" not in said
    record = json.loads((folder / "step.json").read_text())
    assert record["recipe"] == "default" and record["overrides"] == TINY and not record["missing"]
    assert record["machine"]["device_type"] == "cpu" and record["machine"]["torch"] == torch.__version__
    plain, paced, mine = record["settings"]
    assert mine["overrides"][-1] == "rollout.speculation.tokens=5" and len(mine["cells"][0]["steps"]) == 2
    assert plain["step_ratio"]["median"] == 1.0 and mine["others"]["accept length"]["median"] > 1
    assert plain["others"]["accept length"] is None
    ElementTree.fromstring((folder / "step.svg").read_text())
    assert str(folder) not in (folder / "step.json").read_text()


@pytest.mark.slow
def test_stages_add_up_to_the_step_and_the_first_steps_are_in_no_median(made):
    cells = tiny_cells(made[0] / "cells")
    measured = read_cells(cells)
    without_name = []
    for metrics in (metrics for cell in measured.values() for metrics in cell.steps):
        stages = stage_seconds(metrics)
        assert tuple(stages) == STAGES and sum(stages.values()) == pytest.approx(metrics["time/step"])
        rests = [stages[rest] for rest in ("rollout rest", "rest")]
        assert min(rests) > -1e-3
        without_name.append(max(rests) / (0.15 * metrics["time/step"] + 0.05))
        assert all(stages[stage] > 0 for stage in ("prefill", "decode", "learning", "sync"))
    assert median(without_name) < 1, "little has no name"  # not in every step: the machine may pause
    for figures in make_figures(cells, measured, first_steps=1).settings:
        cell = measured[f"{figures.setting.name}/repeat_1"]
        assert figures.first_step.median == cell.steps[0]["time/step"]
        assert figures.step.median == cell.steps[1]["time/step"] == figures.step.high


def test_reward_wait_is_a_stage_and_counted_once(monkeypatch):
    session = open_session(load_config("default", [*TINY, "rollout.max_tokens=4"]))
    scores = GroupScoring.scores
    waits = []

    def slow_scores(self):
        begun = time.perf_counter()
        time.sleep(0.05)
        found = scores(self)
        waits.append(time.perf_counter() - begun)
        return found

    monkeypatch.setattr(GroupScoring, "scores", slow_scores)
    problems = ProblemOrder(session.task.train, 0).take(3)
    session.sampler.sample(problems, Purpose.TRAIN, 1, 2, session.train_sampling())
    stats = session.sampler.take_stats()
    assert len(waits) == 3 and sum(waits) <= stats.reward_wait_seconds < 2 * sum(waits)
    assert stats.prefill_seconds > 0 and len(stats.step_seconds) == len(stats.running)
    assert session.sampler.take_stats().reward_wait_seconds == 0
    session.close()


# -- resuming -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_complete_cells_are_kept_and_damaged_ones_rerun(copied, launched):
    assert invoke(*command(copied)).exit_code == 0 and not launched
    folder = copied / "paced" / "repeat_1"
    samples = folder / "samples" / "step_000002.jsonl"
    first_line = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)[0]
    for harm in (
        lambda: (folder / CELL_FILE).unlink(),
        lambda: (folder / CELL_FILE).write_bytes(b"\xff\x00{"),
        lambda: (folder / "metrics.jsonl").write_text(first_line),
        lambda: samples.write_text(samples.read_text()[:-200]),
        lambda: samples.unlink(),
    ):
        harm()
        launched.clear()
        result = invoke(*command(copied))
        assert result.exit_code == 0 and launched == ["paced/repeat_1"], result.output


@pytest.mark.slow
def test_step_table_is_measured_in_pieces(made, tmp_path, launched):
    cells = tiny_cells(tmp_path, repeats=2)
    said = []
    measured = measure_cells([cell for cell in cells if cell.setting.name == "plain"], progress=said.append)
    assert launched == ["plain/repeat_1", "plain/repeat_2"] == list(measured)
    figures = make_figures(cells, measured, 1)
    assert len(figures.missing) == 4 and figures.settings[0].agreements[0].compared_steps == 2
    assert "still to run: paced/repeat_1, mine/repeat_1" in "\n".join(step_lines(figures))
    measure_cells(cells, budget=0.0, progress=said.append)
    assert len(launched) == 2 and "paced/repeat_1 would take about" in said[-1]
    measure_cells(cells, budget=1000.0)
    assert launched[2:] == ["paced/repeat_1", "mine/repeat_1", "paced/repeat_2", "mine/repeat_2"]


def test_step_table_needs_a_complete_cell(tmp_path):
    assert list(step_lines(make_figures(tiny_cells(tmp_path), {}, 1))) == ["no cell is complete yet"]


@pytest.mark.slow
def test_cells_of_another_recipe_or_machine_are_not_mixed_in(copied, launched):
    with pytest.raises(ConfigError, match=r"another recipe \(learning.lr: 0.00015 -> 0.5\).*another --out"):
        invoke(*command(copied, "learning.lr=0.5"))
    file = copied / "mine" / "repeat_1" / CELL_FILE
    record = json.loads(file.read_text())
    record["machine"]["torch"] = "0.0"
    file.write_text(json.dumps(record))
    with pytest.raises(
        ConfigError, match='different machines or versions .*mine/repeat_1 on .*"torch": "0.0"'
    ):
        invoke(*command(copied))
    assert not launched


def test_bench_step_leaves_other_folders_alone(tmp_path):
    thesis = tmp_path / "plain" / "repeat_1" / "thesis.txt"
    thesis.parent.mkdir(parents=True)
    thesis.write_text("finished")
    with pytest.raises(ConfigError, match="in the way and no cell of `bench step`; choose another --out"):
        measure_cells(tiny_cells(tmp_path))
    assert thesis.read_text() == "finished"


# -- the promise of equal tokens ------------------------------------------------------------------------


def change_token(folder: Path, step: int) -> str:
    """Changes one token of a step's last sample and returns its request."""
    file = folder / "samples" / f"step_{step:06d}.jsonl"
    groups = [json.loads(line) for line in file.read_text().splitlines()]
    sample = groups[-1]["samples"][-1]
    sample["tokens"][3] += 1
    file.write_text("".join(json.dumps(group) + "\n" for group in groups))
    return sample["request"]["id"]


@pytest.mark.slow
def test_bench_step_fails_on_a_wrong_token_with_its_place(copied, launched):
    request = change_token(copied / "mine" / "repeat_1", step=2)
    result = invoke(*command(copied))
    assert result.exit_code == 1 and not launched
    assert f"cell mine/repeat_1, step 2: sample {request} differs from plain decoding at token 3" in (
        result.output
    )


@pytest.mark.slow
def test_differing_update_breaks_the_promise_on_a_cpu_only(copied):
    file = copied / "paced" / "repeat_1" / "metrics.jsonl"
    first, second = [json.loads(line) for line in file.read_text().splitlines()]
    first["policy/gradient_norm"] += 1e-9
    file.write_text(json.dumps(first) + "\n" + json.dumps(second) + "\n")
    measured = read_cells(tiny_cells(copied))
    plain, paced = measured["plain/repeat_1"], measured["paced/repeat_1"]
    assert "paced/repeat_1, step 1: policy/gradient_norm" in compare_with_plain(paced, plain).problem
    told = compare_with_plain(on_gpu(paced, deterministic=True), on_gpu(plain, deterministic=True))
    assert not told.problem and "compared up to step 1" in told.note and str(told) == "yes, 1 steps"


@pytest.mark.slow
def test_fast_gpu_mode_only_reports_the_share(copied):
    change_token(copied / "paced" / "repeat_1", step=1)
    measured = read_cells(tiny_cells(copied))
    plain, paced = measured["plain/repeat_1"], measured["paced/repeat_1"]
    told = compare_with_plain(on_gpu(paced), on_gpu(plain))
    assert not told.problem and told.first_step_share == 11 / 12 and str(told) == "91.7% of step 1"
    exact = compare_with_plain(on_gpu(paced, deterministic=True), on_gpu(plain, deterministic=True))
    assert "step 1: sample train/1/2/3 differs" in exact.problem


def on_gpu(cell, deterministic: bool = False):
    rollout = cell.config.rollout.model_copy(update={"deterministic": deterministic})
    machine = replace(cell.machine, device_type="cuda")
    return replace(cell, machine=machine, config=cell.config.model_copy(update={"rollout": rollout}))


@pytest.mark.slow
def test_settings_that_change_more_than_speculation_are_not_compared(made, tmp_path):
    measured = read_cells(tiny_cells(made[0] / "cells"))
    plain = measured["plain/repeat_1"]
    for more in ("fp8", "paced;rollout.speculation.verify=rejection", "learning.lr=1e-3"):
        (setting,) = parse_settings(f"other:{more}")
        config = cell_config("default", TINY, setting, 2, tmp_path, "repeat_1")
        told = compare_with_plain(replace(plain, config=config), plain)
        assert told.first_step_share is None and not told.problem and str(told) == "not compared"


# -- settings -------------------------------------------------------------------------------------------


def configured(text: str, *overrides: str):
    (setting,) = parse_settings(text)
    return cell_config("default", overrides, setting, 3, Path("runs"), "repeat_1")


def test_settings_apply_to_any_recipe():
    for name in SETTINGS:
        config = configured(name, "rollout.precision=fp8+kv", "rollout.kv_scales=head")
        speculation = config.rollout.speculation
        assert bool(speculation.drafters) == (name in ("history", "eagle", "paced", "fp8+kv+paced"))
        assert speculation.pacing == ("fixed" if name in ("history", "eagle") else "adaptive")
        assert str(config.rollout.precision) == (
            name.removesuffix("+paced") if "fp8" in name or name == "kv" else "base"
        )
        assert config.rollout.kv_scales == ("head" if "kv" in name else "layer")
        assert config.run.steps == 3 and config.report.samples_per_step == config.rollout.prompts_per_step


def test_settings_keep_the_recipes_drafter_folders():
    head = "rollout.speculation.eagle_path=my head"
    online = "rollout.speculation.online.share=0.02"
    assert configured("eagle", head).rollout.speculation.eagle_path == "my head"
    assert configured("paced", head, online).rollout.speculation.online.share == 0
    assert configured("history", head).rollout.speculation.eagle_path == "auto"
    assert configured("plain", head, online).rollout.speculation.eagle_path == "auto"
    learning = "rollout.speculation.online={share: 0.02, lr: 3e-3}"
    fresh = configured("eagle", "rollout.speculation.eagle_path=fresh", learning).rollout.speculation
    assert fresh.eagle_path == "fresh" and (fresh.online.share, fresh.online.lr) == (0.02, 3e-3)
    fresh = configured("eagle", "rollout.speculation.eagle_path=fresh").rollout.speculation
    assert fresh.online.share == 0.01
    own = configured(f"mine:eagle;{online};rollout.speculation.eagle_path=fresh", head).rollout.speculation
    assert own.eagle_path == "fresh" and own.online.share == 0.02 and own.tokens == 3


def test_custom_settings_may_hold_lists():
    first, second = parse_settings("a:rollout.speculation.drafters=[eagle, history];learning.lr=1e-3, fp8")
    assert first.overrides == ("rollout.speculation.drafters=[eagle, history]", "learning.lr=1e-3")
    assert second.name == "fp8"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["--settings", "plain,pased"],
            "no setting 'pased'; use one of plain, history.*or define one as name:",
        ),
        (["--settings", "a:paced;pased"], "no setting 'pased'"),
        (["--settings", "plain,plain"], "'plain' is there more than once"),
        (["--settings", "fp8:learning.lr=1"], "'fp8' is taken"),
        (["--settings", "a/b:learning.lr=1"], "'a/b' names a folder; use letters"),
        (["--settings", "a:run.seed=3"], "run.seed = '3': not here; .* an override for all settings alike"),
        (["--settings", "a:task.name=file"], "task.name = 'file': not here"),
        (["--settings", "a:learning.lr=-1"], "learning.lr = -1"),
        (["run.steps=7"], "run.steps = '7': not here; `bench step` uses --steps"),
        (["checkpoint.every=1"], "checkpoint.every = '1': not here; .*no checkpoint is written"),
        (["eval.every=1"], "eval.every = '1': not here"),
        (["--steps", "1"], "--steps 1: must be more than --first-steps 1"),
    ],
)
def test_bench_step_names_mistakes_before_anything_runs(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        invoke("default", *arguments, "--out", str(tmp_path / "cells"))
    assert not (tmp_path / "cells").exists()


@pytest.mark.slow
def test_failed_cell_reports_its_error(tmp_path):
    with pytest.raises(
        ValueError, match=r"cell plain/repeat_1 failed with exit code 1: policy.path = 'nowhere'"
    ):
        invoke("default", *TINY, "policy.path=nowhere", "--settings", "plain", "--out", str(tmp_path))
    assert "policy.path" in (tmp_path / "plain" / "repeat_1.log").read_text()
