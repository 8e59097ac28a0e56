"""`paceline warmup` on a task's own demonstrations: asked as in RL, in any type, refused with a way out."""

import re

import pytest
import torch
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.config import ConfigError, load_config
from paceline.learning.warmup import (
    WarmupSettings,
    demonstration_examples,
    warm_up_on_task,
)
from paceline.policy.config import DecoderConfig
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import DTYPES, load_policy
from paceline.policy.tokenizer import character_tokenizer, load_tokenizer
from paceline.tasks.make import make_task, task_alphabet
from tests.tasks.test_chat import CHATML, byte_tokenizer, save_folder

TINY = ["task.train_problems=8", "task.eval_problems=8", "run.device=cpu", "run.threads=1"]
END = 0
EXAMPLES = 32


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def small_task(tmp_path_factory):
    config = load_config("countdown-small", TINY)
    tokenizer = character_tokenizer(task_alphabet(config.task))
    return make_task(config.task, tokenizer, tmp_path_factory.mktemp("no-template"))


def train(task, dtype=torch.float32, max_tokens=640, **settings):
    """Trains a policy that is still smaller than a fresh one."""
    vocab_size = task.prompts.tokenizer.get_vocab_size()
    shape = DecoderConfig("llama", vocab_size, 32, 64, 2, 2, 1, 16, 1024, eos_token_ids=(END,))
    policy = Decoder(shape).initialise(0).to(dtype)
    losses = []
    settings = WarmupSettings(**dict(epochs=2, batch_size=8, lr=1e-2, seed=0) | settings)
    totals = warm_up_on_task(
        policy, task, EXAMPLES, max_tokens, settings, lambda *step: losses.append(step[2])
    )
    return policy, losses, totals


@pytest.mark.slow
def test_warmup_command_trains_a_fresh_policy_and_writes_it_at_the_end(tmp_path):
    out = tmp_path / "new" / "warm"
    arguments = [str(out), *TINY, "--recipe", "countdown-small", "--policy", "fresh"]
    output = invoke(
        "warmup", *arguments, "--examples", "64", "--epochs", "1", "--batch-size", "4", "--lr", "3e-3"
    )
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", output)]
    assert losses[-1] < losses[0] - 0.2
    assert "64 examples; " in output and "tokens/s" in output
    assert [path.name for path in out.parent.iterdir()] == ["warm"], "nothing unfinished is left"
    policy = load_policy(out, torch.float32)
    assert policy.config.max_positions == 1024
    assert load_tokenizer(out).encode("3,5,7>22:#?").tokens[6] == "22"
    with pytest.raises(ValueError, match="already holds a model; remove it or choose another folder"):
        invoke("warmup", *arguments)
    again = tmp_path / "again"
    arguments = [str(again), *TINY, "--recipe", "countdown-small", "--policy", str(out)]
    invoke("warmup", *arguments, "--examples", "4", "--epochs", "1")
    assert load_policy(again, torch.float32).config == policy.config, "it continues from a folder"


@pytest.mark.parametrize("chat", [False, True])
def test_demonstrations_are_prompted_as_in_rl(chat, tmp_path):
    folder = save_folder(tmp_path / "policy", CHATML)
    overrides = [*TINY, f"task.chat={chat}", "task.prompt_format='{prompt}Search aloud.'"]
    task = make_task(load_config("countdown", overrides).task, byte_tokenizer(), folder)
    examples = demonstration_examples(task, 20, 3, END)
    decode = task.prompts.tokenizer.decode
    for example, demonstration in zip(examples, task.demonstrations(20, 3), strict=True):
        assert example.prompt == task.prompts.encode(demonstration.problem)
        assert example.response[-1] == END
        assert decode(example.response[:-1], skip_special_tokens=False) == demonstration.response
        asked = decode(example.prompt, skip_special_tokens=False)
        assert "Search aloud." in asked and ("<|im_start|>" in asked) is chat


@pytest.mark.slow
def test_warmup_of_bf16_weights_learns_through_float32_masters(small_task):
    """What a GPU does, on the CPU: steps far below a bf16 weight's resolution still add up."""
    _, losses, totals = train(small_task, epochs=1)
    rounded, rounded_losses, _ = train(small_task, dtype=DTYPES["bfloat16"], epochs=1)
    assert rounded.dtype == torch.bfloat16
    assert losses[-1] < losses[0] - 0.1
    assert rounded_losses == pytest.approx(losses, rel=0.05)
    assert totals.examples == EXAMPLES and totals.dropped == 0


def test_warmup_does_not_depend_on_micro_batches_or_checkpointing(small_task):
    """A step is a sum over its tokens, however they are packed and whatever is kept for the backward pass."""
    _, whole, _ = train(small_task)
    _, pieces, _ = train(small_task, micro_batch_tokens=256, activation_checkpointing=True)
    assert pieces == pytest.approx(whole, rel=1e-3)


def test_demonstrations_that_rl_would_cut_off_are_left_out(small_task):
    lengths = [len(e.response) for e in demonstration_examples(small_task, EXAMPLES, 0, END)]
    limit = sorted(lengths)[20]
    _, _, totals = train(small_task, max_tokens=limit)
    assert totals.examples == sum(length <= limit for length in lengths)
    assert totals.examples + totals.dropped == EXAMPLES
    with pytest.raises(ValueError, match=r"all 32 demonstrations are too long: rollout\.max_tokens = 5"):
        train(small_task, max_tokens=5)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--recipe", "default"], "task.name = 'running-sums' has no demonstrations of its own"),
        (["--recipe", "countdown", "--policy", "fresh"], "keep to no small alphabet"),
        (["--recipe", "countdown", "--policy", "nowhere"], "policy.path = 'nowhere'"),
        (["--recipe", "countdown-small", "--data", "x.jsonl"], "examples come from one of them"),
        (["--data", "x.jsonl", "--examples", "3"], "--examples 3: --data takes every line"),
        (["--data", "nosuch"], "--data nosuch: there is no such file; give a JSONL of `prompt`"),
        (["--data", "/"], "--data /: is a folder; give a JSONL of `prompt`"),
        (["--lr", "1e-3"], "give --data FILE, a JSONL of `prompt` and `response`, or --recipe NAME"),
        (["task.seed=1"], "'task.seed=1' changes a recipe; name one with --recipe"),
    ],
)
def test_warmup_refuses_what_cannot_work(arguments, message, tmp_path):
    with pytest.raises((ConfigError, ValueError), match=re.escape(message)):
        invoke("warmup", str(tmp_path / "out"), *arguments)
    assert not (tmp_path / "out").exists()
