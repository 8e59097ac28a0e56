"""A question to the simulator, complete: what runs where, on what, how. And its simulation."""

import dataclasses
from dataclasses import dataclass, field

import numpy as np

from paceline.simulate.deployment import ENGINES, Deployment, Parallelism, Precision
from paceline.simulate.hardware import Hardware, Origin, Source
from paceline.simulate.learning import drafter_train_seconds, logprob_seconds, sync_seconds, train_seconds
from paceline.simulate.model_shape import ModelShape
from paceline.simulate.outcome import Outcome, summarise
from paceline.simulate.pipeline import Pipeline, Schedule, StageSeconds
from paceline.simulate.replica import Replica
from paceline.simulate.speculation import Drafter, Speculation, eagle
from paceline.simulate.step_cost import StepCost
from paceline.simulate.workload import Workload

MODES = {"sync": (0, "batch"), "one-step-off": (1, "batch"), "async": (2, "any")}


@dataclass(frozen=True)
class GivenStages:
    """Stage times that are known, from a run or a table; None: computed."""

    logprob: float | None = None
    train: float | None = None
    sync: float | None = None
    origin: Origin = Origin(Source.ASSUMED, "counted operations over an assumed utilisation")


@dataclass(frozen=True)
class Scenario:
    hardware: Hardware
    model: ModelShape
    gpus: int = 8
    parallelism: Parallelism = Parallelism()
    precision: Precision = Precision()
    engine: str = "paceline"
    workload: Workload = Workload()
    speculation: Speculation = Speculation()
    drafter: Drafter | None = None  # None: an EAGLE head
    mode: str = "sync"
    lag: int | None = None  # None: the mode's own
    train_share: float = 0.25  # of the devices, where learning and generation run apart
    max_running: int = 256  # per replica
    kv_tokens: int = 0  # per replica; 0: what fits
    reward_seconds: float = 0.0
    stages: GivenStages = GivenStages()
    train_drafter: bool = False  # in time nobody else needs
    steps: int = 0  # 0: one if synchronous, eight otherwise
    seed: int = 0
    notes: dict[str, Origin] = field(default_factory=dict)  # further parts of the provenance

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"--mode {self.mode!r}: must be one of {', '.join(MODES)}")
        if self.engine not in ENGINES:
            raise ValueError(f"--engine {self.engine!r}: must be one of {', '.join(ENGINES)}")
        if self.replicas < 1:
            need = self.parallelism.devices
            raise ValueError(
                f"--gpus {self.gpus}: {self.rollout_devices} remain for generation, and a replica with this "
                f"tp and ep needs {need}"
            )
        if self.mode == "sync" and self.lag:
            raise ValueError(
                f"--lag {self.lag}: synchronous steps have none; use --mode one-step-off or async"
            )
        if self.max_running < 1:
            raise ValueError(f"--max-running {self.max_running}: must be at least 1")
        longest = self.workload.prompt_tokens + (
            max(self.workload.lengths.observed, default=0) or self.workload.lengths.high
        )
        if longest > self.replica_kv_tokens:
            have = self.replica_kv_tokens
            raise ValueError(
                f"a response of {longest} tokens with its prompt does not fit the {have} KV tokens of a "
                "replica: raise --tp or --ep"
            )

    @property
    def deployment(self) -> Deployment:
        return Deployment(self.hardware, self.model, ENGINES[self.engine], self.precision, self.parallelism)

    @property
    def replica_kv_tokens(self) -> int:
        return self.kv_tokens or self.deployment.kv_tokens

    @property
    def colocated(self) -> bool:
        """Synchronous steps use every device for generation and then for learning."""
        return self.mode == "sync"

    @property
    def train_devices(self) -> int:
        return self.gpus if self.colocated else max(1, round(self.gpus * self.train_share))

    @property
    def rollout_devices(self) -> int:
        return self.gpus if self.colocated else self.gpus - self.train_devices

    @property
    def replicas(self) -> int:
        return self.rollout_devices // self.parallelism.devices

    @property
    def schedule(self) -> Schedule:
        lag, take = MODES[self.mode]
        lag = lag if self.lag is None else self.lag
        steps = self.steps or (1 if self.mode == "sync" else 8)
        return Schedule(lag, take, steps, ENGINES[self.engine].recomputes_on_update and self.mode != "sync")

    def plain(self) -> "Scenario":
        """The same without speculation, to compare with."""
        return dataclasses.replace(
            self, speculation=dataclasses.replace(self.speculation, draft_tokens=(0,)), train_drafter=False
        )


def stage_seconds(scenario: Scenario, batches: list[np.ndarray]) -> StageSeconds:
    """Means over the steps."""
    prompt = scenario.workload.prompt_tokens
    sizes = [np.asarray(lengths, dtype=float) + prompt for lengths in batches]
    tokens = float(np.mean([s.sum() for s in sizes]))
    pairs = float(np.mean([(s**2).sum() / 2 for s in sizes]))
    given, hardware, model, devices = (
        scenario.stages,
        scenario.hardware,
        scenario.model,
        scenario.train_devices,
    )
    return StageSeconds(
        reward=scenario.reward_seconds,
        logprob=logprob_seconds(hardware, model, devices, tokens, pairs)
        if given.logprob is None
        else given.logprob,
        train=train_seconds(hardware, model, devices, tokens, pairs) if given.train is None else given.train,
        sync=sync_seconds(scenario.deployment, scenario.replicas) if given.sync is None else given.sync,
    )


def simulate(scenario: Scenario) -> Outcome:
    schedule = scenario.schedule
    batches = [scenario.workload.draw(scenario.seed + i) for i in range(schedule.steps + schedule.lag)]
    stages = stage_seconds(scenario, batches)
    drafter = scenario.drafter or eagle(scenario.model)
    cost = StepCost(scenario.deployment, drafter)
    first = Replica(cost, scenario.speculation, scenario.max_running, scenario.replica_kv_tokens)
    replicas = [first, *(first.twin() for _ in range(scenario.replicas - 1))]
    pipeline = Pipeline(
        replicas,
        batches,
        scenario.workload.samples_per_prompt,
        scenario.workload.prompt_tokens,
        stages,
        schedule,
    )
    records = pipeline.run()
    drafter_seconds = 0.0
    if scenario.train_drafter:
        tokens = float(np.mean([lengths.sum() for lengths in batches]))
        drafter_seconds = drafter_train_seconds(scenario.hardware, scenario.model, drafter, tokens)
    return summarise(
        records,
        replicas,
        pipeline.response_times,
        stages,
        schedule,
        scenario.parallelism.devices,
        drafter_seconds,
        provenance(scenario),
    )


def provenance(scenario: Scenario) -> dict[str, Origin]:
    """Who says so, for every part that this scenario uses."""
    hardware = scenario.hardware.provenance
    parts = {
        name: hardware[name] for name in ("attention", "other", "training", "data_sheet") if name in hardware
    }
    parts["gemm"] = hardware["gemm_fp8" if scenario.precision.weights == "fp8" else "gemm_bf16"]
    if scenario.model.expert_layers:
        parts["experts"] = hardware["experts"]
    if scenario.gpus > 1:
        parts["links"] = hardware["links"]
    parts["engine"] = ENGINES[scenario.engine].origin
    parts["lengths"] = scenario.workload.lengths.origin
    if not scenario.speculation.off:
        parts["acceptance"] = scenario.speculation.acceptance.origin
        parts["drafter cost"] = Origin(Source.ASSUMED, "the target's curves applied to the drafter's shape")
    if scenario.stages.train is not None:
        parts["training"] = scenario.stages.origin
    return parts | scenario.notes
