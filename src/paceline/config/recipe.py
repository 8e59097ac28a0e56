"""The whole recipe: its sections, the constraints between their keys, and the difference of two recipes."""

from typing import Any, Literal

from pydantic import Field, model_validator

from paceline.config.cluster import ClusterConfig, check_cluster
from paceline.config.correction import PRESET_OF_FP8, CorrectionConfig
from paceline.config.learning import LearningConfig
from paceline.config.online import OnlineDrafterConfig
from paceline.config.policy import PolicyConfig
from paceline.config.rollout import RolloutConfig
from paceline.config.section import MOST_SAMPLES, MOST_STEPS, Section, Temperature
from paceline.config.sft import SftConfig
from paceline.config.task import TaskConfig
from paceline.types import Precision


class RunConfig(Section):
    """The section `run`: where, how long and on what a run runs."""

    name: str = Field("", description="name of the run directory within root; empty: recipe name and date")
    root: str = Field("runs", description="folder in which run directories are made")
    seed: int = Field(0, description="decides samples and the order of problems; the same seed repeats a run")
    steps: int = Field(40, ge=1, le=MOST_STEPS, description="RL steps: one rollout and one update each")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU where there is one")
    threads: int = Field(
        0, ge=0, le=1024, description="CPU threads for learning; 0: all cores. A rollout uses one"
    )

    changed_inputs: Literal["refuse", "accept"] = Field(
        "refuse",
        description="when a run is resumed and its data, or the code of its rewards or tool, has changed",
    )

    @model_validator(mode="after")
    def _name_stays_within_root(self) -> "RunConfig":
        parts = self.name.split("/") if self.name else []
        if not self.name.isprintable() or any(part in ("", ".", "..") for part in parts):
            raise ValueError(
                f"run.name = {self.name!r}: must name a folder within run.root = {self.root!r}, without "
                "'..', an empty part or control characters; run.root may be any folder"
            )
        return self


class EvalConfig(Section):
    """The section `eval`: accuracy on held-out problems, before, during and after a run."""

    every: int = Field(0, ge=0, description="steps between evaluations; 0: only before and after")
    samples: int = Field(1, ge=1, le=MOST_SAMPLES, description="samples per problem (avg@n)")
    pass_k: list[int] = Field(
        default_factory=list, description="k of each pass@k to report; at most `samples`"
    )
    temperature: Temperature = Field(1.0, description="sampling temperature; 0: the most likely token")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="nucleus sampling: 1 keeps all tokens")
    max_tokens: int = Field(
        288, ge=1, description="tokens of a response at most; default: rollout.max_tokens"
    )
    problems: int = Field(0, ge=0, description="held-out problems to evaluate on; 0: all")
    precision: Literal["rollout", "base"] = Field(
        "rollout",
        description="rollout: sampled as rollouts are; base: in the policy's own type, from the weights as "
        "they are saved",
    )

    @model_validator(mode="after")
    def _pass_k_within_samples(self) -> "EvalConfig":
        if any(not 1 <= k <= self.samples for k in self.pass_k):
            raise ValueError(f"each k must lie between 1 and eval.samples = {self.samples}")
        return self


class CheckpointConfig(Section):
    """The section `checkpoint`: how often checkpoints are written, and how many are kept."""

    every: int = Field(10, ge=1, description="steps between checkpoints; the last step has one, too")
    keep: int = Field(2, ge=1, description="newest checkpoints to keep; older ones are deleted")


class ReportConfig(Section):
    """The section `report`: what is written besides `metrics.jsonl`."""

    tensorboard: bool = Field(False, description="also write metrics for TensorBoard")
    wandb: bool = Field(False, description="also send metrics to Weights & Biases")
    trackio: bool = Field(False, description="also send metrics to Trackio")
    mlflow: bool = Field(False, description="also send metrics to MLflow")
    samples_per_step: int = Field(2, ge=0, description="groups written to samples/ at each step")
    closing_pairs: int = Field(
        5,
        ge=0,
        le=1000,
        description="rollouts with and without speculation after the last step, at most, to compare them: "
        "four are enough where they agree; fewer than three claim nothing about speed, 0: none",
    )


class Config(Section):
    """A whole recipe."""

    run: RunConfig = RunConfig()
    policy: PolicyConfig = PolicyConfig()
    task: TaskConfig = TaskConfig()
    rollout: RolloutConfig = RolloutConfig()
    learning: LearningConfig = LearningConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    report: ReportConfig = ReportConfig()
    cluster: ClusterConfig = ClusterConfig()
    sft: SftConfig = SftConfig()

    @model_validator(mode="after")
    def _evaluations_are_as_long(self) -> "Config":
        if "max_tokens" not in self.eval.model_fields_set:
            as_long = self.eval.model_copy(update={"max_tokens": self.rollout.max_tokens})
            object.__setattr__(self, "eval", as_long)
        return self

    @model_validator(mode="after")
    def _correction_by_precision(self) -> "Config":
        """Corrects for rollouts in FP8 where the recipe says nothing, and the learner is not exact."""
        learning, given = self.learning, self.learning.correction.model_fields_set
        if (
            self.rollout.precision is not Precision.BASE
            and learning.numerics == "fast"
            and not given & {"preset", "mode", "weight", "reject"}
        ):
            keys = {key: getattr(learning.correction, key) for key in given}
            correction = CorrectionConfig(preset=PRESET_OF_FP8, **keys)
            object.__setattr__(self, "learning", learning.model_copy(update={"correction": correction}))
        return self

    @model_validator(mode="after")
    def _batches_divide(self) -> "Config":
        if self.rollout.prompts_per_step % self.learning.minibatches:
            raise ValueError(
                f"learning.minibatches = {self.learning.minibatches} must divide "
                f"rollout.prompts_per_step = {self.rollout.prompts_per_step}"
            )
        return self

    @model_validator(mode="after")
    def _evaluation_can_be_in_base(self) -> "Config":
        apart = "cluster.replicas=0" if self.cluster.replicas else "rollout.mode=sync or partial"
        elsewhere = self.cluster.replicas or self.rollout.mode == "async"
        if self.eval.precision == "base" and self.rollout.precision is not Precision.BASE and elsewhere:
            raise ValueError(
                "eval.precision = 'base': generation runs in other processes, in rollout.precision = "
                f"{self.rollout.precision.value!r} alone; use eval.precision=rollout, {apart}, or evaluate "
                "what is saved (`paceline eval RUN rollout.precision=base`)"
            )
        return self

    @model_validator(mode="after")
    def _processes_can(self) -> "Config":
        check_cluster(self)
        return self

    @model_validator(mode="after")
    def _teacher_scores_what_was_sampled(self) -> "Config":
        distill = self.learning.distill
        if self.learning.algorithm == "distill" and distill.by_endpoint and self.rollout.temperature != 1:
            raise ValueError(
                f"rollout.temperature = {self.rollout.temperature:g}: learning.distill.teacher = "
                f"{distill.teacher!r} scores at temperature 1; sample at 1, or name a teacher's folder"
            )
        return self

    @model_validator(mode="after")
    def _exact_rollouts(self) -> "Config":
        if self.learning.numerics != "exact":
            return self
        if self.learning.precision == "fp8" and not self.rollout.precision.fp8_weights:
            raise ValueError(
                "learning.numerics = exact computes in the rollout's numbers, and rollout.precision is "
                f"{self.rollout.precision.value}: set rollout.precision=fp8 or leave learning.precision out"
            )
        if self.rollout.backend != "native":
            raise ValueError(
                "learning.numerics = exact computes what the native engine does, and rollout.backend is "
                f"{self.rollout.backend}: set rollout.backend=native, or learning.numerics=fast"
            )
        return self


# Keys that may differ between a run and its resumption; any other would make the two halves incomparable.
RESUME_MAY_CHANGE = (
    "run.steps",
    "run.root",
    "run.name",
    "run.threads",
    "run.changed_inputs",
    "eval.every",
    "checkpoint.every",
    "checkpoint.keep",
    "report.tensorboard",
    "report.wandb",
    "report.trackio",
    "report.mlflow",
    "report.samples_per_step",
    "report.closing_pairs",
    "learning.micro_batch_tokens",
    "sft.every",
    *(f"rollout.speculation.online.{key}" for key in OnlineDrafterConfig.model_fields),
    *(f"cluster.{key}" for key in ClusterConfig.model_fields),
)


def changed_keys(before: Config, after: Config) -> dict[str, tuple[Any, Any]]:
    """Returns the dotted keys whose values differ, with both values."""
    old = flatten(before.model_dump())
    new = flatten(after.model_dump())
    return {key: (old.get(key), new.get(key)) for key in sorted(old | new) if old.get(key) != new.get(key)}


def flat_keys(tree: dict[str, Any]) -> set[str]:
    return set(flatten(tree))


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
