"""Saves a head and its training beside a run, in a thread of its own, apart from the policy's checkpoints.

    drafter/            the head as vLLM, SGLang and `load_eagle` open it, with its model card
    drafter_training/   step_000012.safetensors: head, optimiser and buffer, nothing that is not trained
                        step_000012.json: its size and digest

The run waits only while the tensors are copied to the host. A file is written under another name and
renamed, so one with its final name is complete.
"""

import copy
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from paceline.drafting.eagle_folder import save_eagle
from paceline.drafting.eagle_head import EagleHead
from paceline.drafting.model_card import MeasuredAcceptance, read_acceptance, write_card
from paceline.learning.checkpoint import fingerprint, sync
from paceline.policy.model_files import save_tensors

TRAINING_FOLDER = "drafter_training"
HEAD_FOLDER = "drafter"
FILE = re.compile(r"step_(\d+)\.safetensors", re.ASCII)
# Seconds between saves that no checkpoint asks for,
SAVE_SECONDS = 60.0
# and the share of a run's time that they may make it wait for: a large head is saved less often.
SAVE_SHARE = 0.002
# What is copied to the host in a second, and bytes for each of a head's parameters with its optimiser and its
# mean, until a save was timed: 2.6 s for the 6 GB of an 8B model's head.
COPIED_BYTES, PARAMETER_BYTES = 2.5e9, 16


class DrafterSaver:
    """Writes the newest state of a head's training; one save at a time."""

    def __init__(self, run: Path, warn: Callable[[str], None], every_seconds: float = SAVE_SECONDS) -> None:
        self.head_folder = run / HEAD_FOLDER
        self.training_folder = run / TRAINING_FOLDER
        self.warn = warn
        self.every_seconds = every_seconds
        # A resumed run's head started where the run did.
        self.first = read_acceptance(self.head_folder, "first")
        self.last = read_acceptance(self.head_folder)
        self._saved_at = time.monotonic()
        self.waited = 0.0  # seconds that the run waited for the last save, or will for the first
        self._writer: threading.Thread | None = None

    def expect(self, parameters: int) -> None:
        """Records the head's size, by which a save is estimated until one was timed."""
        self.waited = self.waited or parameters * PARAMETER_BYTES / COPIED_BYTES

    def note(self, measured: MeasuredAcceptance) -> None:
        """Records how much of the head's drafts a rollout accepted, for its card."""
        self.first = self.first or measured
        self.last = measured

    @property
    def due(self) -> bool:
        """Whether it is time to save, and the last save is written."""
        writing = self._writer is not None and self._writer.is_alive()
        pause = max(self.every_seconds, self.waited / SAVE_SHARE)
        return not writing and time.monotonic() - self._saved_at >= pause

    def save(
        self,
        step: int,
        head: EagleHead | None,
        state: Mapping[str, torch.Tensor],
        keep: Iterable[int],
        lasting: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Copies everything to the host and writes it in a thread; of older saves those in `keep` stay.

        Without a head the folder that engines load is left as it is.
        `lasting` is on the host, belongs to the state, and is never changed.
        """
        self.flush()
        _wait_for({tensor.device for tensor in state.values() if tensor.is_cuda})  # for copies to the host
        tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in state.items()}
        own = None if head is None else copy.deepcopy(head).to("cpu")
        self._saved_at = time.monotonic()
        arguments = step, own, tensors, lasting or {}, {*keep, step}, self.first, self.last
        self._writer = threading.Thread(target=self._write, args=arguments, name="drafter-saver")
        self._writer.start()

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def load(self, step: int) -> dict[str, torch.Tensor] | None:
        """Returns the state of this step, or of the newest one before; None where there is none to read."""
        saved = [number for number in self._steps() if number <= step]
        if not saved:
            return None
        newest = max(saved)
        if newest != step:
            self.warn(
                f"{self.training_folder} has no save of step {step}: the eagle head resumes from step "
                f"{newest}, and drafts as it did not before"
            )
        file = self._file(newest)
        try:
            known = self._digest(newest)
            if known.exists() and json.loads(known.read_text()) != fingerprint(file):
                raise ValueError(f"its content is not that of {known.name}")
            return load_file(file)
        except (OSError, ValueError, SafetensorError) as error:  # the run continues without it
            self.warn(f"{file} is damaged and left out: {error}")
            return None

    @property
    def has_saved(self) -> bool:
        """Whether there is a save, or one is being written."""
        return self._writer is not None or bool(self._steps())

    def keep(self, steps: Iterable[int]) -> None:
        """Removes saves of other steps, if nothing is being written."""
        _remove_saves(self.training_folder, {*self._steps()} - {*steps})

    def _write(
        self,
        step: int,
        head: EagleHead | None,
        tensors: dict[str, torch.Tensor],
        lasting: Mapping[str, torch.Tensor],
        keep: set[int],
        first: MeasuredAcceptance | None,
        last: MeasuredAcceptance | None,
    ) -> None:
        partial = self.training_folder / f".partial_{step:06d}"
        try:
            self.training_folder.mkdir(exist_ok=True)  # a deleted run folder is not recreated
            # Copies: tensors that lie in one block are refused.
            save_tensors(tensors | {name: tensor.clone() for name, tensor in lasting.items()}, partial)
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            self._digest(step).write_text(json.dumps(fingerprint(partial)))
            os.rename(partial, self._file(step))
            sync(self.training_folder)
            self.keep(keep)
        except (OSError, SafetensorError) as error:  # the run continues without it
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            self.warn(f"the eagle head of step {step} could not be saved in {self.training_folder}: {error}")
        if head is None:
            return
        try:
            self.head_folder.mkdir(exist_ok=True)
            save_eagle(head, self.head_folder)
            write_card(self.head_folder, first, last)
        except (OSError, SafetensorError) as error:
            self.warn(f"the eagle head of step {step} could not be written to {self.head_folder}: {error}")

    def _digest(self, step: int) -> Path:
        return _digest_file(self.training_folder, step)

    def _file(self, step: int) -> Path:
        return _save_file(self.training_folder, step)

    def _steps(self) -> list[int]:
        return saved_steps(self.training_folder)


def cut_back_saves(run: Path, step: int) -> None:
    """Removes what a run saved of its head after this step, whether or not a head learns this time.

    Without a save left, the head's folder is removed, too: it was the head of later steps.
    """
    folder = run / TRAINING_FOLDER
    later = {number for number in saved_steps(folder) if number > step}
    _remove_saves(folder, later)
    if later and not saved_steps(folder):
        shutil.rmtree(run / HEAD_FOLDER, ignore_errors=True)


def saved_steps(training_folder: Path) -> list[int]:
    if not training_folder.is_dir():
        return []
    found = (FILE.fullmatch(path.name) for path in training_folder.iterdir())
    return sorted(int(match.group(1)) for match in found if match)


def _remove_saves(training_folder: Path, steps: Iterable[int]) -> None:
    """Removes the saves of these steps, with their digests."""
    for step in steps:
        _save_file(training_folder, step).unlink(missing_ok=True)
        _digest_file(training_folder, step).unlink(missing_ok=True)


def _save_file(training_folder: Path, step: int) -> Path:
    return training_folder / f"step_{step:06d}.safetensors"


def _digest_file(training_folder: Path, step: int) -> Path:
    return _save_file(training_folder, step).with_suffix(".json")


def _wait_for(devices: Iterable[torch.device]) -> None:
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
