"""Checkpoints that survive a crash at any moment.

    checkpoints/step_000020/
      policy/                 a Hugging Face folder; with LoRA the merged model
      adapter/                with LoRA: a PEFT folder, from which a run resumes on the base it started from
      optimiser.safetensors   moments, and float32 masters where the policy is not float32; of several ranks
                              a file each and optimiser.json (`optimiser_files.py`)
      drafters.safetensors    what drafters learned, where there are any, and how long responses are expected
                              to be, where that decides the order of requests
      calibration.safetensors scales of an FP8 KV cache, where there is one
      under_way.json          groups that the next steps continue, where the mode leaves any
      config.yaml             the recipe that the run had, every key spelt out
      state.json              step, optimiser steps, position in the task, best accuracy, the sentinel's state
      manifest.json           size and digest of every other file

A checkpoint is written beside, synced, and renamed into place: a folder named `step_*` is whole or was
damaged later, which the manifest shows. One that cannot be written leaves nothing behind; `tidy` cleans up
after a killed process. There is no random state to keep: every random number is a function of seeds and
counters.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from fnmatch import fnmatch
from pathlib import Path

import torch
from safetensors.torch import load_file

from paceline.learning.optimiser import MasterAdamW
from paceline.learning.optimiser_files import ANY_FILE, SINGLE_FILE, OptimiserFiles
from paceline.policy.decoder import Decoder
from paceline.policy.huggingface import fill, save_policy, weight_reader
from paceline.policy.lora import has_adapters, load_adapters, save_adapters
from paceline.policy.model_files import save_tensors

DRAFTERS_FILE = "drafters.safetensors"
CALIBRATION_FILE = "calibration.safetensors"
CONFIG_FILE = "config.yaml"
UNDER_WAY_FILE = "under_way.json"
CALIBRATION_PREFIX = "precision."  # of the names of its tensors
ADMISSION_PREFIX = "admission."  # of what lies beside the drafters' tensors
ALWAYS_THERE = ("state.json", ANY_FILE, "policy/config.json", "policy/*.safetensors")

# The policy that did best, beside the checkpoints.
BEST = "best"

NAME = re.compile(r"step_(\d+)")
# Prefixes of folders that are being written or removed.
PARTIAL = ".partial_"
OLD = ".old_"
REMOVED = ".removed_"


# A file's size and digest.
Fingerprint = dict[str, int | str]


@dataclass(frozen=True)
class TrainingState:
    """The counters of a run, from which everything random follows."""

    step: int  # updates done
    optimiser_steps: int
    task_position: int
    best_reward: float | None = None  # of the evaluations so far; that policy is in `best/`
    fallback: str = ""  # why rollouts fell back to base precision; empty: they did not
    capped_steps: int = 0  # steps in a row in which every response reached the length limit
    eval_due: bool = False  # interrupted before this step's evaluation, which a resumed run makes first


@dataclass(frozen=True)
class Beside:
    """What a checkpoint holds beside policy, optimiser and counters."""

    drafters: Mapping[str, torch.Tensor] = field(default_factory=dict)
    calibration: Mapping[str, torch.Tensor] = field(default_factory=dict)
    recipe: str = ""
    under_way: str = ""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.drafters.values(), *self.calibration.values()))


def save_checkpoint(
    folder: Path,
    policy: Decoder,
    optimiser: MasterAdamW,
    state: TrainingState,
    tokenizer_from: Path,
    keep: int,
    beside: Beside = Beside(),
) -> Path:
    """Writes a checkpoint of this step, removes all but the newest `keep`, and returns its folder."""

    def write_learned(partial: Path) -> dict[str, Fingerprint]:
        save_policy(policy, partial / "policy", tokenizer_from)
        if has_adapters(policy):
            save_adapters(policy, partial / "adapter", base_model=str(tokenizer_from))
        _save_tensors(optimiser.state(), partial / SINGLE_FILE)
        return {}

    return write_checkpoint(folder, write_learned, state, keep, beside)


def write_checkpoint(
    folder: Path,
    write_learned: Callable[[Path], Mapping[str, Fingerprint]],
    state: TrainingState,
    keep: int,
    beside: Beside = Beside(),
) -> Path:
    """Writes a checkpoint whose policy and optimiser `write_learned` writes into a folder that it is given.

    It returns the fingerprints of its files as far as it knows them; the others are computed here. Meanwhile
    a thread writes what drafters learned: a head that learns is large.
    """

    def write(partial: Path) -> None:
        partial.mkdir(parents=True)
        with ThreadPoolExecutor(1) as thread:
            written = thread.submit(_save_any, beside.drafters, partial / DRAFTERS_FILE)
            known = write_learned(partial)
        written.result()
        _save_any(beside.calibration, partial / CALIBRATION_FILE)
        for text, name in ((beside.recipe, CONFIG_FILE), (beside.under_way, UNDER_WAY_FILE)):
            if text:
                (partial / name).write_text(text)
        (partial / "state.json").write_text(json.dumps(asdict(state), indent=2) + "\n")
        _write_manifest(partial, known)

    final = folder / f"step_{state.step:06d}"
    replace_folder(final, write)
    for old in list_checkpoints(folder)[:-keep]:
        _remove(old)
    return final


def replace_best(folder: Path, save: Callable[[Path], None]) -> None:
    """Replaces `best`, a policy alone, by what `save` writes."""

    def write(partial: Path) -> None:
        save(partial)
        _write_manifest(partial)

    replace_folder(folder / BEST, write)


def _write_manifest(folder: Path, known: Mapping[str, Fingerprint] | None = None) -> None:
    names = [str(path.relative_to(folder)) for path in _files(folder)]
    manifest = {name: (known or {}).get(name) or fingerprint(folder / name) for name in names}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


def replace_folder(final: Path, write: Callable[[Path], None]) -> None:
    """Replaces the folder `final` as a whole by what `write` makes of an empty path.

        .partial_X   being written          killed here: X is the old one
        .old_X       X, moved aside         killed here: `tidy` moves it, or the new one, into place
        X            the new one

    Where writing fails, what was written is removed again.
    """
    partial = final.with_name(f"{PARTIAL}{final.name}")
    old = final.with_name(f"{OLD}{final.name}")
    for leftover in (partial, old):
        _discard(leftover)
    try:
        write(partial)
        for path in (*sorted(partial.rglob("*")), partial):
            sync(path)
    except Exception:
        _discard(partial)
        raise
    if final.exists() or final.is_symlink():
        os.rename(final, old)
    os.rename(partial, final)
    sync(final.parent)
    _discard(old)


def tidy(folder: Path) -> None:
    """Cleans up after a process that was killed while saving; the caller holds the run's lock."""
    for old in folder.glob(f"{OLD}*"):
        final = folder / old.name.removeprefix(OLD)
        partial = folder / f"{PARTIAL}{final.name}"
        if not final.exists():  # moved aside once the new one was whole
            os.rename(partial if partial.exists() else old, final)
        _discard(old)
    for leftover in (*folder.glob(f"{PARTIAL}*"), *folder.glob(f"{REMOVED}*")):
        _discard(leftover)


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns a run's checkpoints, oldest first, whole or not; folders of other names are not ours."""
    found = [path for path in folder.glob("step_*") if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def newest_checkpoint(
    folder: Path, warn: Callable[[str], None] = print, set_aside: bool = True
) -> Path | None:
    """Returns the newest whole checkpoint; damaged ones on the way to it are set aside, never deleted.

    Without the run's lock nothing is moved (`set_aside=False`): another process may be at work on it.
    """
    return next(_whole_checkpoints(folder, warn, set_aside), None)


def whole_checkpoints(folder: Path, warn: Callable[[str], None] = print) -> list[Path]:
    """Returns the whole checkpoints, oldest first; damaged ones are set aside."""
    return list(_whole_checkpoints(folder, warn))[::-1]


def _whole_checkpoints(folder: Path, warn: Callable[[str], None], set_aside: bool = True) -> Iterator[Path]:
    for path in reversed(list_checkpoints(folder)):
        problem = damage(path)
        if problem is None:
            yield path
            continue
        if not set_aside:
            warn(f"checkpoint {path} is damaged ({problem}); trying the one before it")
            continue
        aside = path.with_name(f"{path.name}.corrupt")
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(path, aside)
        warn(f"checkpoint {path} is damaged ({problem}); set aside as {aside.name}, trying the one before it")


def damage(path: Path) -> str | None:
    """Returns how a checkpoint is damaged; None if it is whole."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
    except (OSError, ValueError, RecursionError) as error:
        return f"manifest.json: {error}"
    listed = manifest if isinstance(manifest, dict) else {}  # an empty list would pass every check
    needed = () if path.name == BEST else ALWAYS_THERE
    missing = [pattern for pattern in needed if not any(fnmatch(name, pattern) for name in listed)]
    if missing:
        return f"manifest.json does not list {missing[0]}"
    for name, expected in manifest.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        try:
            found = fingerprint(path / name)
        except OSError as error:  # a disk that is failing, or a checkpoint that is being removed
            return f"{name}: {error}"
        if found != expected:
            return f"{name} does not have the content that was saved"
    return None


def checkpoint_steps(folder: Path) -> list[int]:
    found = (NAME.fullmatch(path.name) for path in list_checkpoints(folder))
    return [int(match.group(1)) for match in found if match]


def load_checkpoint(path: Path, policy: Decoder, optimiser: MasterAdamW) -> TrainingState:
    """Restores policy and optimiser from a checkpoint of any number of ranks, and returns the counters."""
    state = read_state(path)
    if has_adapters(policy):
        load_adapters(policy, path / "adapter")
    else:
        fill(policy, weight_reader(path / "policy"))
    optimiser.load_state(OptimiserFiles(path, optimiser.rows()), state.optimiser_steps)
    return state


def read_state(path: Path) -> TrainingState:
    known = {field.name for field in fields(TrainingState)}  # an earlier version may have kept more
    found = json.loads((path / "state.json").read_text())
    if found.get("best_accuracy", -1) >= 0:  # earlier versions chose the best by accuracy
        found.setdefault("best_reward", found["best_accuracy"])
    return TrainingState(**{key: value for key, value in found.items() if key in known})


def load_drafters(path: Path) -> dict[str, torch.Tensor]:
    """Returns the drafters' tensors of a checkpoint; empty without drafters."""
    tensors = _without_calibration(_load_tensors(path / DRAFTERS_FILE))
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(ADMISSION_PREFIX)}


def load_admission(path: Path) -> dict[str, torch.Tensor]:
    """Returns the expected response lengths of a checkpoint; empty where it has none."""
    return {
        name.removeprefix(ADMISSION_PREFIX): tensor
        for name, tensor in _load_tensors(path / DRAFTERS_FILE).items()
        if name.startswith(ADMISSION_PREFIX)
    }


def load_calibration(path: Path) -> dict[str, torch.Tensor]:
    """Returns a checkpoint's scales; early checkpoints kept them with the drafters' tensors."""
    if (path / CALIBRATION_FILE).is_file():
        return _load_tensors(path / CALIBRATION_FILE)
    everything = _load_tensors(path / DRAFTERS_FILE)
    drafters = _without_calibration(everything)
    return {name: tensor for name, tensor in everything.items() if name not in drafters}


def load_under_way(path: Path) -> str:
    """Returns the unfinished groups of a checkpoint's source; empty without any."""
    file = path / UNDER_WAY_FILE
    return file.read_text() if file.is_file() else ""


def _without_calibration(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(CALIBRATION_PREFIX)}


def _save_tensors(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    save_tensors({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, file)


def _save_any(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Writes tensors; no file where there are none."""
    if tensors:
        _save_tensors(tensors, file)


def _load_tensors(file: Path) -> dict[str, torch.Tensor]:
    return load_file(file) if file.is_file() else {}


def _remove(checkpoint: Path) -> None:
    """Removes a checkpoint; under its own name it is whole or gone."""
    out = checkpoint.with_name(f"{REMOVED}{checkpoint.name}")
    _discard(out)
    os.rename(checkpoint, out)
    _discard(out)


def _discard(path: Path) -> None:
    """Removes a folder; of a link only the link, never its target."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def fingerprint(path: Path) -> Fingerprint:
    with path.open("rb") as file:
        return {
            "bytes": path.stat().st_size,
            "blake2b": hashlib.file_digest(file, "blake2b").hexdigest()[:32],
        }


def sync(path: Path) -> None:
    """Waits until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
