"""What a run directory tells: lengths, stage times, acceptance. The start of a "what if".

The simulation's steps take measured / simulated seconds of the run itself times as long, so what the model
gets wrong about the machine cancels as far as it is the same factor; that factor is shown.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from paceline.config import Config
from paceline.pacing.trace import read_trace
from paceline.report.run_directory import SAMPLES_FILE, RunDirectory, has_numbers
from paceline.simulate.hardware import Origin, Source
from paceline.simulate.questions import Flags, ask, build, flags_from_recipe
from paceline.simulate.report import Answer
from paceline.simulate.scenario import GivenStages, Scenario, simulate
from paceline.simulate.speculation import Acceptance
from paceline.simulate.workload import Lengths

FEW_SAMPLES = 32  # below this many lengths the metrics' mean and 95th percentile are better than the samples
DEFAULT_PROMPT_TOKENS = 128  # of a run without samples
NEEDED_METRICS = (
    *("time/rollout", "time/learn", "time/sync"),
    *("rollout/tokens", "rollout/length_mean", "rollout/length_p95"),
)
Z95 = 1.645  # the standard normal's 95th percentile


@dataclass(frozen=True)
class RunFacts:
    """What the later half of a run's steps say."""

    name: str
    config: Config
    steps: int
    lengths: Lengths
    prompt_tokens: int
    rollout_seconds: float
    learn_seconds: float
    sync_seconds: float
    tokens: float  # responses, per step
    acceptance: Acceptance | None


def read_run(path: Path) -> RunFacts:
    """Reads a run directory."""
    run = RunDirectory.open(path)
    config = run.config()
    if config.rollout.mode != "sync":
        raise ValueError(
            f"{path} ran with rollout.mode = {config.rollout.mode!r}, whose rollouts are not whole batches: "
            "start from a run with mode=sync, and ask for the other with --mode"
        )
    trained = [
        record
        for record in run.read_metrics()
        if record["kind"] == "train" and has_numbers(record, *NEEDED_METRICS) and _makes_sense(record)
    ]
    if not trained:
        raise ValueError(f"{path} holds no finished training step yet: let the run make at least one")
    late = trained[len(trained) // 2 :]  # the first steps compile, and lengths drift
    steps = [int(record["step"]) for record in late]
    observed, prompts = _samples(run, set(steps))
    if len(observed) >= FEW_SAMPLES:
        note = f"{len(observed)} responses in {path}/samples, steps {steps[0]} to {steps[-1]}"
        origin = Origin(Source.MEASURED, note)
        lengths = Lengths(mean(observed), 0.0, min(observed), max(observed), tuple(observed), origin)
    else:
        lengths = _lengths_from_metrics(late, config.rollout.max_tokens)
    return RunFacts(
        name=path.name,
        config=config,
        steps=len(late),
        lengths=lengths,
        prompt_tokens=round(mean(prompts)) if prompts else DEFAULT_PROMPT_TOKENS,
        rollout_seconds=median(record["time/rollout"] for record in late),
        learn_seconds=median(record["time/learn"] for record in late),
        sync_seconds=median(record["time/sync"] for record in late),
        tokens=mean(record["rollout/tokens"] for record in late),
        acceptance=_acceptance(run, config, late),
    )


def _makes_sense(record: dict) -> bool:
    """Returns whether a step's times are times, and something was generated."""
    finite = all(0 <= record[key] < math.inf for key in NEEDED_METRICS)
    return finite and record["time/rollout"] > 0 and record["rollout/length_mean"] > 0


def _acceptance(run: RunDirectory, config: Config, records: list[dict]) -> Acceptance | None:
    """Returns what the run's drafters reached, where it had any."""
    key = "speculation/accept_length"
    accept = [record[key] for record in records if has_numbers(record, key) and 1 <= record[key] < math.inf]
    if not accept or not config.rollout.speculation.drafters:
        return None
    steps = {int(record["step"]) for record in records}
    tokens = _proposal_length(run, steps) or config.rollout.speculation.tokens
    origin = Origin(Source.MEASURED, f"accept length {mean(accept):.2f} at k = {tokens} in {run.path}")
    return Acceptance.from_accept_length(min(mean(accept), tokens + 1.0), tokens, origin)


def _proposal_length(run: RunDirectory, steps: set[int]) -> int:
    """Returns the mean number of draft tokens where there were any; 0 without a trace.

    Adaptive pacing varies it.
    """
    rows = [
        row
        for step, rows in read_trace(run.trace_path).items()
        if step in steps
        for row in rows
        if row.decision.strategy.count
    ]
    verified = sum(row.rows for row in rows)
    return round(sum(row.decision.strategy.count * row.rows for row in rows) / verified) if verified else 0


def _samples(run: RunDirectory, steps: set[int]) -> tuple[list[int], list[int]]:
    """Returns the lengths of the responses and of their prompts."""
    lengths, prompts = [], []
    for file in sorted(run.samples_path.glob("step_*.jsonl")):
        name = SAMPLES_FILE.fullmatch(file.name)
        if name is None or int(name.group(1)) not in steps:
            continue
        for number, line in enumerate(file.read_bytes().splitlines(), start=1):
            try:
                for sample in json.loads(line)["samples"]:
                    prompts.append(len(sample["request"]["prompt"]))
                    lengths.append(max(1, len(sample["tokens"])))
            except (ValueError, KeyError, TypeError, RecursionError):
                raise ValueError(
                    f"{file}, line {number}: damaged or cut off; remove the file to go without its step"
                ) from None
    return lengths, prompts


def _lengths_from_metrics(records: list[dict], limit: int) -> Lengths:
    """Returns the log-normal with the recorded mean and 95th percentile.

    ln p95 = mu + 1.645 sigma, ln mean = mu + sigma^2 / 2.
    """
    average = mean(record["rollout/length_mean"] for record in records)
    p95 = max(average, mean(record["rollout/length_p95"] for record in records))
    excess = Z95**2 - 2 * math.log(p95 / average)
    sigma = Z95 - math.sqrt(excess) if excess > 0 else Z95
    origin = Origin(Source.FITTED, "log-normal through the recorded mean and 95th percentile")
    return Lengths(average, sigma, 1, limit, origin=origin)


def scenario_of(
    facts: RunFacts,
    flags: Flags,
    length_scale: float = 1.0,
    stages: GivenStages | None = None,
    own_acceptance: bool = True,
) -> Scenario:
    """Returns the flags' scenario with the run's lengths and, with `own_acceptance`, its acceptance."""
    scenario = build(flags)
    speculation = scenario.speculation
    if facts.acceptance is not None and own_acceptance:
        speculation = dataclasses.replace(speculation, acceptance=facts.acceptance)
    lengths = facts.lengths if length_scale == 1.0 else _scaled(facts.lengths, length_scale)
    return dataclasses.replace(
        scenario,
        workload=dataclasses.replace(scenario.workload, lengths=lengths, prompt_tokens=facts.prompt_tokens),
        speculation=speculation,
        stages=stages or scenario.stages,
    )


def _scaled(lengths: Lengths, factor: float) -> Lengths:
    return dataclasses.replace(
        lengths,
        mean=lengths.mean * factor,
        high=round(lengths.high * factor),
        observed=tuple(max(1, round(n * factor)) for n in lengths.observed),
        origin=Origin(Source.ASSUMED, f"the run's lengths x {factor:g}"),
    )


@dataclass(frozen=True)
class RunAnswer:
    """A run, simulated as it was and as it would be with some changes."""

    facts: RunFacts
    base: Answer  # the run itself, simulated with the correction
    changed: Answer

    @property
    def correction(self) -> float:
        """Returns the measured over the simulated rollout seconds of the run itself."""
        return self.changed.scenario.correction

    @property
    def rollout_seconds(self) -> float:
        """Returns the corrected seconds of a rollout after the changes."""
        return self.changed.outcome.rollout_seconds

    @property
    def step_seconds(self) -> float:
        """Returns the corrected seconds of a step after the changes."""
        return self.changed.outcome.step_seconds


def what_if(
    facts: RunFacts,
    hardware: str,
    length_scale: float = 1.0,
    move_to: str | None = None,
    **changes: object,
) -> RunAnswer:
    """Simulates a run that `hardware` made, as it was and with changes.

    Responses become `length_scale` times as long, the run moves to other hardware, and any of `Flags` may
    change.
    """
    if not 0 < length_scale < math.inf:
        raise ValueError(f"--length-scale {length_scale}: must be above 0; 2 means twice as long")
    flags = dataclasses.replace(flags_from_recipe(facts.config), hardware=hardware)
    origin = Origin(Source.MEASURED, f"stage times of {facts.name}, scaled by tokens over devices")
    measured = GivenStages(0.0, facts.learn_seconds, facts.sync_seconds, origin)
    as_it_was = scenario_of(facts, flags, stages=measured)
    correction = facts.rollout_seconds / simulate(as_it_was).rollout_seconds
    base = ask(dataclasses.replace(as_it_was, correction=correction))
    flags = dataclasses.replace(flags, hardware=move_to or hardware, **changes)
    unscaled = scenario_of(facts, flags, length_scale)  # to count its devices and tokens
    work = length_scale * unscaled.workload.responses / base.scenario.workload.responses
    learn = facts.learn_seconds * work * base.scenario.train_devices / unscaled.train_devices
    stages = dataclasses.replace(measured, train=learn)
    if "model" in changes or move_to is not None:
        stages = GivenStages()  # another model or device: nothing of the run's learning carries over
    scenario = scenario_of(facts, flags, length_scale, stages, own_acceptance="accept" not in changes)
    return RunAnswer(facts, base, ask(dataclasses.replace(scenario, correction=correction)))


def text(answer: RunAnswer) -> str:
    """Returns the figures of the run and of the changed one, for a person."""
    facts, changed = answer.facts, answer.changed.outcome
    simulated = facts.rollout_seconds / answer.correction
    off = simulated / facts.rollout_seconds - 1
    plain = answer.changed.plain.rollout_seconds
    before = facts.rollout_seconds + facts.learn_seconds + facts.sync_seconds
    learning = changed.stages.logprob + changed.stages.train
    tokens = changed.tokens / answer.changed.scenario.schedule.steps
    rows = [
        f"{'rollout':<34}{facts.rollout_seconds:>12.2f}{answer.rollout_seconds:>12.2f}"
        f"   ({plain:.2f} without speculation)",
        f"{'learning':<34}{facts.learn_seconds:>12.2f}{learning:>12.2f}",
        f"{'weight sync':<34}{facts.sync_seconds:>12.2f}{changed.stages.sync:>12.2f}",
        f"{'step':<34}{before:>12.2f}{answer.step_seconds:>12.2f}",
        f"{'generated tokens per step':<34}{facts.tokens:>12.0f}{tokens:>12.0f}",
    ]
    return "\n".join(
        [
            f"{facts.name}: rollout {facts.rollout_seconds:.2f} s measured (median of {facts.steps} steps), "
            f"{simulated:.2f} s simulated ({100 * off:+.0f}%)",
            f"every simulated generation time below is multiplied by {answer.correction:.2f}, "
            "measured over simulated",
            "",
            f"{'seconds':<34}{'the run':>12}{'what if':>12}",
            *rows,
        ]
    )
