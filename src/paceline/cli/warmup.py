"""What `paceline warmup` does: a policy, trained on examples on this machine's device, as a new folder."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import typer

from paceline.cli.progress import ShowStep
from paceline.cli.saving import refuse_unwritable_folder, writing_folder
from paceline.config import Config, ConfigError, load_config
from paceline.device import learning_threads, prepare_device
from paceline.learning.warmup import (
    Progress,
    WarmupSettings,
    WarmupTotals,
    warm_up_on_file,
    warm_up_on_task,
    write_fresh_policy,
)
from paceline.models.source import policy_dtype, policy_folder
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import load_policy, save_policy
from paceline.policy.tokenizer import load_tokenizer
from paceline.tasks.make import make_task, task_alphabet

# In place of a policy's folder: an untrained one of the built-in shape, in the task's own alphabet.
FRESH = "fresh"


def refuse_existing(out: Path) -> None:
    """Raises where a new checkpoint would overwrite another model, or cannot be written."""
    if (out / "config.json").exists():
        raise ValueError(f"{out} already holds a model; remove it or choose another folder")
    refuse_unwritable_folder("OUT", out)


def loss_progress(show: ShowStep) -> Progress:
    return lambda step, total, loss: show(step, total, f"loss {loss:.4f}")


def warm_up_from_file(
    out: Path, data: Path, policy: str, settings: WarmupSettings, progress: Progress
) -> None:
    folder = policy_folder(policy)
    tokenizer = load_tokenizer(folder)

    def train(decoder: Decoder) -> WarmupTotals:
        return warm_up_on_file(decoder, tokenizer, data, settings, progress)

    _warm_up(out, folder, load_config(), train)


def warm_up_from_task(
    out: Path,
    recipe: str,
    overrides: list[str],
    policy: str,
    examples: int,
    settings: WarmupSettings,
    progress: Progress,
) -> None:
    config = load_config(recipe, overrides)
    settings = replace(
        settings,
        micro_batch_tokens=config.learning.micro_batch_tokens,
        activation_checkpointing=config.policy.activation_checkpointing is True,
    )
    with _starting_folder(policy, config, settings.seed) as folder:
        task = make_task(config.task, load_tokenizer(folder), folder)
        try:
            if task.demonstrations is None:
                raise ConfigError(
                    f"task.name = {config.task.name!r} has no demonstrations of its own; countdown has. Use "
                    "--data with a file of prompts and responses"
                )

            def train(decoder: Decoder) -> WarmupTotals:
                limit = config.rollout.max_tokens
                return warm_up_on_task(decoder, task, examples, limit, settings, progress)

            _warm_up(out, folder, config, train)
        finally:
            task.close()


@contextmanager
def _starting_folder(policy: str, config: Config, seed: int) -> Iterator[Path]:
    if policy != FRESH:
        yield policy_folder(policy)
        return
    with tempfile.TemporaryDirectory() as scratch:
        write_fresh_policy(Path(scratch), task_alphabet(config.task), seed)
        yield Path(scratch)


def _warm_up(out: Path, folder: Path, config: Config, train: Callable[[Decoder], WarmupTotals]) -> None:
    """Loads, trains and writes; a new folder appears when everything in it is there."""
    _refuse_used(out)
    device = prepare_device(config)
    policy = load_policy(folder, policy_dtype(config.policy, device), device)
    start = time.monotonic()
    with learning_threads(config):
        totals = train(policy)
    seconds = time.monotonic() - start
    # Another folder cannot be put in the place of a link, a mount or the current one.
    written = out if out.is_dir() else out.with_name(f"{out.name}.unfinished")
    with writing_folder("OUT", written):
        save_policy(policy, written, tokenizer_from=folder)
    if written != out:
        os.replace(written, out)
    dropped = f", {totals.dropped} too long and left out" if totals.dropped else ""
    typer.echo(
        f"{totals.examples} examples{dropped}; {totals.tokens:,} tokens in {seconds:.0f} s on {device.type} "
        f"({totals.tokens / seconds:,.0f} tokens/s)"
    )


def _refuse_used(out: Path) -> None:
    held = next(out.iterdir(), None) if out.is_dir() else None
    if held is not None:
        raise ValueError(f"OUT {out}: is not empty: it holds {held.name}; choose a new folder")
