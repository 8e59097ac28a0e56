"""The whole recipe, read from YAML and dotted overrides.

    paceline train my.yaml rollout.temperature=0.8 learning.lr=1e-6

Two layers: the file, then the overrides, whose order does not matter. A key in the overrides wins over the
file's. A key that stands for a group of others (`CHOICES`) takes its whole group along: given as an override,
it drops what the file says about the group. Within one layer, a key that is spelt out wins over what the
choice stands for.
"""

import difflib
import math
import types
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from paceline.config.arguments import as_texts, recipe_name
from paceline.config.cluster import ClusterConfig, check_cluster
from paceline.config.correction import CorrectionConfig
from paceline.config.learning import ALGORITHM_DEFAULTS, LearningConfig
from paceline.config.online import OnlineDrafterConfig
from paceline.config.policy import PolicyConfig
from paceline.config.rollout import RolloutConfig
from paceline.config.section import MOST_SAMPLES, MOST_STEPS, ConfigError, Section
from paceline.config.task import TaskConfig, keys_of_another_task


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
    temperature: float = Field(1.0, ge=0.0, description="sampling temperature; 0: the most likely token")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="nucleus sampling: 1 keeps all tokens")
    max_tokens: int = Field(288, ge=1, description="tokens of a response at most")
    problems: int = Field(0, ge=0, description="held-out problems to evaluate on; 0: all")

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

    @model_validator(mode="after")
    def _batches_divide(self) -> "Config":
        if self.rollout.prompts_per_step % self.learning.minibatches:
            raise ValueError(
                f"learning.minibatches = {self.learning.minibatches} must divide "
                f"rollout.prompts_per_step = {self.rollout.prompts_per_step}"
            )
        return self

    @model_validator(mode="after")
    def _processes_can(self) -> "Config":
        check_cluster(self)
        return self

    @model_validator(mode="after")
    def _exact_rollouts(self) -> "Config":
        if self.learning.numerics != "exact":
            return self
        for key, value, allowed in (
            ("precision", self.rollout.precision.value, self.learning.precision),
            ("backend", self.rollout.backend, "native"),
        ):
            if value != allowed:
                raise ValueError(
                    "learning.numerics = exact computes what the native engine does in the same precision "
                    f"(learning.precision is {self.learning.precision}), and rollout.{key} is {value}: "
                    f"set rollout.{key}={allowed}, or learning.numerics=fast"
                )
        return self


# Keys that may differ between a run and its resumption; any other would make the two halves incomparable.
RESUME_MAY_CHANGE = (
    "run.steps",
    "run.root",
    "run.name",
    "run.threads",
    "eval.every",
    "checkpoint.every",
    "checkpoint.keep",
    "report.tensorboard",
    "report.wandb",
    "report.samples_per_step",
    "report.closing_pairs",
    "learning.micro_batch_tokens",
    *(f"rollout.speculation.online.{key}" for key in OnlineDrafterConfig.model_fields),
    *(f"cluster.{key}" for key in ClusterConfig.model_fields),
)

# Keys whose values stand for a group of other keys, which lie in the same section.
CHOICES = {
    "learning.algorithm": tuple(dict.fromkeys(key for keys in ALGORITHM_DEFAULTS.values() for key in keys)),
    "learning.correction.preset": tuple(key for key in CorrectionConfig.model_fields if key != "preset"),
}

# Where the shipped recipes are.
RECIPES = Path(__file__).parents[1] / "recipes"


def shipped_recipes() -> dict[str, Path]:
    """Returns the paths of the shipped recipes by name."""
    return {path.stem: path for path in sorted(RECIPES.glob("*.yaml"))}


def load_config(recipe: str | Path | None = None, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Reads a recipe, given as a path or the name of a shipped one, and applies overrides.

    An override is `section.key=value`, the value read as YAML, or as it is written where the key takes text.
    """
    tree: dict[str, Any] = {}
    if recipe is not None:
        tree = _read_yaml(_recipe_path(recipe_name(recipe)))
    given = [(override, *_split(override)) for override in as_texts("overrides", overrides)]
    for _, key, value in given:
        _drop(tree, key.rpartition(".")[0].split("."), _stands_for(tree, key, value))
    for override, key, value in given:
        _assign(tree, key.split("."), value, override)
    return parse_config(tree)


def _stands_for(tree: dict[str, Any], key: str, value: Any) -> tuple[str, ...]:
    """Returns the keys of a recipe that go when one of its keys is given another value."""
    section = tree.get("task")
    if key == "task.name" and isinstance(section, dict) and section.get("name", TaskConfig().name) != value:
        return keys_of_another_task(str(value))
    return CHOICES.get(key, ())


def refuse_mistyped_keys(overrides: list[str] | tuple[str, ...]) -> None:
    """Raises where an override names a key that no recipe has; says nothing about values."""
    tree: dict[str, Any] = {}
    for override in overrides:
        key, value = _split(override)
        _assign(tree, key.split("."), value, override)
    try:
        Config.model_validate(tree)
    except ValidationError as error:
        mistyped = [_explain(problem) for problem in error.errors() if problem["type"] == "extra_forbidden"]
        if mistyped:
            raise ConfigError("\n".join(mistyped)) from None


def parse_config(tree: dict[str, Any]) -> Config:
    """Validates a recipe's sections; raises ConfigError with a sentence per problem."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(problem) for problem in error.errors())) from None


def dump_config(config: Config) -> str:
    """Returns the recipe as YAML, every key spelt out."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def changed_keys(before: Config, after: Config) -> dict[str, tuple[Any, Any]]:
    """Returns the dotted keys whose values differ, with both values."""
    old = _flatten(before.model_dump())
    new = _flatten(after.model_dump())
    return {key: (old.get(key), new.get(key)) for key in sorted(old | new) if old.get(key) != new.get(key)}


def flat_keys(tree: dict[str, Any]) -> set[str]:
    """Returns the dotted keys of a recipe's sections as they stand in a file."""
    return set(_flatten(tree))


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _recipe_path(recipe: str) -> Path:
    if recipe in shipped_recipes():
        return shipped_recipes()[recipe]
    path = Path(recipe)
    if path.is_file():
        return path
    near = difflib.get_close_matches(recipe, shipped_recipes(), n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"recipe {recipe!r} is neither a file nor a shipped recipe ({', '.join(shipped_recipes())}).{hint}"
    )


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text()) or {}
    except (yaml.YAMLError, ValueError) as error:  # not UTF-8, or a date that does not exist
        raise ConfigError(f"{path} is not readable YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path} must hold sections ({', '.join(Config.model_fields)}), not a {type(tree).__name__}"
        )
    return tree


def _parse_scalar(text: str) -> Any:
    value = yaml.safe_load(text) if text else ""  # no key takes YAML's null, and paths may be empty
    if isinstance(value, str):  # YAML 1.1 reads 1e-4 as a string
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _parse_text(text: str) -> Any:
    """Returns a scalar as it is written, where YAML would make a date, a number or a truth value of it."""
    node = yaml.compose(text, Loader=yaml.SafeLoader) if text else None
    if isinstance(node, yaml.ScalarNode) and not node.tag.endswith(":null"):
        return str(node.value)
    return _parse_scalar(text)


def _split(override: str) -> tuple[str, Any]:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError(
            f"override {override!r} is not of the form section.key=value, such as learning.lr=1e-4"
        )
    try:
        return key, _parse_text(value) if _takes_text(key) else _parse_scalar(value)
    except (yaml.YAMLError, ValueError):  # the second: a date that does not exist
        raise ConfigError(
            f"override {override!r} is not readable YAML: "
            "write lists as [a, b], and text with brackets in quotes"
        ) from None


def _drop(tree: dict[str, Any], path: list[str], keys: tuple[str, ...]) -> None:
    """Removes `keys` from the section at `path`, where there is one."""
    branch: Any = tree
    for part in path:
        branch = branch.get(part) if isinstance(branch, dict) else None
    for key in keys if isinstance(branch, dict) else ():
        branch.pop(key, None)


def _assign(tree: dict[str, Any], path: list[str], value: Any, override: str) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"override {override!r}: {key!r} is a value, not a section")
    tree[path[-1]] = value


def _explain(problem: ErrorDetails) -> str:
    """Returns one validation problem as a sentence: key, value, what is allowed, nearest match."""
    path = [str(part) for part in problem["loc"]]
    key = ".".join(path) or "recipe"
    if problem["type"] == "extra_forbidden":
        allowed = _fields_at(path[:-1])
        near = difflib.get_close_matches(path[-1], allowed, n=1, cutoff=0.5)
        elsewhere = [k for k in _flatten(Config().model_dump()) if k.rsplit(".", 1)[-1] == path[-1]]
        nearest = ".".join([*path[:-1], near[0]]) if near else (elsewhere[0] if elsewhere else None)
        hint = f" Did you mean {nearest!r}?" if nearest else ""
        return f"{key}: there is no such key.{hint} Allowed here: {', '.join(allowed)}."
    value = problem.get("input")
    message = problem["msg"].removeprefix("Value error, ")
    shown = f" = {value!r}" if path and not isinstance(value, dict | BaseModel) else ""
    hint = ""
    if problem["type"] in ("literal_error", "enum"):
        choices = _choices_at(path)
        near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        message = f"must be one of {', '.join(choices)}"
    if problem["type"] == "string_type":
        message = "must be text; write it in quotes"
    if problem["type"] == "less_than_equal":
        message = f"must be at most {problem['ctx']['le']:.15g}"
    if problem["type"] == "list_type":
        message = f"must be a list; write [{_as_entry(path, value)}]"
    if problem["type"] == "model_type":
        keys = ", ".join(_fields_at(path))
        message = f"is a section, with the keys {keys}"
        if path[-1].isdigit() and isinstance(value, str):
            message = f"is a section; write {_as_entry(path[:-1], value)}; its keys are {keys}"
    if message.startswith(f"{key}."):  # a section's own check names the key itself
        return f"{message}."
    return f"{key}{shown}: {message}.{hint}"


def _as_entry(path: list[str], value: Any) -> str:
    """Returns how a value is written in the list at `path`; text for a section is that of its first key."""
    fields = _fields_at([*path, "0"])
    if not fields or not isinstance(value, str):
        return str(value)
    return yaml.safe_dump({fields[0]: value}, default_flow_style=True, width=math.inf).strip()


def _type_at(path: list[str]) -> Any:
    """Returns the type of a key, or of a list's entry; where a path goes on within a value, the value's."""
    kind: Any = Config
    for part in path:
        if get_origin(kind) is list and part.isdigit():
            kind = get_args(kind)[0]
        elif _is_section(kind):
            field = kind.model_fields.get(part)
            kind = field.annotation if field is not None else None
        else:
            break
    return kind


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _takes_text(key: str) -> bool:
    kind = _type_at(key.split("."))
    members = get_args(kind) if get_origin(kind) is types.UnionType else (kind,)
    return set(members) - {types.NoneType} == {str}


def _fields_at(path: list[str]) -> list[str]:
    kind = _type_at(path)
    return list(kind.model_fields) if _is_section(kind) else []


def _choices_at(path: list[str]) -> list[str]:
    kind = _type_at(path)
    if get_origin(kind) is types.UnionType:
        kind = next(arg for arg in get_args(kind) if get_origin(arg) is Literal)
    if get_origin(kind) is list:
        kind = get_args(kind)[0]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [str(member.value) for member in kind]
    return [str(choice) for choice in get_args(kind)]
