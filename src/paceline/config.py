"""The recipe: typed settings with defaults, read from YAML and dotted overrides.

    paceline train my.yaml rollout.temperature=0.8 learning.lr=1e-6

Every class below is one section of the YAML file. No torch here: `paceline --help` must answer at once.
"""

import difflib
import types
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from paceline.correction_config import CorrectionConfig
from paceline.section import Section


class ConfigError(ValueError):
    """A recipe that cannot be used; the message names the key, the value and the way out."""


class RunConfig(Section):
    name: str = Field("", description="folder name below `root`; empty: recipe name and date")
    root: str = Field("runs", description="where run directories are made")
    seed: int = 0
    steps: int = Field(40, ge=1)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = Field(0, ge=0, description="CPU threads for learning; 0: all cores. A rollout uses one")


LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoraConfig(Section):
    rank: int = Field(0, ge=0, description="of the low-rank adapters that are trained instead of the weights; 0: train the weights")
    alpha: float = Field(32.0, gt=0, description="the adapters' product is scaled by alpha / rank")
    targets: list[LoraTarget] = Field(list(get_args(LoraTarget)), min_length=1, description="projections that get an adapter")
    dropout: Literal[0] = Field(0, description="always 0: with dropout the learner's policy would not be the one that sampled")
    path: str = Field("", description="a PEFT folder to start from; empty: fresh adapters, which change nothing at first")


class PolicyConfig(Section):
    path: str = Field("builtin", description="a Hugging Face folder, or `builtin` or `builtin-moe` for a shipped starting checkpoint")
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = Field("auto", description="auto: float32 on a CPU, bfloat16 on a GPU")
    widen: str = Field("", description="for measuring: the folder's function at the cost of a named shape, such as 8b; see `models widen`")
    activation_checkpointing: bool = False
    lora: LoraConfig = LoraConfig()


class RewardConfig(Section):
    function: str = Field(description="`task` (the task's own), `exact`, `last-number`, `math-verify`, module:function or path/to/file.py:function")
    weight: float = 1.0
    name: str = Field("", description="what metrics call it; empty: the function's name")
    batch: bool = Field(False, description="the function takes lists: the responses of one group in one call")
    options: dict[str, Any] = Field(default_factory=dict, description="further keyword arguments for the function")
    time_limit: float = Field(10.0, gt=0, description="seconds per call")
    failed_score: float = Field(0.0, description="score of a response whose reward raised or exceeded its time limit")
    concurrency: int = Field(64, ge=1, description="coroutines: how many calls may run at once")

    @property
    def label(self) -> str:
        return self.name or self.function.rpartition(":")[2]


class TurnsConfig(Section):
    step: str = Field("", description="what answers a response: `calculator`, module:function or path/to/file.py:function; empty: one turn")
    stop: list[str] = Field(default_factory=list, description="texts that end a turn; a named tool brings its own")
    options: dict[str, Any] = Field(default_factory=dict, description="further keyword arguments for the function")
    time_limit: float = Field(10.0, gt=0, description="seconds per call")


class DataConfig(Section):
    path: str = Field("", description="a .jsonl or .parquet file")
    held_out_path: str = Field("", description="a second file to evaluate on; empty: a share of the first")
    held_out_share: float = Field(0.05, gt=0, lt=1, description="of the rows, by a hash of the prompt, where there is no second file")
    prompt_column: str = Field("prompt", description="text, or a list of chat messages; a dot reaches into a column")
    answer_column: str = Field("", description="empty: `answer`, or `reward_model.ground_truth` as verl has it")
    answer_pattern: str = Field("", description="regular expression whose first group is the answer within the answer column")


class TaskConfig(Section):
    name: Literal["running-sums", "calculator", "reasoning-gym", "file"] = "running-sums"
    seed: int = Field(0, description="which problems there are; not the run's seed, so that runs are comparable")
    train_problems: int = Field(128, ge=1, description="of tasks that generate problems")
    eval_problems: int = Field(512, ge=1, description="of tasks that generate problems")
    dataset: str = Field("", description="reasoning-gym: which of its datasets")
    options: dict[str, Any] = Field(default_factory=dict, description="reasoning-gym: the dataset's settings")
    threshold: float = Field(0.1, ge=0, le=1, description="reasoning-gym: scores below this count 0 (some verifiers pay a little for anything)")
    data: DataConfig = DataConfig()

    prompt_format: str = Field("{prompt}", description="what is asked; {prompt} stands for a problem's text")
    chat: bool = Field(False, description="render texts as a user message through the policy's chat template; messages always are")
    system_prompt: str = Field("", description="a system message before each chat")
    template_options: dict[str, Any] = Field(default_factory=dict, description="further variables of the chat template, such as enable_thinking")
    max_prompt_tokens: int = Field(0, ge=0, description="longer prompts are dropped; 0: none are")

    extract: str = Field("whole", description="the answer within a response: whole, answer-line, or a regular expression whose first group it is")
    require_end: bool = Field(True, description="a response cut off at max_tokens is wrong for every built-in scorer")
    rewards: list[RewardConfig] = Field(default_factory=list, description="summed with their weights; empty: the task's own")
    reward_workers: int = Field(4, ge=1, description="processes that run reward functions and tools")
    turns: TurnsConfig = TurnsConfig()

    @model_validator(mode="after")
    def _keys_apply(self) -> "TaskConfig":
        """A key that this task would ignore is a mistake; values are compared, since a saved recipe spells out every key."""
        wanted_by = {"dataset": ("reasoning-gym",), "options": ("reasoning-gym",), "threshold": ("reasoning-gym",), "data": ("file",)}
        generated = ("running-sums", "calculator", "reasoning-gym")
        wanted_by |= {"train_problems": generated, "eval_problems": generated}
        for key, tasks in wanted_by.items():
            if self.name not in tasks and getattr(self, key) != type(self).model_fields[key].get_default(call_default_factory=True):
                raise ValueError(f"task.{key} does not apply to task.name = {self.name!r}, only to {', '.join(tasks)}")
        if self.name == "reasoning-gym" and not self.dataset:
            raise ValueError("task.name = 'reasoning-gym' needs task.dataset, such as task.dataset=chain_sum")
        if self.name == "file" and not any(reward.function for reward in self.rewards):
            raise ValueError("task.name = 'file' needs task.rewards, such as task.rewards=[{function: last-number}]")
        if "{prompt}" not in self.prompt_format:
            raise ValueError(f"task.prompt_format = {self.prompt_format!r} must contain {{prompt}}")
        labels = [reward.label for reward in self.rewards]
        if len(set(labels)) < len(labels):
            raise ValueError(f"task.rewards: the names {', '.join(labels)} must differ; set `name` where a function is used twice")
        return self


class SpeculationConfig(Section):
    drafters: list[Literal["history", "eagle", "draft_model"]] = Field(
        default_factory=list, description="who may propose tokens; completions are the same whoever does; empty: no speculation"
    )
    pacing: Literal["adaptive", "fixed"] = Field(
        "adaptive", description="adaptive: whatever is fastest now, or no speculation; fixed: always the same"
    )
    tokens: int = Field(7, ge=1, le=15, description="proposed per step: at most (adaptive), or exactly (fixed)")
    max_running: int = Field(0, ge=0, description="fixed: speculate while at most this many requests run; 0: always")
    eagle_path: str = Field(
        "builtin-eagle", description="the eagle head's folder, or `builtin-eagle` for the built-in policy's; see `paceline drafter`"
    )
    draft_model_path: str = Field("", description="the draft model's Hugging Face folder; it must have the policy's tokenizer")
    verify: Literal["shared-noise", "rejection"] = Field(
        "shared-noise", description="rejection: classical, the same distribution but tokens that depend on the drafter; for comparison"
    )

    @model_validator(mode="after")
    def _pacing_fits(self) -> "SpeculationConfig":
        if len(set(self.drafters)) < len(self.drafters):
            raise ValueError(f"rollout.speculation.drafters = {self.drafters}: each drafter once")
        if self.pacing == "fixed" and len(self.drafters) > 1:
            raise ValueError(f"rollout.speculation.drafters = {self.drafters}: pacing = 'fixed' takes one drafter; use pacing=adaptive for several")
        if self.pacing == "adaptive" and self.max_running:
            raise ValueError(f"rollout.speculation.max_running = {self.max_running} applies to pacing = 'fixed' only; leave it out")
        return self


class SentinelConfig(Section):
    kl: float = Field(0.1, ge=0, description="low-precision rollouts end when mismatch/kl exceeds this; 0: not watched")
    capped_steps: int = Field(2, ge=0, description="... or when all responses of this many steps in a row reach max_tokens; 0: not watched")


class RolloutConfig(Section):
    backend: Literal["native", "reference"] = Field("native", description="reference: a plain generator, the engine's test oracle")
    prompts_per_step: int = Field(16, ge=1)
    samples_per_prompt: int = Field(8, ge=1)
    temperature: float = Field(1.0, ge=0.0)
    max_tokens: int = Field(288, ge=1)
    max_running: int = Field(256, ge=1, description="requests decoded together at most")
    kv_tokens: int = Field(0, ge=0, description="tokens the KV pool holds; 0: room for every running request at full length, or what fits the GPU")
    prefill_tokens: int = Field(16384, ge=1, description="prompt tokens computed at a time")
    admission: Literal["fifo", "longest"] = Field("fifo", description="longest: requests expected to be long go first")
    speculation: SpeculationConfig = SpeculationConfig()
    graph_memory_gb: float = Field(2.0, gt=0, description="for captured steps, logits included; limits how much a large batch may have proposed")
    sentinel: SentinelConfig = SentinelConfig()
    deterministic: bool = Field(False, description="GPU: a completion's bits do not depend on its batch; on a CPU they never do")
    precision: Literal["bf16", "fp8", "fp8+kv"] = Field(
        "bf16", description="bf16: the policy's own type; fp8: layer weights and activations in FP8; fp8+kv: and the KV cache"
    )
    base_precision_layers: int = Field(0, ge=0, description="with FP8: the first and last n layers keep their weights in the policy's own type")
    kv_scales: Literal["layer", "head"] = Field("layer", description="with fp8+kv: what shares a scale")


# What each algorithm's paper sets, where that differs from the defaults below; a key that a recipe names wins.
# docs/algorithms.md has the sources.
ALGORITHM_DEFAULTS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dapo": {"clip_high": 0.28, "overlong_share": 0.2, "dynamic_sampling_rounds": 10},
    "dr_grpo": {"loss_mean": "constant"},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "loss_mean": "sequence"},
    "reinforce++": {"kl_coef": 0.01},
}


class LearningConfig(Section):
    algorithm: Literal["grpo", "dapo", "dr_grpo", "gspo", "reinforce++"] = "grpo"
    lr: float = Field(1e-6, gt=0)
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.99, ge=0, lt=1)
    max_grad_norm: float = Field(1.0, gt=0)
    clip_low: float = Field(0.2, gt=0, lt=1, description="the probability ratio is clipped to [1 - clip_low, 1 + clip_high]")
    clip_high: float = Field(0.2, gt=0)
    kl_coef: float = Field(0.0, ge=0, description="weight of the KL to the starting policy; above 0 a reference copy is kept (none with LoRA)")
    loss_mean: Literal["token", "sequence", "constant"] = Field(
        "token", description="token: every token counts the same; sequence: every response; constant: a token is 1 / (responses x rollout.max_tokens)"
    )
    overlong_share: float = Field(0.0, ge=0, le=1, description="within this last share of rollout.max_tokens the reward falls by up to 1; 0: never")
    dynamic_sampling_rounds: int = Field(
        0, ge=0, description="times a step may draw prompts until rollout.prompts_per_step groups scored unevenly; 0: take groups as they come"
    )
    epochs: int = Field(1, ge=1, description="passes over the step's samples")
    minibatches: int = Field(1, ge=1, description="optimiser steps per pass")
    micro_batch_tokens: int = Field(2048, ge=64, description="tokens per forward and backward pass; halved when memory runs out")
    correction: CorrectionConfig = CorrectionConfig()

    @model_validator(mode="before")
    @classmethod
    def _algorithm_defaults(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return ALGORITHM_DEFAULTS.get(str(given.get("algorithm", "grpo")), {}) | given


class EvalConfig(Section):
    every: int = Field(0, ge=0, description="steps between evaluations; 0: only before and after")
    samples: int = Field(1, ge=1, description="samples per problem (avg@n)")
    pass_k: list[int] = Field(default_factory=list, description="k of each pass@k to report; at most `samples`")
    temperature: float = Field(1.0, ge=0.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    max_tokens: int = Field(288, ge=1)
    problems: int = Field(0, ge=0, description="0: all held-out problems")

    @model_validator(mode="after")
    def _pass_k_within_samples(self) -> "EvalConfig":
        if any(not 1 <= k <= self.samples for k in self.pass_k):
            raise ValueError(f"each k must lie between 1 and eval.samples = {self.samples}")
        return self


class CheckpointConfig(Section):
    every: int = Field(10, ge=1)
    keep: int = Field(2, ge=1)


class ReportConfig(Section):
    tensorboard: bool = False
    wandb: bool = False
    samples_per_step: int = Field(2, ge=0, description="groups written to samples/ at each step")


class Config(Section):
    run: RunConfig = RunConfig()
    policy: PolicyConfig = PolicyConfig()
    task: TaskConfig = TaskConfig()
    rollout: RolloutConfig = RolloutConfig()
    learning: LearningConfig = LearningConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    report: ReportConfig = ReportConfig()

    @model_validator(mode="after")
    def _batches_divide(self) -> "Config":
        if self.rollout.prompts_per_step % self.learning.minibatches:
            raise ValueError(
                f"learning.minibatches = {self.learning.minibatches} must divide rollout.prompts_per_step = {self.rollout.prompts_per_step}"
            )
        return self


# What may differ between a run and its resumption: everything else would make the two halves incomparable.
RESUME_MAY_CHANGE = (
    "run.steps", "run.root", "run.name", "run.threads", "eval.every", "checkpoint.every", "checkpoint.keep",
    "report.tensorboard", "report.wandb", "report.samples_per_step", "learning.micro_batch_tokens",
)  # fmt: skip

RECIPES = Path(__file__).parent / "recipes"


def shipped_recipes() -> dict[str, Path]:
    return {path.stem: path for path in sorted(RECIPES.glob("*.yaml"))}


def load_config(recipe: str | None = None, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """A recipe is a path or the name of a shipped one; overrides are `section.key=value`, the value read as YAML."""
    tree: dict[str, Any] = {}
    if recipe is not None:
        tree = _read_yaml(_recipe_path(recipe))
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"override {override!r} is not of the form section.key=value, such as learning.lr=1e-4")
        _assign(tree, key.split("."), _parse_scalar(value), override)
    return parse_config(tree)


def parse_config(tree: dict[str, Any]) -> Config:
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(problem) for problem in error.errors())) from None


def dump_config(config: Config) -> str:
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def changed_keys(before: Config, after: Config) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, with both values."""
    old, new = _flatten(before.model_dump()), _flatten(after.model_dump())
    return {key: (old.get(key), new.get(key)) for key in sorted(old | new) if old.get(key) != new.get(key)}


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
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
    raise ConfigError(f"recipe {recipe!r} is neither a file nor a shipped recipe ({', '.join(shipped_recipes())}).{hint}")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text()) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not readable YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold sections ({', '.join(Config.model_fields)}), not a {type(tree).__name__}")
    return tree


def _parse_scalar(text: str) -> Any:
    value = yaml.safe_load(text)
    if isinstance(value, str):  # YAML 1.1 reads 1e-4 as a string
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _assign(tree: dict[str, Any], path: list[str], value: Any, override: str) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"override {override!r}: {key!r} is a value, not a section")
    tree[path[-1]] = value


def _explain(problem: dict[str, Any]) -> str:
    """One validation problem as a sentence: key, value, what is allowed, nearest match."""
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
    if problem["type"] == "literal_error":
        choices = _choices_at(path)
        near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        message = f"must be one of {', '.join(choices)}"
    return f"{key}{shown}: {message}.{hint}"


def _fields_at(path: list[str]) -> list[str]:
    model: type[BaseModel] = Config
    for key in path:
        if key.isdigit():  # an entry of a list
            continue
        annotation = model.model_fields[key].annotation
        if get_origin(annotation) is list:
            annotation = get_args(annotation)[0]
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)


def _choices_at(path: list[str]) -> list[str]:
    model: Any = Config
    for key in path:
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            break
        model = model.model_fields[key].annotation
    if get_origin(model) is types.UnionType:
        model = next(arg for arg in get_args(model) if get_origin(arg) is Literal)
    if get_origin(model) is list:
        model = get_args(model)[0]
    return [str(choice) for choice in get_args(model)]
