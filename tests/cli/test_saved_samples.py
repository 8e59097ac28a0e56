"""Samples between commands: `rollout --save` writes them, `train --replay` and `drafter train` read them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import save_policy
from paceline.policy.tokenizer import character_tokenizer, save_tokenizer
from paceline.tasks.running_sums import ALPHABET
from tests.loop_helpers import tiny_overrides

SMALL = ["rollout.prompts_per_step=2", "rollout.samples_per_prompt=2", "rollout.max_tokens=4"]


def save(policy: Path, folder: Path, *more: str) -> None:
    command = ["rollout", *tiny_overrides(policy, folder, "unused"), *SMALL, "--save", str(folder), *more]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output


@pytest.fixture(scope="module")
def saved_once(policy, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("saved")
    save(policy, folder)
    return (folder / "step_000001.jsonl").read_text()


@pytest.fixture
def saved(saved_once, tmp_path) -> Path:
    """A folder with one saved step, for a test to damage."""
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/step_000001.jsonl").write_text(saved_once)
    return tmp_path / "saved"


@pytest.fixture(scope="module")
def narrow_policy(tmp_path_factory) -> Path:
    """A policy that knows three tokens less."""
    folder = tmp_path_factory.mktemp("narrow")
    alphabet = ALPHABET[:-3]
    config = DecoderConfig("llama", len(alphabet) + 1, 32, 64, 2, 2, 1, 16, 256, eos_token_ids=(0,))
    save_policy(Decoder(config).initialise(0), folder)
    save_tokenizer(character_tokenizer(alphabet), folder)
    return folder


def commands(policy: Path, tmp_path: Path, saved: Path) -> list[list[str]]:
    """Both commands that learn from a folder."""
    overrides = [*tiny_overrides(policy, tmp_path, "run", steps=1), *SMALL]
    return [
        ["train", *overrides, "--replay", str(saved)],
        ["drafter", "train", *overrides[0].split("=")[1:], *overrides[1:], "--rollouts", str(saved)],
    ]


def test_saved_samples_of_another_vocabulary_are_refused(saved, policy, narrow_policy, tmp_path, refused):
    largest = len(ALPHABET)
    file = saved / "step_000001.jsonl"
    record = json.loads(file.read_text().splitlines()[0])
    record["samples"][1]["tokens"][0] = largest
    file.write_text(json.dumps(record) + "\n")
    replay, rollouts = commands(narrow_policy, tmp_path, saved)
    for option, command in (("--replay", replay), ("--rollouts", rollouts)):
        message = refused(*command)
        assert f"error: {option} {saved}: {file} has token {largest}" in message
        assert f"the vocabulary of {str(narrow_policy)!r} ends at {largest - 3}" in message
        assert "policy.path" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]


def test_saved_samples_that_are_unusable_are_refused_before_a_run(saved, policy, tmp_path, refused):
    bad = saved / "step_000002.jsonl"  # of a later step
    record = json.loads((saved / "step_000001.jsonl").read_text().splitlines()[0])
    record["samples"][0]["logprobs"].pop()
    replay, rollouts = commands(policy, tmp_path, saved)
    for content, problem in (("", " holds no group"), (json.dumps(record) + "\n", ":1 is not a saved group")):
        bad.write_text(content)
        for option, command in (("--replay", replay), ("--rollouts", rollouts)):
            message = refused(*command)
            assert f"error: {option} {saved}: {bad}{problem}" in message
            assert "save them again with `paceline rollout --save`" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]


@pytest.mark.parametrize("steps", ["0", "-1"])
def test_rollout_refuses_zero_steps(steps, policy, tmp_path):
    command = ["rollout", *tiny_overrides(policy, tmp_path, "unused"), "--steps", steps]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2 and "Invalid value for '--steps'" in " ".join(result.output.split())


@pytest.mark.parametrize("folder", ["/proc/x", "file", "file/x"])
def test_rollout_refuses_an_unwritable_folder_before_generating(
    folder, policy, tmp_path, refused, monkeypatch
):
    from paceline import session

    monkeypatch.setattr(session, "open_session", lambda *_: pytest.fail("it would generate"))
    (tmp_path / "file").write_text("")
    message = refused("rollout", *tiny_overrides(policy, tmp_path, "unused"), "--save", folder)
    assert f"error: --save {folder}: " in message and "choose a folder that can be written to" in message


def test_rollout_refuses_to_save_over_older_samples(saved, policy, tmp_path, refused):
    content = (saved / "step_000001.jsonl").read_text()
    message = refused("rollout", *tiny_overrides(policy, tmp_path, "unused"), "--save", str(saved))
    assert f"error: --save {saved}: it holds step_000001.jsonl" in message
    assert "remove" in message and "choose another folder" in message
    assert [path.name for path in saved.iterdir()] == ["step_000001.jsonl"]
    assert (saved / "step_000001.jsonl").read_text() == content
