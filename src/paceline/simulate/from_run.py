"""What a run directory tells: lengths, stage times, acceptance. The start of a "what if".

The simulated figures are multiplied by measured / simulated seconds of the run itself, so what the model gets
wrong about the machine cancels as far as it is the same factor; that factor is shown.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from paceline.config import Config
from paceline.pacing.trace import read_trace
from paceline.report.run_directory import RunDirectory
from paceline.simulate.hardware import Origin, Source
from paceline.simulate.questions import Flags, ask, build, flags_from_recipe
from paceline.simulate.report import Answer
from paceline.simulate.scenario import GivenStages, Scenario
from paceline.simulate.speculation import Acceptance
from paceline.simulate.workload import Lengths

FEW_SAMPLES = 32  # below this many lengths the metrics' mean and 95th percentile are better than the samples


@dataclass(frozen=True)
class RunFacts:
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
    trained = [record for record in run.read_metrics() if record["kind"] == "train"]
    if not trained:
        raise ValueError(f"{path} holds no finished training step yet: let the run make at least one")
    late = trained[len(trained) // 2 :]  # the first steps compile, and lengths drift
    observed, prompts = _samples(run, {int(record["step"]) for record in late})
    if len(observed) >= FEW_SAMPLES:
        origin = Origin(
            Source.MEASURED,
            f"{len(observed)} responses in {path}/samples, steps {late[0]['step']} to {late[-1]['step']}",
        )
        lengths = Lengths(mean(observed), 0.0, min(observed), max(observed), tuple(observed), origin)
    else:
        lengths = _from_metrics(late, config.rollout.max_tokens)
    accept = [record["speculation/accept_length"] for record in late if "speculation/accept_length" in record]
    acceptance = None
    if accept and config.rollout.speculation.drafters:
        tokens = (
            _proposal_length(run, {int(record["step"]) for record in late})
            or config.rollout.speculation.tokens
        )
        origin = Origin(Source.MEASURED, f"accept length {mean(accept):.2f} at k = {tokens} in {path}")
        acceptance = Acceptance.from_accept_length(min(mean(accept), tokens + 1.0), tokens, origin)
    return RunFacts(
        path.name,
        config,
        len(late),
        lengths,
        round(mean(prompts)) if prompts else 128,
        median(record["time/rollout"] for record in late),
        median(record["time/learn"] for record in late),
        median(record["time/sync"] for record in late),
        mean(record["rollout/tokens"] for record in late),
        acceptance,
    )


def _proposal_length(run: RunDirectory, steps: set[int]) -> int:
    """Tokens that a row was verified with in the steps that speculated, which adaptive pacing varies; 0 where
    there is no trace.
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
        if int(file.stem.removeprefix("step_")) not in steps:
            continue
        for line in file.read_text().splitlines():
            for sample in json.loads(line)["samples"]:
                lengths.append(max(1, len(sample["tokens"])))
                prompts.append(len(sample["request"]["prompt"]))
    return lengths, prompts


def _from_metrics(records: list[dict], limit: int) -> Lengths:
    """A log-normal with the recorded mean and 95th percentile: ln p95 = mu + 1.645 sigma, ln mean = mu +
    sigma^2 / 2.
    """
    average = mean(record["rollout/length_mean"] for record in records)
    p95 = max(average, mean(record["rollout/length_p95"] for record in records))
    excess = 1.645**2 - 2 * math.log(p95 / average)
    sigma = 1.645 - math.sqrt(excess) if excess > 0 else 1.645
    return Lengths(
        average,
        sigma,
        1,
        limit,
        origin=Origin(Source.FITTED, "log-normal through the recorded mean and 95th percentile"),
    )


@dataclass(frozen=True)
class WhatIf:
    """Changes to a run; None: as it was."""

    gpus: int | None = None
    length_scale: float = 1.0
    model: str | None = None
    hardware: str | None = None  # to move to; the run's own is a separate argument
    tp: int | None = None
    ep: int | None = None
    weights: str | None = None
    kv: str | None = None
    k: str | None = None
    accept: str | None = None
    drafter: str | None = None
    mode: str | None = None
    samples: int | None = None
    prompts: int | None = None
    max_running: int | None = None


def scenario_of(
    facts: RunFacts,
    flags: Flags,
    length_scale: float = 1.0,
    stages: GivenStages | None = None,
    own_acceptance: bool = True,
) -> Scenario:
    """`own_acceptance`: what the run's drafter reached, where it had one; otherwise what the flags say."""
    scenario = build(flags)
    lengths = facts.lengths
    if length_scale != 1.0:
        observed = tuple(max(1, round(n * length_scale)) for n in lengths.observed)
        origin = Origin(Source.ASSUMED, f"the run's lengths x {length_scale:g}")
        lengths = dataclasses.replace(
            lengths,
            mean=lengths.mean * length_scale,
            high=round(lengths.high * length_scale),
            observed=observed,
            origin=origin,
        )
    speculation = scenario.speculation
    if facts.acceptance is not None and own_acceptance:
        speculation = dataclasses.replace(speculation, acceptance=facts.acceptance)
    return dataclasses.replace(
        scenario,
        workload=dataclasses.replace(scenario.workload, lengths=lengths, prompt_tokens=facts.prompt_tokens),
        speculation=speculation,
        stages=stages or scenario.stages,
    )


@dataclass(frozen=True)
class RunAnswer:
    facts: RunFacts
    base: Answer  # the run itself, simulated
    changed: Answer
    correction: float  # measured over simulated rollout seconds of the run

    @property
    def rollout_seconds(self) -> float:
        return self.correction * self.changed.outcome.rollout_seconds

    @property
    def step_seconds(self) -> float:
        stages = self.changed.outcome.stages
        return (
            self.correction * self.changed.outcome.exposed_generation_seconds
            + stages.logprob
            + stages.train
            + stages.sync
        )


def what_if(facts: RunFacts, hardware: str, change: WhatIf) -> RunAnswer:
    flags = dataclasses.replace(flags_from_recipe(facts.config), hardware=hardware)
    origin = Origin(Source.MEASURED, f"stage times of {facts.name}, scaled by tokens over devices")
    measured = GivenStages(0.0, facts.learn_seconds, facts.sync_seconds, origin)
    base = ask(scenario_of(facts, flags, stages=measured))
    given = {
        field.name: getattr(change, field.name)
        for field in dataclasses.fields(change)
        if field.name != "length_scale" and getattr(change, field.name) is not None
    }
    flags = dataclasses.replace(flags, **given)
    unchanged = scenario_of(facts, flags, change.length_scale)  # to count its devices and tokens
    work = change.length_scale * unchanged.workload.responses / base.scenario.workload.responses
    learn = facts.learn_seconds * work * base.scenario.train_devices / unchanged.train_devices
    scaled = dataclasses.replace(measured, train=learn)
    if change.model is not None or change.hardware is not None:
        scaled = GivenStages()  # another model or device: nothing of the run's learning carries over
    changed = ask(
        scenario_of(facts, flags, change.length_scale, scaled, own_acceptance=change.accept is None)
    )
    return RunAnswer(facts, base, changed, facts.rollout_seconds / base.outcome.rollout_seconds)


def text(answer: RunAnswer) -> str:
    facts, base, changed = answer.facts, answer.base.outcome, answer.changed.outcome
    off = base.rollout_seconds / facts.rollout_seconds - 1
    plain = answer.correction * answer.changed.plain.rollout_seconds
    before = facts.rollout_seconds + facts.learn_seconds + facts.sync_seconds
    simulated = f"{base.rollout_seconds:.2f} s simulated ({100 * off:+.0f}%)"
    tokens = changed.tokens / answer.changed.scenario.schedule.steps
    return "\n".join(
        [
            f"{facts.name}: rollout {facts.rollout_seconds:.2f} s measured (median of {facts.steps} steps), "
            f"{simulated}",
            f"every simulated generation time below is multiplied by {answer.correction:.2f}, measured over "
            "simulated",
            "",
            f"{'seconds':<34}{'the run':>12}{'what if':>12}",
            f"{'rollout':<34}{facts.rollout_seconds:>12.2f}{answer.rollout_seconds:>12.2f}   ({plain:.2f} "
            "without speculation)",
            f"{'learning':<34}{facts.learn_seconds:>12.2f}{changed.stages.logprob + changed.stages.train:>12.2f}",
            f"{'weight sync':<34}{facts.sync_seconds:>12.2f}{changed.stages.sync:>12.2f}",
            f"{'step':<34}{before:>12.2f}{answer.step_seconds:>12.2f}",
            f"{'generated tokens per step':<34}{facts.tokens:>12.0f}{tokens:>12.0f}",
        ]
    )
