"""`paceline drafter` as a person uses it, on a policy too small to be good."""

import json
import os
import re
import shutil
import signal
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.drafting.eagle_folder import BUILTIN_EAGLE
from paceline.drafting.model_card import MeasuredAcceptance, read_acceptance, write_card
from paceline.policy.tokenizer import character_tokenizer
from paceline.rollout.samples import write_groups
from paceline.runs.interruption import EXIT_INTERRUPTED
from tests.learning.samples import make_groups
from tests.loop_helpers import make_tiny_policy

SMALL_TASK = [
    "task.train_problems=8",
    "task.eval_problems=8",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "rollout.max_tokens=12",
    "eval.max_tokens=12",
    "run.device=cpu",
    "run.threads=1",
]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return str(make_tiny_policy(tmp_path_factory.mktemp("policy")))


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["drafter", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_drafter_train_eval_export_import(policy, tmp_path):
    trained, exported, imported = (tmp_path / name for name in ("trained", "exported", "imported"))
    options = ["--layers", "0,1", "--draft-vocab", "20", "--responses", "16", "--steps", "4", "--unroll", "2"]
    text = invoke("train", policy, *SMALL_TASK, *options, "--out", str(trained))
    assert "16 responses" in text and "4/4" in text
    assert json.loads((trained / "config.json").read_text())["draft_vocab_size"] == 20
    assert load_file(trained / "model.safetensors")["lm_head.weight"].shape == (20, 32)

    lines = invoke("eval", policy, str(trained), *SMALL_TASK, "--k", "3", "--problems", "4").splitlines()
    assert lines[0].startswith("4 responses, ") and "k = 3" in lines[0]
    for line, name in zip(lines[2:], ("shared noise", "rejection"), strict=True):
        assert line.startswith(name) and line.count("%") == 3 and 1.0 <= float(line.split()[-1]) <= 4.0

    said = invoke("export", str(trained), str(exported), "--policy", policy, "--dtype", "bfloat16")
    assert "captures layer 0, the embedding" in said and "SGLang" in said
    assert load_file(exported / "model.safetensors")["fc.weight"].dtype == torch.bfloat16
    invoke("import", str(exported), str(imported), "--policy", policy)
    before, after = load_file(exported / "model.safetensors"), load_file(imported / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    assert {n: tensor.dtype for n, tensor in after.items()} == {
        n: tensor.dtype for n, tensor in before.items()
    }, "as they were"

    text = invoke(
        "train",
        policy,
        *SMALL_TASK,
        "--start",
        str(imported),
        "--responses",
        "16",
        "--steps",
        "1",
        "--out",
        str(tmp_path / "more"),
    )
    assert json.loads((tmp_path / "more" / "config.json").read_text())["draft_vocab_size"] == 20


def test_drafter_export_copies_the_model_card(tmp_path):
    """Not with the folder: what one head had is not said of the next."""
    measured = MeasuredAcceptance("builtin", "running-sums", 1.0, 3, 40, 1.5, 0.3, (0.3, 0.2))
    source, target = tmp_path / "source", tmp_path / "target"
    invoke("export", "builtin-eagle", str(source))
    assert sorted(path.name for path in source.iterdir()) == ["config.json", "model.safetensors"]
    write_card(source, None, measured)
    for out in (target, source):
        invoke("export", str(source), str(out), "--dtype", "float32")
        assert read_acceptance(out) == measured and "| 3 | 40 | 1.50 |" in (out / "README.md").read_text()
    invoke("export", "builtin-eagle", str(target))
    assert read_acceptance(target) is None
    assert "not measured" in (target / "README.md").read_text()


def test_drafter_train_refuses_rollouts_without_a_response(tmp_path):
    (tmp_path / "step_000001.jsonl").write_text("")
    with pytest.raises(ValueError, match="--rollouts .*step_000001.jsonl holds no group"):
        invoke("train", "builtin", "--rollouts", str(tmp_path), "--out", str(tmp_path / "head"))
    refused = make_groups()[0]
    empty = [replace(s.completion, tokens=(), logprobs=(), segments=()) for s in refused.samples]
    samples = tuple(replace(s, completion=c) for s, c in zip(refused.samples, empty, strict=True))
    write_groups(
        tmp_path / "step_000001.jsonl", [replace(refused, samples=samples)], character_tokenizer("ab")
    )
    with pytest.raises(ValueError, match="--rollouts .* holds no response with a token"):
        invoke("train", "builtin", "--rollouts", str(tmp_path), "--out", str(tmp_path / "head"))


@pytest.mark.slow
def test_drafter_train_generates_as_many_responses_as_asked_for(policy, tmp_path):
    """Fewer than a step's, and a number that no whole groups make."""
    for count in (3, 18):
        options = [
            "--layers",
            "0,1",
            "--responses",
            str(count),
            "--steps",
            "1",
            "--out",
            str(tmp_path / "head"),
        ]
        assert f"\n{count} responses, " in invoke("train", policy, *SMALL_TASK, *options)


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "builtin", "--unroll", "0"],
        ["train", "builtin", "--batch", "0"],
        ["train", "builtin", "--steps", "0"],
        ["train", "builtin", "--responses", "0"],
        ["train", "builtin", "--draft-vocab", "-1"],
        ["eval", "builtin", "builtin-eagle", "--k", "0"],
        ["eval", "builtin", "builtin-eagle", "--k", "-1"],
        ["eval", "builtin", "builtin-eagle", "--problems", "0"],
        ["eval", "builtin", "builtin-eagle", "--temperature", "-1"],
    ],
)
def test_drafter_commands_name_numbers_out_of_range(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["drafter", *arguments])
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.exception
    assert f"Invalid value for '{arguments[-2]}'" in " ".join(result.output.split())
    assert not list(tmp_path.iterdir()), "nothing was written"


@pytest.mark.slow
def test_drafter_train_learns_from_saved_rollouts(policy, tmp_path):
    saved = str(tmp_path / "saved")
    result = CliRunner().invoke(
        app, ["rollout", "default", f"policy.path={policy}", *SMALL_TASK, "--steps", "2", "--save", saved]
    )
    assert result.exit_code == 0, result.output
    text = invoke(
        "train",
        policy,
        *SMALL_TASK,
        "--layers",
        "0,1",
        "--rollouts",
        saved,
        "--steps",
        "1",
        "--out",
        str(tmp_path / "head"),
    )
    assert text.splitlines()[1].startswith("32 responses")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["train", "builtin", "--layers", "one"], "--layers 'one': must be numbers"),
        (["train", "builtin", "--layers", "3,9"], "the policy's last is 5"),
        (["train", "builtin", "--draft-vocab", "99"], "the policy has 48"),
        (["train", "builtin", "--dtype", "int4"], "--dtype 'int4'"),
        (["eval", "builtin", "nowhere"], "'nowhere' is not an eagle head's folder"),
        (["eval", "builtin", "builtin-eagle", "--temperature", "inf"], "--temperature inf: must be finite"),
        (["import", "nowhere", "out"], "'nowhere' is not an eagle head's folder"),
        (["train", "builtin", "--rollouts", "nowhere"], "holds no step_"),
        (
            ["train", "builtin", "--rollouts", "x", "--responses", "8"],
            "--responses 8: --rollouts takes all that were saved",
        ),
        (
            ["train", "builtin", "--start", "builtin-eagle", "--layers", "1,2"],
            "--layers 1,2: the head in --start builtin-eagle has its own",
        ),
        (
            ["train", "builtin", "--start", "builtin-eagle", "--draft-vocab", "0"],
            "--draft-vocab 0: the head in --start builtin-eagle has its own",
        ),
        (["train", "builtin", "--lr", "0"], "--lr 0: must be above 0"),
        (["train", "builtin", "--lr", "inf"], "--lr inf: must be above 0 and finite"),
        (["train", "builtin", "--out", "/dev/null/head"], "--out /dev/null/head: /dev/null is a file"),
        (["export", "builtin-eagle", "/dev/null/head"], "OUT /dev/null/head: /dev/null is a file"),
    ],
)
def test_drafter_command_errors_come_before_the_work(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "paceline.rollout.sampler.GroupSampler.sample",
        lambda *_: pytest.fail("responses were generated first"),
    )
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message)):
        invoke(*arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("config", [None, "{", '{"architectures": "LlamaForCausalLMEagle3"}'])
@pytest.mark.parametrize(
    "command, named",
    [
        (["train", "OUT", "--out", "OUT"], "--out"),
        (["train", "builtin", "--start", "builtin-eagle", "--out", "OUT"], "--out"),
        (["export", "builtin-eagle", "OUT"], "OUT"),
        (["import", str(BUILTIN_EAGLE), "OUT"], "OUT"),
    ],
    ids=["train its own policy", "train", "export", "import"],
)
def test_drafter_commands_do_not_overwrite_another_model(
    command, named, config, policy, tmp_path, monkeypatch
):
    """A policy was lost like this, also the one that the head was trained for."""
    out = tmp_path / "model"
    shutil.copytree(policy, out)
    if config is not None:
        (out / "config.json").write_text(config)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    for work in ("paceline.session.open_session", "paceline.policy.huggingface.load_policy"):
        monkeypatch.setattr(work, lambda *_: pytest.fail("work was begun"))
    with pytest.raises(ValueError) as refused:
        invoke(*(argument.replace("OUT", str(out)) for argument in command))
    assert str(refused.value) == (
        f"{named} {out}: holds a model that is not an eagle head; remove it or choose another folder"
    )
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.parametrize(
    "command",
    [
        ("train", "builtin", "--out", "fresh"),
        ("export", "builtin-eagle", "auto"),
        ("train", "builtin", "--out", "builtin-eagle"),
    ],
)
def test_drafter_commands_refuse_folders_that_a_recipe_would_not_find(command, tmp_path, monkeypatch):
    """`eagle_path=fresh` is a new head, also beside a folder of that name."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"{command[-1]}: .*eagle_path = '{command[-1]}' is no folder but"):
        invoke(*command)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("seed", ["-1", "9223372036854775808"])
def test_drafter_train_names_a_seed_out_of_range(seed):
    with pytest.raises(ValueError, match=rf"--seed {seed}: must be from 0 to"):
        invoke("train", "builtin", "--seed", seed)


def test_drafter_export_does_not_overwrite_adapters(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds a model that is not an eagle head"):
        invoke("export", "builtin-eagle", str(tmp_path))


def test_drafter_export_may_overwrite_a_head(tmp_path):
    invoke("export", "builtin-eagle", str(tmp_path))
    invoke("export", "builtin-eagle", str(tmp_path), "--dtype", "bfloat16")
    assert load_file(tmp_path / "model.safetensors")["fc.weight"].dtype == torch.bfloat16


@pytest.mark.slow
def test_drafter_train_saves_the_head_so_far_on_a_signal(policy, tmp_path, monkeypatch):
    """With a card of what it has, from which another training resumes and reports it."""
    first, second = tmp_path / "first", tmp_path / "second"

    def signalled(steps, show):
        return lambda step, report: os.kill(os.getpid(), signal.SIGTERM) if step == 3 else None

    options = ["--layers", "0,1", "--responses", "20", "--unroll", "2", "--batch", "4"]
    with monkeypatch.context() as patched:
        patched.setattr("paceline.cli.drafter._progress", signalled)
        arguments = [
            "drafter",
            "train",
            policy,
            *SMALL_TASK,
            *options,
            "--steps",
            "1000",
            "--out",
            str(first),
        ]
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == EXIT_INTERRUPTED, result.output
    assert "the head after 3 of 1000 steps" in result.output
    kept = read_acceptance(first)
    assert kept is not None and kept.drafts > 0 and kept.policy == policy
    assert "eagle3" in (first / "README.md").read_text()
    options = ["--start", str(first), "--responses", "20", "--steps", "2", "--unroll", "2", "--batch", "4"]
    text = invoke("train", policy, *SMALL_TASK, *options, "--out", str(second))
    assert f"{first} says: {kept}" in text and "here it has: accept length" in text
    assert "after 2 steps: accept length" in text
