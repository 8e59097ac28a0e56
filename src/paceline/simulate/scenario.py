"""A complete question to the simulator (what runs where, on what, how) and its simulation."""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from paceline.config.modes import OVERSAMPLED
from paceline.simulate.deployment import ENGINES, HEAD_ORIGIN, Deployment, Parallelism, Precision
from paceline.simulate.hardware import Hardware, Origin, Source
from paceline.simulate.learning import drafter_train_seconds, logprob_seconds, sync_seconds, train_seconds
from paceline.simulate.model_shape import ModelShape
from paceline.simulate.outcome import Outcome, summarise
from paceline.simulate.pipeline import Pipeline, Schedule, StageSeconds
from paceline.simulate.replica import Replica
from paceline.simulate.speculation import DrafterShape, Speculation, eagle
from paceline.simulate.step_cost import StepCost
from paceline.simulate.workload import Workload

# By mode: the weight versions a response may be behind, and which responses an update takes.
MODES = {
    "sync": (0, "batch"),
    "one-step-off": (1, "batch"),
    "partial": (1, "any"),
    "oversample": (0, "first"),
    "async": (2, "any"),
}
# Those in which every device generates and then learns, and those in which nothing outlives a step.
COLOCATED = ("sync", "partial", "oversample")
ON_POLICY = ("sync", "oversample")


@dataclass(frozen=True)
class GivenStages:
    """Stage times that are known, from a run or a table; None: computed."""

    logprob: float | None = None
    train: float | None = None
    sync: float | None = None
    origin: Origin = Origin(Source.ASSUMED, "counted operations over an assumed utilisation")


@dataclass(frozen=True)
class Scenario:
    """One question: making it checks that it can be answered."""

    hardware: Hardware
    model: ModelShape
    gpus: int = 8
    parallelism: Parallelism = Parallelism()
    precision: Precision = Precision()
    engine: str = "paceline"
    workload: Workload = Workload()
    speculation: Speculation = Speculation()
    drafter: DrafterShape | None = None  # None: an EAGLE head
    mode: str = "sync"
    lag: int | None = None  # None: the mode's own
    train_share: float = 0.25  # of the devices, where learning and generation run apart
    max_running: int = 256  # per replica
    kv_tokens: int = 0  # per replica; 0: what fits
    reward_seconds: float = 0.0
    stages: GivenStages = GivenStages()
    correction: float = 1.0  # of generation's seconds: measured over simulated ones of a run
    steps: int = 0  # 0: one if synchronous, eight otherwise
    seed: int = 0

    def __post_init__(self) -> None:
        if self.replicas < 1:
            need = self.parallelism.devices
            raise ValueError(
                f"gpus = {self.gpus}: {self.rollout_devices} remain for generation, "
                f"and a replica with this tp and ep needs {need}; raise gpus"
            )
        if self.mode in ON_POLICY and self.lag:
            raise ValueError(
                f"lag = {self.lag}: mode = {self.mode} has none; use mode=partial, one-step-off or async"
            )
        if self.kv_tokens > self.fitting_kv_tokens:
            raise ValueError(
                f"kv_tokens = {self.kv_tokens}: {self.fitting_kv_tokens} fit beside the weights of a "
                "replica; lower it, or leave it out to take what fits"
            )
        longest = self.workload.prompt_tokens + self.workload.lengths.longest
        if longest > self.replica_kv_tokens:
            way_out = "raise kv_tokens" if self.kv_tokens else "raise tp or ep, or lower max_length"
            raise ValueError(
                f"a response of {longest} tokens with its prompt does not fit the {self.replica_kv_tokens} "
                f"KV tokens of a replica: {way_out}"
            )

    @property
    def deployment(self) -> Deployment:
        return Deployment(self.hardware, self.model, ENGINES[self.engine], self.precision, self.parallelism)

    @property
    def replica_kv_tokens(self) -> int:
        return self.kv_tokens or self.fitting_kv_tokens

    @property
    def fitting_kv_tokens(self) -> int:
        """Returns the tokens that fit beside the weights and, where there is one, the drafter.

        An EAGLE head is split like the model; a smaller model lies on one device, which then is the fullest.
        """
        if self.speculation.off:
            return self.deployment.kv_tokens
        drafter, tensor = self.drafter or eagle(self.model), self.parallelism.tensor
        split = 1 if drafter.model is not None else tensor
        weights = 2.0 * drafter.parameters(self.model) / split
        cache = drafter.kv_bytes_per_token(self.model, self.precision.kv_bytes) / split
        return self.deployment.kv_tokens_beside(weights, cache)

    @property
    def colocated(self) -> bool:
        """Returns whether every device generates and then learns, as in synchronous steps."""
        return self.mode in COLOCATED

    @property
    def shares_device(self) -> bool:
        """Returns whether learning and generation run on one device at the same time."""
        return not self.colocated and self.gpus == 1

    @property
    def train_devices(self) -> int:
        return (
            self.gpus if self.colocated or self.shares_device else max(1, round(self.gpus * self.train_share))
        )

    @property
    def rollout_devices(self) -> int:
        return self.gpus if self.colocated or self.shares_device else self.gpus - self.train_devices

    @property
    def replicas(self) -> int:
        return self.rollout_devices // self.parallelism.devices

    @property
    def schedule(self) -> Schedule:
        lag, take = MODES[self.mode]
        recompute = ENGINES[self.engine].recomputes_on_update and self.mode not in ON_POLICY
        steps = self.steps or (1 if self.mode in ON_POLICY else 8)
        return Schedule(
            lag if self.lag is None else self.lag,
            take,
            steps,
            recompute,
            whole_groups=self.mode in ("partial", "oversample"),
            stops=self.mode == "partial",
            step_responses=self.workload.responses,
        )

    @property
    def released(self) -> Workload:
        """Returns what is generated for each step: more prompts than it learns from where it over-samples."""
        if self.mode != "oversample":
            return self.workload
        prompts = math.ceil(OVERSAMPLED * self.workload.prompts)
        return dataclasses.replace(self.workload, prompts=prompts)

    def plain(self) -> "Scenario":
        """Returns the same scenario without speculation, to compare with."""
        speculation = dataclasses.replace(self.speculation, draft_tokens=(0,))
        return dataclasses.replace(self, speculation=speculation)


def _learned(scenario: Scenario, lengths: np.ndarray) -> np.ndarray:
    """Returns the lengths that a step learns from: of over-sampled groups those that are whole first.

    All run side by side, so these are the ones with the shortest longest response.
    """
    groups = lengths.reshape(-1, scenario.workload.samples_per_prompt)
    return groups[np.argsort(groups.max(axis=1), kind="stable")][: scenario.workload.prompts]


def stage_seconds(scenario: Scenario, batches: list[np.ndarray]) -> StageSeconds:
    """Returns the stages' seconds as means over the steps, computed where they are not given."""
    learned = [_learned(scenario, np.asarray(lengths, dtype=float)) for lengths in batches]
    sizes = [lengths + scenario.workload.prompt_tokens for lengths in learned]
    tokens = float(np.mean([s.sum() for s in sizes]))
    pairs = float(np.mean([(s**2).sum() / 2 for s in sizes]))
    work = (scenario.hardware, scenario.model, scenario.train_devices, tokens, pairs)
    given = scenario.stages
    return StageSeconds(
        reward=scenario.reward_seconds,
        logprob=logprob_seconds(*work) if given.logprob is None else given.logprob,
        train=train_seconds(*work) if given.train is None else given.train,
        sync=sync_seconds(scenario.deployment, scenario.gpus) if given.sync is None else given.sync,
    )


def simulate(scenario: Scenario) -> Outcome:
    schedule, workload = scenario.schedule, scenario.workload
    batches = [scenario.released.draw(scenario.seed + i) for i in range(schedule.steps + schedule.lag)]
    stages = stage_seconds(scenario, batches)
    drafter = scenario.drafter or eagle(scenario.model)
    cost = StepCost(scenario.deployment, drafter, scenario.correction)
    most = min(scenario.max_running, sum(len(lengths) for lengths in batches))
    first = Replica(cost, scenario.speculation, most, scenario.replica_kv_tokens)
    replicas = [first, *(first.empty_copy() for _ in range(scenario.replicas - 1))]
    pipeline = Pipeline(
        replicas, batches, workload.samples_per_prompt, workload.prompt_tokens, stages, schedule
    )
    pipeline.run()
    drafter_seconds = 0.0
    if not scenario.speculation.off:
        tokens = float(np.mean([lengths.sum() for lengths in batches]))
        drafter_seconds = drafter_train_seconds(scenario.hardware, scenario.model, drafter, tokens)
    return summarise(pipeline, scenario.parallelism.devices, drafter_seconds, provenance(scenario))


def provenance(scenario: Scenario) -> dict[str, Origin]:
    hardware = scenario.hardware.provenance
    always = ("attention", "other", "training", "data_sheet")
    parts = {name: hardware[name] for name in always if name in hardware}
    parts["gemm"] = hardware["gemm_fp8" if scenario.precision.weights == "fp8" else "gemm_bf16"]
    if scenario.model.num_expert_layers:
        parts["experts"] = hardware["experts"]
    window = scenario.model.window
    if 0 < window < scenario.workload.prompt_tokens + scenario.workload.lengths.longest:
        note = f"layers that see {window} tokens are modelled as seeing all: an upper bound of time and cache"
        parts["window"] = Origin(Source.ASSUMED, note)
    if scenario.gpus > 1:
        parts["links"] = hardware["links"]
        parts["head"] = HEAD_ORIGIN
    if scenario.shares_device:
        parts["sharing"] = Origin(
            Source.ASSUMED,
            "learning and generation share the device without slowing each other: a lower bound",
        )
    parts["engine"] = ENGINES[scenario.engine].origin
    parts["lengths"] = scenario.workload.lengths.origin
    if not scenario.speculation.off:
        parts["acceptance"] = scenario.speculation.acceptance.origin
        parts["drafter cost"] = Origin(Source.ASSUMED, "the target's curves applied to the drafter's shape")
    if scenario.stages.train is not None:
        parts["training"] = scenario.stages.origin
    return parts
