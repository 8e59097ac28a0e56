"""One case of the soak: a run, up to three disturbances with damage in between, and what must come of it."""

import json
import os
import random
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from paceline.drafting import online
from tests.forked import ForkedCommand
from tests.loop_helpers import comparable_metrics, tiny_overrides
from tests.soak.damage import damage
from tests.soak.disturb import FILE_OPERATIONS, Disturbance, draw

STEPS = 5
SMALL = [
    "task.train_problems=6",
    "task.eval_problems=1",
    "rollout.prompts_per_step=2",
    "rollout.samples_per_prompt=2",
    "rollout.max_tokens=3",
    "eval.max_tokens=3",
    "eval.every=0",
    "rollout.speculation.drafters=[]",
]
VARIANTS = {
    "plain": [],
    "evaluated": ["eval.every=2"],
    "history": [
        "rollout.speculation.drafters=[history]",
        "rollout.speculation.pacing=fixed",  # an adaptive pacer decides by measured times
        "rollout.speculation.tokens=2",
    ],
    "partial": [
        "rollout.mode=partial",
        "rollout.max_lag=2",
        "rollout.max_running=3",
        "rollout.admission=longest",
        "rollout.max_tokens=12",
        "rollout.speculation.drafters=[history]",
        "rollout.speculation.shape=tree",
        "rollout.speculation.pacing=fixed",
        "rollout.speculation.tokens=5",
    ],
    "bf16": ["policy.dtype=bfloat16", "learning.kl_coef=0.05"],
    "lora": ["policy.lora.rank=2", "learning.algorithm=reinforce++", "learning.lr=1e-2"],
    "dapo": ["learning.algorithm=dapo", "learning.dynamic_sampling_rounds=2"],
    # Which groups a step takes depends on how long they took to write, and so on what the head proposed.
    "learning head": [
        "rollout.mode=oversample",
        "rollout.prompts_in_flight=4",
        "rollout.max_running=3",
        "rollout.max_tokens=9",
        "rollout.speculation.drafters=[eagle]",
        "rollout.speculation.eagle_path=fresh",
        "rollout.speculation.pacing=fixed",
        "rollout.speculation.tokens=2",
        "rollout.speculation.online.share=0.5",
        "rollout.speculation.online.lr=0.02",
    ],
    "workers": ["task.rewards=[{function: 'tests.soak.rewards:by_length'}]", "task.reward_workers=1"],
}
WEIGHTS = (25, 15, 10, 10, 10, 10, 10, 10, 10)

# A process that takes longer hangs.
PATIENCE_SECONDS = 600.0

# Resumes until a run must have got through.
MAX_RESUMES = 4


class SoakFailure(AssertionError):
    """A case that ended neither in the right weights nor in a clear refusal."""


@dataclass
class Reference:
    """An undisturbed run of a variant."""

    run: Path
    operations: int  # on files


@dataclass
class Outcome:
    """What happened in a case."""

    events: list[str] = field(default_factory=list)
    refused: bool = False  # and rightly so: what only a person has was lost


def overrides(policy: Path, root: Path, variant: str) -> list[str]:
    kept = [key for key in tiny_overrides(policy, root, "run", STEPS) if "speculation" not in key]
    return [*kept, *SMALL, *VARIANTS[variant]]


def draw_variant(rng: random.Random) -> str:
    """Draws what kind of run a case disturbs, before anything else."""
    return rng.choices(list(VARIANTS), WEIGHTS)[0]


def make_reference(policy: Path, root: Path, variant: str) -> Reference:
    """Makes the run that disturbed ones must equal, and counts its file operations."""
    root.mkdir(parents=True)

    def prepare() -> None:
        counts = root / "operations"
        for name in FILE_OPERATIONS:
            setattr(os, name, _counted(getattr(os, name), counts))

    command = start(["train", *overrides(policy, root, variant)], prepare)
    if command.wait(PATIENCE_SECONDS) != 0:
        raise SoakFailure(f"the undisturbed run of {variant} failed:\n{command.text()}")
    return Reference(root / "run", (root / "operations").stat().st_size)


def start(arguments: list[str], prepare: Callable[[], None]) -> ForkedCommand:
    """Starts a command in which a head that learns makes one update a step, however fast the machine is."""

    def both() -> None:
        online.updates_for = lambda *seconds: 1.0
        prepare()

    return ForkedCommand(arguments, both)


def _counted(real, file: Path):
    def operation(*arguments, **more):
        with file.open("ab") as counts:
            counts.write(b".")
        return real(*arguments, **more)

    return operation


class Case:
    """A case is a function of its seed alone."""

    def __init__(self, seed: int, policy: Path, references: dict[str, Reference], root: Path) -> None:
        self.rng = random.Random(seed)
        self.policy = policy
        self.root = root
        self.run_folder = root / "run"
        self.variant = draw_variant(self.rng)
        self.reference = references[self.variant]
        self.outcome = Outcome()
        self.harmed: list[str] = []

    def play(self) -> Outcome:
        """Runs the case; raises `SoakFailure`."""
        self.root.mkdir(parents=True)
        for _ in range(self.rng.choice((1, 1, 2, 3))):
            if self.outcome.refused:
                return self.outcome
            if self.rng.random() < 0.08:
                self._two_at_once()
            else:
                self._disturbed(draw(self.rng, self.reference.operations))
            if self.run_folder.exists() and self.rng.random() < 0.45:
                harm = damage(self.run_folder, self.rng)
                self.harmed.append(harm)
                self.outcome.events.append(f"damage: {harm}")
        self._finish()
        if not self.outcome.refused:
            self._compare()
        return self.outcome

    def _arguments(self) -> list[str]:
        if self.run_folder.exists():
            return ["train", "--resume", str(self.run_folder)]
        return ["train", *overrides(self.policy, self.root, self.variant)]

    def _start(self, prepare=lambda: None) -> ForkedCommand:
        return start(self._arguments(), prepare)

    def _disturbed(self, disturbance: Disturbance) -> None:
        self.outcome.events.append(disturbance.kind)
        command = self._start(disturbance.prepare)
        code = command.wait(PATIENCE_SECONDS)
        if code == 2 and self._was_refused(command):
            return
        if code not in disturbance.exit_codes:
            raise SoakFailure(f"{disturbance.kind}: exit code {code}:\n{command.text()}")
        self._no_traceback(command)
        if code == 1 and "paceline train --resume" not in command.text():
            raise SoakFailure(f"{disturbance.kind}: no word on how to continue:\n{command.text()}")

    def _two_at_once(self) -> None:
        self.outcome.events.append("two at once")
        both = [self._start(), self._start()]
        codes = [command.wait(PATIENCE_SECONDS) for command in both]
        for command, code in zip(both, codes, strict=True):
            self._no_traceback(command)
            if code == 2 and re.search(r"is held by|exists\. Continue", command.text()):
                continue
            if code == 2 and self._was_refused(command):
                continue
            if code != 0:
                raise SoakFailure(f"two at once: exit codes {codes}:\n{command.text()}")

    def _finish(self) -> None:
        for _ in range(MAX_RESUMES):
            command = self._start()
            code = command.wait(PATIENCE_SECONDS)
            self._no_traceback(command)
            if code == 0:
                return
            if code == 2 and self._was_refused(command):
                if self.outcome.refused:
                    return
                continue
            raise SoakFailure(f"the last, undisturbed process: exit code {code}:\n{command.text()}")
        raise SoakFailure("it never got through")

    def _was_refused(self, command: ForkedCommand) -> bool:
        """Returns whether the refusal was a clear one about a lost recipe, and does what it says."""
        text = command.text()
        self._no_traceback(command)
        if not any(harm.endswith(" config.yaml") for harm in self.harmed):
            return False
        if f"{self.run_folder}" not in text or "error: " not in text:
            return False
        restore = re.search(r"(?:[Rr]estore it with: )(cp .*)", text)
        if restore:
            subprocess.run(shlex.split(restore.group(1)), check=True)
            self.outcome.events.append("recipe restored")
        else:
            self.outcome.refused = True
        return True

    def _no_traceback(self, command: ForkedCommand) -> None:
        if "Traceback" in command.text():
            raise SoakFailure(f"a traceback:\n{command.text()}")

    def _compare(self) -> None:
        last = f"checkpoints/step_{STEPS:06d}"
        for file in ("policy/model.safetensors", "optimiser.safetensors"):
            if (self.run_folder / last / file).read_bytes() != (
                self.reference.run / last / file
            ).read_bytes():
                raise SoakFailure(f"{file} of step {STEPS} differs")
        if not any(harm.endswith("metrics.jsonl") for harm in self.harmed):
            if comparable_metrics(self.run_folder) != comparable_metrics(self.reference.run):
                raise SoakFailure("the metrics differ")
        else:
            self._compare_steps_once()
        left = [
            path.name for path in (self.run_folder / "checkpoints").iterdir() if path.name.startswith(".")
        ]
        if left:
            raise SoakFailure(f"left over: {left}")

    def _compare_steps_once(self) -> None:
        """Of damaged metrics some may be gone; none is there twice."""
        lines = (self.run_folder / "metrics.jsonl").read_text().splitlines()
        records = [(record["step"], record["kind"]) for record in map(json.loads, lines)]
        if len(set(records)) < len(records):
            raise SoakFailure(f"steps are there twice: {records}")

    def clean(self) -> None:
        """Removes what a case that went well has written."""
        shutil.rmtree(self.root, ignore_errors=True)
