"""What a run directory records: lengths, stage times, acceptance. The start of a "what if".

The simulation's steps take measured / simulated seconds of the run itself times as long, so what the model
gets wrong about the machine cancels as far as it is the same factor; that factor is shown.
"""

import dataclasses
import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from paceline.config import Config, ConfigError
from paceline.pacing.trace import read_trace
from paceline.report.run_directory import SAMPLES_FILE, RunDirectory, has_numbers
from paceline.simulate.hardware import Origin, Source
from paceline.simulate.question import Keys, Question, parse_question, recipe_keys
from paceline.simulate.report import Answer, ask
from paceline.simulate.scenario import GivenStages, Scenario, simulate
from paceline.simulate.speculation import Acceptance
from paceline.simulate.workload import Lengths

FEW_SAMPLES = 32  # below this many lengths the metrics' mean and 95th percentile are better than the samples
DEFAULT_PROMPT_TOKENS = 128  # of a run without samples
NEEDED_METRICS = (
    *("time/rollout", "time/learn", "time/sync"),
    *("rollout/tokens", "rollout/length_mean", "rollout/length_p95"),
)
# Keys of a question that a run answers itself.
OF_THE_RUN = ("mean_length", "length_sigma", "min_length", "max_length", "prompt_tokens")
Z95 = 1.645  # the standard normal's 95th percentile


@dataclass(frozen=True)
class RunFacts:
    """The figures of the later half of a run's steps."""

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
    run = RunDirectory.open(path)
    config = run.config()
    if config.rollout.mode != "sync":
        raise ValueError(
            f"{path} ran with rollout.mode = {config.rollout.mode!r}, whose rollouts are not whole batches: "
            "start from a run with mode=sync, and ask for the other with mode="
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


@dataclass(frozen=True)
class MeasuredRun:
    """A run, its recipe and machine as keys of a question, and the run itself simulated."""

    facts: RunFacts
    keys: Keys
    answer: Answer  # with the correction that gives the measured rollout back

    @classmethod
    def simulated(cls, facts: RunFacts, ran_on: str) -> "MeasuredRun":
        """Simulates a run that was made on this hardware, and corrects the simulation by it."""
        keys = recipe_keys(facts.config) | {"hardware": ran_on}
        origin = Origin(Source.MEASURED, f"stage times of {facts.name}, scaled by tokens over devices")
        stages = GivenStages(0.0, facts.learn_seconds, facts.sync_seconds, origin)
        scenario = dataclasses.replace(_scenario(facts, parse_question(keys), True), stages=stages)
        correction = facts.rollout_seconds / simulate(scenario).rollout_seconds
        return cls(facts, keys, ask(dataclasses.replace(scenario, correction=correction)))

    @property
    def correction(self) -> float:
        """Returns the measured over the simulated rollout seconds."""
        return self.answer.scenario.correction

    def what_if(self, question: Question, given: Collection[str]) -> Answer:
        """Simulates the run with a question's changes; `given` are the keys that the user set."""
        for key in OF_THE_RUN:
            if key in given:
                raise ConfigError(
                    f"{key} = {getattr(question, key)} does not apply with --from-run: lengths are those of "
                    "the run; leave it out, or make them longer with length_scale"
                )
        facts, was = self.facts, self.answer.scenario
        scenario = _scenario(facts, question, own_acceptance="accept" not in given)
        if question.model == self.keys["model"] and question.hardware == self.keys["hardware"]:
            # Of another model or device nothing of the run's learning carries over.
            work = question.length_scale * scenario.workload.responses / was.workload.responses
            learn = facts.learn_seconds * work * was.train_devices / scenario.train_devices
            scenario = dataclasses.replace(scenario, stages=dataclasses.replace(was.stages, train=learn))
        return ask(dataclasses.replace(scenario, correction=self.correction))


def _scenario(facts: RunFacts, question: Question, own_acceptance: bool) -> Scenario:
    """Returns a question's scenario with the run's lengths and, with `own_acceptance`, its acceptance."""
    scenario = question.scenario()
    speculation = scenario.speculation
    if facts.acceptance is not None and own_acceptance:
        speculation = dataclasses.replace(speculation, acceptance=facts.acceptance)
    lengths = facts.lengths.scaled(question.length_scale)
    return dataclasses.replace(
        scenario,
        workload=dataclasses.replace(scenario.workload, lengths=lengths, prompt_tokens=facts.prompt_tokens),
        speculation=speculation,
    )


def text(run: MeasuredRun, answer: Answer) -> str:
    facts, changed = run.facts, answer.outcome
    simulated = facts.rollout_seconds / run.correction
    off = simulated / facts.rollout_seconds - 1
    before = facts.rollout_seconds + facts.learn_seconds + facts.sync_seconds
    learning = changed.stages.logprob + changed.stages.train
    tokens = changed.tokens / answer.scenario.schedule.steps
    rows = [
        f"{'rollout':<34}{facts.rollout_seconds:>12.2f}{changed.rollout_seconds:>12.2f}"
        f"   ({answer.plain.rollout_seconds:.2f} without speculation)",
        f"{'learning':<34}{facts.learn_seconds:>12.2f}{learning:>12.2f}",
        f"{'weight sync':<34}{facts.sync_seconds:>12.2f}{changed.stages.sync:>12.2f}",
        f"{'step':<34}{before:>12.2f}{changed.step_seconds:>12.2f}",
        f"{'generated tokens per step':<34}{facts.tokens:>12.0f}{tokens:>12.0f}",
    ]
    return "\n".join(
        [
            f"{facts.name}: rollout {facts.rollout_seconds:.2f} s measured (median of {facts.steps} steps), "
            f"{simulated:.2f} s simulated ({100 * off:+.0f}%)",
            f"every simulated generation time below is multiplied by {run.correction:.2f}, "
            "measured over simulated",
            "",
            f"{'seconds':<34}{'the run':>12}{'what if':>12}",
            *rows,
        ]
    )
