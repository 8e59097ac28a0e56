"""`paceline sft` end to end: learns, is killed and resumes to the same weights, refuses what cannot be."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import paceline
from paceline.cli.main import app
from paceline.config import ConfigError
from paceline.policy.huggingface import load_policy
from paceline.policy.lora import PEFT_PREFIX
from paceline.policy.tokenizer import load_tokenizer
from paceline.sft.run import fine_tune
from paceline.sft.setup import load_supervised
from tests.loop_helpers import comparable_metrics, make_tiny_policy
from tests.test_loop import finish, start, wait_for_lines

PAIRS = [{"prompt": f"{a}{b}=", "response": f"#{b}"} for a in "abcdef" for b in "0123456789"]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    return path


def overrides(policy, data, root, name="run", *more) -> list[str]:
    return [
        *(f"policy.path={policy}", f"sft.data={data}", f"run.root={root}", f"run.name={name}"),
        *("run.device=cpu", "run.threads=1", "sft.epochs=3", "sft.batch_size=8", "sft.lr=1e-2"),
        *("sft.held_out_share=0.1", *more),
    ]


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def weights(run: Path) -> dict[str, torch.Tensor]:
    newest = sorted((run / "checkpoints").glob("step_*"))[-1]
    return load_file(newest / "policy/model.safetensors")


def test_sft_learns_a_file_and_says_where_the_policy_is(policy, data, tmp_path):
    output = invoke("sft", *overrides(policy, data, tmp_path, "run", "sft.epochs=12", "sft.every=20"))
    run = tmp_path / "run"
    assert f"policy: {run}/checkpoints/best" in output and "tokens/s" in output
    records = comparable_metrics(run)
    held_out = [record["eval/loss"] for record in records if record["kind"] == "eval"]
    assert held_out[-1] < 0.3 * held_out[0] and f"held-out loss {held_out[-1]:.4f}" in output
    steps = [record for record in records if record["kind"] == "train"]
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    assert steps[-1]["sft/epoch"] == 12 and steps[-1]["policy/learning_rate"] < 1e-4
    written = paceline.load(run / "checkpoints/best").generate(["d7="], temperature=0.0, max_tokens=5)
    assert written == [["#7"]]
    report = (run / "report.html").read_text()
    assert "Held-out loss" in report and "What did speculation give?" not in report


@pytest.mark.slow
@pytest.mark.ci
def test_killed_sft_resumes_to_the_weights_of_the_uninterrupted_run(policy, data, tmp_path):
    more = ("sft.epochs=6", "sft.every=4", "policy.lora.rank=2")
    fine_tune(load_supervised("default", overrides(policy, data, tmp_path, "whole", *more)), "default")
    process = start("sft", *overrides(policy, data, tmp_path, "killed", *more))
    wait_for_lines(tmp_path / "killed/metrics.jsonl", 9, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    finish("sft", "--resume", str(tmp_path / "killed"))
    assert comparable_metrics(tmp_path / "killed") == comparable_metrics(tmp_path / "whole")
    ours, theirs = weights(tmp_path / "killed"), weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_interrupted_sft_saves_and_names_the_command_that_continues(policy, data, tmp_path):
    process = start("sft", *overrides(policy, data, tmp_path, "run", "sft.epochs=40"))
    wait_for_lines(tmp_path / "run/metrics.jsonl", 3, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output
    assert f"continue with: paceline sft --resume {tmp_path / 'run'}" in output
    assert list((tmp_path / "run/checkpoints").glob("step_*"))


@pytest.mark.slow
def test_sft_on_learner_ranks_is_that_of_one_process(policy, data, tmp_path):
    more = ("policy.dtype=float64", "sft.epochs=1")
    for name, ranks in (("one", 0), ("two", 2)):
        config = overrides(policy, data, tmp_path, name, *more, f"cluster.learners={ranks}")
        fine_tune(load_supervised("default", config), "default")
    one, two = (comparable_metrics(tmp_path / name) for name in ("one", "two"))
    for ours, theirs in zip(two, one, strict=True):
        assert ours.keys() == theirs.keys()
        for name in {"sft/loss", "eval/loss"} & theirs.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=1e-8)
    assert load_policy(tmp_path / "two/checkpoints/best", torch.float64)


def test_sft_with_lora_writes_adapters_beside_the_merged_policy(policy, data, tmp_path):
    config = overrides(policy, data, tmp_path, "run", "policy.lora.rank=2", "sft.epochs=1")
    result = fine_tune(load_supervised("default", config), "default")
    checkpoint = sorted((tmp_path / "run/checkpoints").glob("step_*"))[-1]
    adapters = load_file(checkpoint / "adapter/adapter_model.safetensors")
    assert all(name.startswith(PEFT_PREFIX) for name in adapters)
    assert any(tensor.any() for name, tensor in adapters.items() if "lora_B" in name)
    assert result.finished and (result.policy / "config.json").is_file()


def test_fresh_policy_reads_its_task(tmp_path):
    config = [
        *("policy.path=fresh", f"run.root={tmp_path}", "run.name=run", "run.device=cpu", "run.threads=1"),
        *(
            "task.train_problems=4",
            "task.eval_problems=4",
            "sft.demonstrations=8",
            "sft.batch_size=4",
            "sft.lr=1e-3",
        ),
    ]
    result = fine_tune(load_supervised("countdown-small", config), "countdown-small")
    assert load_policy(result.policy, torch.float32).config.max_positions == 1024
    assert load_tokenizer(result.policy).encode("3,5,7>22:#?").tokens[6] == "22"


def test_template_of_the_recipe_is_saved_with_the_policy(policy, tmp_path):
    """A base policy without a template becomes one that RL can ask with messages."""
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    row = {"messages": [{"role": "user", "content": "a1="}, {"role": "assistant", "content": "#1"}]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(row) + "\n")
    template = f"sft.chat_template={tmp_path / 'chat.jinja'}"
    config = overrides(policy, tmp_path / "chats.jsonl", tmp_path, "run", template, "sft.held_out_share=0")
    result = fine_tune(load_supervised("default", config), "default")
    saved = (result.policy / "chat_template.jinja").read_text()
    assert saved == (tmp_path / "chat.jinja").read_text()


def test_resumed_run_with_changed_examples_is_refused(policy, data, tmp_path):
    own = tmp_path / "own.jsonl"
    own.write_text(data.read_text())
    config = load_supervised("default", overrides(policy, own, tmp_path, "run", "sft.epochs=1"))
    fine_tune(config, "default")
    own.write_text(data.read_text().replace("#", "="))
    with pytest.raises(ConfigError, match="sft.data: not the file that"):
        fine_tune(config, "default", tmp_path / "run")


@pytest.mark.parametrize(
    "given, said",
    [
        (
            ["learning.lr=1e-3"],
            "learning.lr=1e-3: does not apply to supervised fine-tuning, it is sft.lr",
        ),
        (["run.steps=3"], "it follows from sft.epochs and sft.batch_size"),
        (["rollout.temperature=0.5"], "does not apply to supervised fine-tuning, `paceline sft` looks at"),
        (["sft.demonstrations=3", "sft.data=x.jsonl"], "sft.demonstrations = 3 does not apply: sft.data ="),
        (["sft.held_out=y.jsonl"], "sft.held_out = 'y.jsonl' does not apply: sft.data is empty"),
        ([], "task.name = 'running-sums' has no demonstrations of its own"),
        (["sft.data=nosuch.jsonl"], "sft.data = 'nosuch.jsonl': there is no such file"),
    ],
)
def test_sft_refuses_what_cannot_work(given, said, tmp_path):
    with pytest.raises(ConfigError) as refused:
        invoke("sft", f"run.root={tmp_path}", "run.device=cpu", *given)
    assert said in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_train_and_sft_refuse_each_others_runs(policy, data, tmp_path):
    fine_tune(load_supervised("default", overrides(policy, data, tmp_path, "run", "sft.epochs=1")), "default")
    said = "learning.algorithm = 'sft' learns from no rollouts: use `paceline sft`"
    with pytest.raises(ConfigError, match=said):
        invoke("train", "--resume", str(tmp_path / "run"))


def test_warmup_names_what_it_has_become():
    with pytest.raises(ConfigError, match="`paceline warmup` is now `paceline sft`"):
        invoke("warmup", "out", "--recipe", "countdown", "--policy", "fresh")
