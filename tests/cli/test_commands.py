"""The command line as a person uses it: help at once, errors with a way out, every command once."""

import json
import resource
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import paceline
from paceline.cli.main import app
from paceline.config import ConfigError
from tests.loop_helpers import tiny_overrides


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def cpu_seconds(*arguments: str) -> float:
    """Returns the time that Python with these arguments takes itself, at best: others use the machine."""
    times = []
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert subprocess.run([sys.executable, *arguments], capture_output=True).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def test_help_needs_no_torch():
    code = "import sys, paceline.cli.main; assert 'torch' not in sys.modules, 'torch was imported'"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    libraries = cpu_seconds("-c", "import typer, rich.console")
    seconds = cpu_seconds("-m", "paceline", "--help")
    assert seconds < max(1.0, 7 * libraries), f"--help took {seconds:.2f} s, what it needs {libraries:.2f} s"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["train", "learning.lrr=1"], "Did you mean 'learning.lr'?"),
        (["train", "nonsense"], "neither a file nor a shipped recipe"),
        (["train", "--resume", "nowhere"], "nowhere is not a run directory"),
        (["eval", "no-such-folder"], "policy.path = 'no-such-folder'"),
        (["export", "nowhere", "out"], "holds no config.json"),
        (["bench", "rollout", "--model", "nothing"], "neither a folder nor a named shape"),
        (
            ["train", "--replay", "nowhere", "run.root=/tmp/paceline-unused", "run.name=unused"],
            "holds no step_",
        ),
    ],
)
def test_command_errors_are_one_line_and_exit_2(arguments, message, tmp_path, refused):
    arguments = [a.replace("/tmp/paceline-unused", str(tmp_path)) for a in arguments]
    assert message in refused(*arguments)
    assert not list(tmp_path.iterdir()), "a run that could not start leaves nothing behind"


def test_command_error_ends_the_process_with_2():
    command = [sys.executable, "-m", "paceline", "train", "learning.lrr=1"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "Did you mean 'learning.lr'?" in result.stderr


def test_train_names_a_root_that_is_a_file(policy, tmp_path, refused):
    (tmp_path / "file").write_text("")
    message = refused("train", *tiny_overrides(policy, tmp_path / "file", "run"), "run.steps=1")
    assert f"error: run.root = '{tmp_path}/file': " in message
    assert "choose a folder that can be written to" in message


def test_train_names_a_run_name_that_is_too_long(policy, tmp_path, refused):
    message = refused("train", *tiny_overrides(policy, tmp_path, "x" * 300), "run.steps=1")
    assert f"error: run.name = '{'x' * 300}': File name too long; choose a shorter one" in message
    assert not list(tmp_path.iterdir())


def test_rollout_names_a_save_path_that_is_a_file(policy, tmp_path, refused):
    (tmp_path / "file").write_text("")
    overrides = tiny_overrides(policy, tmp_path, "run")
    assert f"{tmp_path}/file" in refused("rollout", *overrides, "--save", str(tmp_path / "file"))


def test_eval_and_export_agree_with_transformers(policy, tmp_path):
    import torch
    import transformers

    output = invoke(
        "eval",
        str(policy),
        "task.eval_problems=6",
        "eval.samples=4",
        "eval.pass_k=[1,4]",
        "eval.max_tokens=12",
    )
    assert "avg@4" in output and "pass@4" in output and "6 problems" in output
    invoke("export", str(policy), str(tmp_path / "out"), "--dtype", "bfloat16")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16 and tokenizer.decode(tokenizer("a9b8=")["input_ids"]) == "a9b8="


@pytest.mark.parametrize("command", [["eval", "builtin"], ["drafter", "eval", "builtin", "builtin-eagle"]])
def test_second_policy_is_refused(command, refused):
    """It lost to the argument without a word."""
    message = refused(*command, "policy.path=nothere")
    assert "error: policy.path=nothere: the argument 'builtin' says already which policy" in message


@pytest.mark.parametrize(
    "wanted, said",
    [
        pytest.param(0, "running-sums, 4 held-out problems x 2", marks=pytest.mark.slow),
        pytest.param(3, "running-sums, 3 held-out problems x 2", marks=pytest.mark.slow),
        (100, "4 held-out problems x 2 (eval.problems = 100, and the task has 4)"),
    ],
)
def test_eval_announces_what_it_measures(wanted, said, policy):
    settings = ["task.eval_problems=4", "eval.samples=2", "eval.max_tokens=4", f"eval.problems={wanted}"]
    output = " ".join(invoke("eval", str(policy), *settings).split())
    assert said in output and f"({min(wanted or 4, 4)} problems)" in output


def test_train_leaves_a_run_directory(policy, tmp_path):
    output = invoke("train", *tiny_overrides(policy, tmp_path, "run", steps=2))
    assert "run directory" in output
    for name in (
        "config.yaml",
        "metrics.jsonl",
        "samples/step_000002.jsonl",
        "checkpoints/step_000002/state.json",
        "checkpoints/best",
    ):
        assert (tmp_path / "run" / name).exists(), name


@pytest.mark.parametrize("command", [pytest.param("train", marks=pytest.mark.slow), "rollout"])
def test_ignored_recipe_keys_are_reported(command, policy, tmp_path):
    said = "rollout.speculation.drafters = ['history']: not used"
    overrides = [*tiny_overrides(policy, tmp_path, "run", steps=1), "eval.problems=2"]
    assert said in " ".join(invoke(command, *overrides, "rollout.backend=reference").split())
    assert said not in " ".join(invoke(command, *overrides, "run.name=other").split())


@pytest.mark.slow
def test_train_names_keys_that_depart_from_the_algorithm(policy, tmp_path):
    overrides = [
        *tiny_overrides(policy, tmp_path, "run", steps=1),
        "eval.problems=2",
        "learning.algorithm=gspo",
        "learning.clip_high=0.2",
    ]
    assert (
        "learning.algorithm = 'gspo': the recipe itself says clip_high = 0.2 instead of 0.0004"
        in " ".join(invoke("train", *overrides).split())
    )


def test_doctor_recipes_and_bench_print_their_results(tmp_path):
    assert "torch" in invoke("doctor")
    assert "default" in invoke("recipes")
    assert "lr_schedule" in invoke("recipes", "default")
    figures = tmp_path / "figures.json"
    output = invoke(
        "bench",
        "rollout",
        "--requests",
        "4",
        "--prompt",
        "5",
        "--lengths",
        "lognormal:6,0.5,2,12",
        "--repeats",
        "1",
        "--json",
        str(figures),
    )
    assert "4 requests" in output and json.loads(figures.read_text())["point"]["requests"] == 4
    with pytest.raises(ValueError, match="fixed:N or lognormal"):
        invoke("bench", "rollout", "--lengths", "uniform:3")


def test_version_and_announcements_are_printed(policy, tmp_path):
    assert CliRunner().invoke(app, ["--version"]).output == f"paceline {paceline.__version__}\n"
    result = CliRunner().invoke(app, ["train", *tiny_overrides(policy, tmp_path, "run", steps=1)])
    first = " ".join(result.output.split("step 0:")[0].split())
    for said in (str(policy), "running-sums", "cpu", str(tmp_path / "run")):
        assert said in first.replace(" ", "") or said in first, (said, first)


def test_loaded_policies_generate_with_the_engine(policy, monkeypatch):
    """The reference generator is an oracle, not what users wait for; both write the same."""
    from paceline.engine.reference import ReferenceBackend

    loaded = paceline.load(policy, dtype="float64", device="cpu")
    written = loaded.complete(["a9b8=", "a1="], samples=3, seed=5, max_tokens=20)
    reference = ReferenceBackend(loaded.decoder)
    reference.submit([completion.request for group in written for completion in group])
    expected = {completion.request.id: completion.tokens for completion in reference.completions()}
    assert {c.request.id: c.tokens for group in written for c in group} == expected
    monkeypatch.setattr(ReferenceBackend, "submit", lambda *_: pytest.fail("the reference was used"))
    assert loaded.generate(["a9b8="], max_tokens=4)
    assert loaded.generate([]) == []
    with pytest.raises(ValueError, match="prompt 0: "):
        loaded.generate([""])


def test_python_api(policy, tmp_path):
    import paceline

    config = paceline.load_config(None, tiny_overrides(policy, tmp_path, "api", steps=1))
    result = paceline.train(config)
    assert result.finished and result.summary.run == tmp_path / "api"
    loaded = paceline.load(result.summary.run / "checkpoints/best")
    assert loaded.generate(["a9b8="], samples=2, seed=7) == loaded.generate(["a9b8="], samples=2, seed=7)
    with pytest.raises(ConfigError):
        paceline.load_config(None, ["run.stepz=1"])


@pytest.mark.parametrize("stream", [1, 2])
def test_command_with_a_closed_stream_ends_with_0(stream):
    command = f"{sys.executable} -m paceline recipes {stream}>&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
