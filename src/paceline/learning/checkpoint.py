"""Checkpoints that survive a crash at any moment.

    checkpoints/step_000020/
      policy/                 a Hugging Face folder; with LoRA the merged model
      adapter/                with LoRA: a PEFT folder, from which a run resumes on the base it started from
      optimiser.safetensors   moments, and float32 masters where the policy is not float32
      drafters.safetensors    what the drafters know, where there are any
      state.json              step, optimiser steps, position in the task, best accuracy, what the sentinel remembers
      manifest.json           size and digest of every other file

A checkpoint is written beside, synced, and renamed into place: a folder named `step_*` is whole or was
damaged later, which the manifest shows. There is no random state to keep: every random number is a function
of seeds and counters.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatch
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from paceline.learning.optimiser import MasterAdamW
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import fill, save_policy, weight_reader
from paceline.policy.lora import has_adapters, load_adapters, save_adapters

ALWAYS_THERE = ("state.json", "optimiser.safetensors", "policy/config.json", "policy/*.safetensors")


@dataclass(frozen=True)
class TrainingState:
    step: int  # updates done
    optimiser_steps: int
    task_position: int
    best_accuracy: float
    fallback: str = ""  # why rollouts fell back to base precision; empty: they did not
    capped_steps: int = 0  # steps in a row in which every response reached the length limit


def save_checkpoint(
    folder: Path,
    policy: Decoder,
    optimiser: MasterAdamW,
    state: TrainingState,
    tokenizer_from: Path,
    keep: int,
    drafters: dict[str, torch.Tensor] | None = None,
) -> Path:
    final = folder / f"step_{state.step:06d}"
    partial = folder / f".partial_{state.step:06d}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_policy(policy, partial / "policy", tokenizer_from)
    if has_adapters(policy):
        save_adapters(policy, partial / "adapter", base_model=str(tokenizer_from))
    save_file(
        {name: tensor.cpu().contiguous() for name, tensor in optimiser.state().items()},
        partial / "optimiser.safetensors",
    )
    if drafters:
        save_file(
            {name: tensor.cpu().contiguous() for name, tensor in drafters.items()},
            partial / "drafters.safetensors",
        )
    (partial / "state.json").write_text(json.dumps(asdict(state), indent=2) + "\n")
    manifest = {str(path.relative_to(partial)): _fingerprint(path) for path in _files(partial)}
    (partial / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    for path in (*sorted(partial.rglob("*")), partial):
        _sync(path)
    if final.exists():  # the same step again, after a resume
        shutil.rmtree(final)
    os.rename(partial, final)
    _sync(folder)
    for old in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def save_best(folder: Path, policy: Decoder, tokenizer_from: Path) -> None:
    """The policy with the best evaluation so far."""
    replace_folder(folder / "best", lambda path: save_policy(policy, path, tokenizer_from))


def replace_folder(final: Path, write: Callable[[Path], None]) -> None:
    """What `write` makes of an empty path takes the place of `final` as a whole."""
    partial, old = final.with_name(f".partial_{final.name}"), final.with_name(f".old_{final.name}")
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    write(partial)
    if final.exists():
        os.rename(final, old)
    os.rename(partial, final)
    shutil.rmtree(old, ignore_errors=True)


def list_checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step_*") if path.suffix != ".corrupt")


def newest_checkpoint(folder: Path, warn=print) -> Path | None:
    """The newest whole checkpoint; damaged ones on the way to it are named and set aside, never deleted."""
    return next(_whole_checkpoints(folder, warn), None)


def whole_checkpoints(folder: Path, warn=print) -> list[Path]:
    """All of them, oldest first."""
    return list(_whole_checkpoints(folder, warn))[::-1]


def _whole_checkpoints(folder: Path, warn: Callable[[str], None]) -> Iterator[Path]:
    for path in reversed(list_checkpoints(folder)):
        problem = damage(path)
        if problem is None:
            yield path
            continue
        aside = path.with_name(f"{path.name}.corrupt")
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(path, aside)
        warn(f"checkpoint {path} is damaged ({problem}); set aside as {aside.name}, trying the one before it")


def damage(path: Path) -> str | None:
    try:
        manifest = json.loads((path / "manifest.json").read_text())
    except (OSError, ValueError) as error:
        return f"manifest.json: {error}"
    listed = manifest if isinstance(manifest, dict) else {}  # one that lists nothing would find nothing wrong
    missing = [pattern for pattern in ALWAYS_THERE if not any(fnmatch(name, pattern) for name in listed)]
    if missing:
        return f"manifest.json does not list {missing[0]}"
    for name, expected in manifest.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        if _fingerprint(path / name) != expected:
            return f"{name} does not have the content that was saved"
    return None


def load_checkpoint(path: Path, policy: Decoder, optimiser: MasterAdamW) -> TrainingState:
    known = {field.name for field in fields(TrainingState)}  # an earlier version may have kept more
    state = TrainingState(
        **{key: value for key, value in json.loads((path / "state.json").read_text()).items() if key in known}
    )
    if has_adapters(policy):
        load_adapters(policy, path / "adapter")
    else:
        fill(policy, weight_reader(path / "policy"))
    optimiser.load_state(load_file(path / "optimiser.safetensors"), state.optimiser_steps)
    return state


def load_drafters(path: Path) -> dict[str, torch.Tensor]:
    file = path / "drafters.safetensors"
    return load_file(file) if file.is_file() else {}


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _fingerprint(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        return {
            "bytes": path.stat().st_size,
            "blake2b": hashlib.file_digest(file, "blake2b").hexdigest()[:32],
        }


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
