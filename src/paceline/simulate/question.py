"""A question to the simulator, as one typed model, and where it comes from: a file, overrides, a recipe.

    paceline simulate question.yaml gpus=64 'k=[0, 3, paced]'

Keys are flat. A list of values asks the question once for each, lists of several keys in all combinations.
"""

import itertools
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, ValidationError, field_validator

from paceline.config import Config, ConfigError, Section
from paceline.config.explaining import explain
from paceline.config.reading import split_override
from paceline.simulate.deployment import Parallelism, Precision
from paceline.simulate.hardware import Origin, Source, load_hardware
from paceline.simulate.model_shape import load_model
from paceline.simulate.scenario import Scenario
from paceline.simulate.speculation import Acceptance, Speculation, make_drafter
from paceline.simulate.workload import Lengths, Workload

MOST_LENGTH = 100_000_000  # tokens
# Of a question, as they are read: values or lists of them.
Keys = dict[str, Any]


def _as_text(value: Any) -> Any:
    """Returns a number as text: `k: 3` means the same as `k: "3"`."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


Text = Annotated[str, BeforeValidator(_as_text)]


class Question(Section):
    """What runs where, on what, and how: all that an answer depends on."""

    model: str = Field("qwen3-8b", description="a built-in shape, a Hugging Face folder or a config.json")
    hardware: str = Field("h200", description="h200, h100, a100, b200, gb200, or the file of a profile")
    gpus: int = Field(8, ge=1, description="devices in all")
    tp: int = Field(1, ge=1, description="tensor parallelism of a replica")
    ep: int = Field(1, ge=1, description="expert parallelism of a replica")
    weights: Literal["bf16", "fp8"] = Field("bf16", description="precision of the rollout's weights")
    kv: Literal["bf16", "fp8"] = Field("bf16", description="precision of the KV cache")
    engine: Literal["paceline", "vllm"] = Field("paceline", description="what generates")
    prompts: int = Field(64, ge=1, description="per RL step")
    prompts_per_gpu: int = Field(0, ge=0, description="in place of `prompts`, where above 0")
    samples: int = Field(16, ge=1, description="responses per prompt")
    prompt_tokens: int = Field(256, ge=0, description="tokens of a prompt")
    mean_length: float = Field(4096.0, gt=0, le=MOST_LENGTH, description="tokens of a response, on average")
    length_sigma: float = Field(
        1.0, ge=0, le=10, description="spread of the log-normal lengths; 0: all equal"
    )
    min_length: int = Field(16, ge=1, le=MOST_LENGTH, description="shorter responses count as this long")
    max_length: int = Field(32768, ge=1, le=MOST_LENGTH, description="longer responses are cut here")
    length_scale: float = Field(1.0, gt=0, le=1e6, description="makes all responses this many times as long")
    k: Text = Field("paced", description="draft tokens: a number; paced, the fastest of 0 to 7; paced:MAX")
    accept: Text = Field(
        "0.75",
        description="probability that a draft token is accepted: 0.8; by depth, '0.85,0.8,0.7'; "
        "or 3.0@3, an accept length of 3 at k = 3",
    )
    drafter: str = Field("eagle", description="eagle, history, or a smaller model such as qwen3-0.6b")
    spec_max_running: int = Field(
        0, ge=0, description="speculate while at most this many requests run on a replica; 0: always"
    )
    mode: Literal["sync", "partial", "oversample", "one-step-off", "async"] = Field(
        "sync", description="how generation and learning overlap"
    )
    lag: int | None = Field(None, ge=0, description="weight versions a response may be old; null: the mode's")
    train_share: float = Field(0.25, gt=0, lt=1, description="of the devices, where learning runs apart")
    max_running: int = Field(256, ge=1, description="requests decoded together on a replica")
    kv_tokens: int = Field(0, ge=0, description="KV cache of a replica; 0: what fits")
    reward_seconds: float = Field(0.0, ge=0, description="to score a response")
    steps: int = Field(0, ge=0, description="RL steps to simulate; 0: one if synchronous, eight otherwise")
    seed: int = Field(0, ge=0, description="of the response lengths")

    @field_validator("k")
    @classmethod
    def _is_a_number_of_draft_tokens(cls, value: str) -> str:
        Speculation.parse(value, Acceptance((0.0,)))
        return value

    @field_validator("accept")
    @classmethod
    def _is_an_acceptance(cls, value: str) -> str:
        Acceptance.parse(value)
        return value

    @property
    def lengths(self) -> Lengths:
        """The lengths of the responses, before `length_scale`."""
        if self.min_length > self.max_length:
            raise ConfigError(
                f"min_length = {self.min_length}: must be at most max_length, which is {self.max_length}"
            )
        note = f"log-normal lengths, mean {self.mean_length:g}, sigma {self.length_sigma:g}"
        origin = Origin(Source.ASSUMED, f"{note}, {self.min_length} to {self.max_length}")
        return Lengths(self.mean_length, self.length_sigma, self.min_length, self.max_length, origin=origin)

    def scenario(self) -> Scenario:
        model = load_model(self.model)
        prompts = self.prompts_per_gpu * self.gpus or self.prompts
        lengths = self.lengths.scaled(self.length_scale)
        return Scenario(
            hardware=load_hardware(self.hardware),
            model=model,
            gpus=self.gpus,
            parallelism=Parallelism(self.tp, self.ep),
            precision=Precision(self.weights, self.kv),
            engine=self.engine,
            workload=Workload(prompts, self.samples, self.prompt_tokens, lengths),
            speculation=Speculation.parse(self.k, Acceptance.parse(self.accept), self.spec_max_running),
            drafter=make_drafter(self.drafter, model),
            mode=self.mode,
            lag=self.lag,
            train_share=self.train_share,
            max_running=self.max_running,
            kv_tokens=self.kv_tokens,
            reward_seconds=self.reward_seconds,
            steps=self.steps,
            seed=self.seed,
        )


def read_keys(words: list[str]) -> Keys:
    """Reads a question file, where the first word names one, and overrides of the form key=value."""
    keys: Keys = {}
    if words and "=" not in words[0]:
        keys, words = _read_file(Path(words[0])), words[1:]
    for word in words:
        if "=" not in word:
            raise ConfigError(f"override {word!r} is not of the form key=value, such as gpus=32")
        key, value = split_override(word, Question)
        keys[key] = value
    return keys


def _read_file(path: Path) -> Keys:
    if not path.is_file():
        raise ConfigError(
            f"question {str(path)!r} is not a file: give a YAML file such as `paceline simulate --show` "
            "prints, or key=value"
        )
    try:
        keys = yaml.safe_load(path.read_text()) or {}
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path} is not readable YAML: {error}") from None
    if not isinstance(keys, dict):
        raise ConfigError(f"{path} must hold keys of a question, not a {type(keys).__name__}")
    return {str(key): value for key, value in keys.items()}


def questions(given: Keys, base: Keys) -> list[tuple[Keys, Question]]:
    """Returns a question for each combination of the listed values, with these values.

    `base` is what a recipe or a run says, and `given` wins over it.
    """
    lists = {key: value for key, value in given.items() if isinstance(value, list)}
    for key, value in lists.items():
        if not value:
            raise ConfigError(f"{key} = []: must hold at least one value")
    combinations = [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]
    return [(values, parse_question(changed(base, given | values))) for values in combinations]


def changed(base: Keys, changes: Keys) -> Keys:
    """Returns the keys with these changes; another mode has its own lag unless one is among them."""
    if changes.get("mode", base.get("mode")) != base.get("mode"):
        base = {key: value for key, value in base.items() if key != "lag"}
    return base | changes


def parse_question(keys: Keys) -> Question:
    """Validates a question's keys; raises ConfigError with a sentence per problem."""
    try:
        return Question.model_validate(keys)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(problem, Question) for problem in error.errors())) from None


def show(keys: Keys) -> str:
    """Returns the whole question as a YAML file, with what each key means."""
    lines = []
    for key, field in Question.model_fields.items():
        value = json.dumps(keys.get(key, field.default))
        lines += [f"# {field.description}", f"{key}: {value}"]
    return "\n".join(lines)


# Drafters that look tokens up.
WITHOUT_NETWORK = ("history", "ngram", "suffix")


def recipe_keys(config: Config) -> Keys:
    """Returns the keys that a recipe sets; acceptance and hardware are not among them.

    Of a cluster the GPUs that generate count.
    """
    from paceline.models.source import BUILTIN_POLICIES

    rollout = config.rollout
    speculation = rollout.speculation
    k = f"paced:{speculation.tokens}" if speculation.pacing == "adaptive" else str(speculation.tokens)
    drafter = speculation.drafters[0] if speculation.drafters else "none"
    shapes = {"draft_model": speculation.draft_model_path} | dict.fromkeys(WITHOUT_NETWORK, "history")
    vllm = rollout.backend == "vllm"
    quantised = rollout.precision.fp8_weights or rollout.vllm.engine.get("quantization") == "fp8"
    fp8_kv = rollout.precision.fp8_kv or str(rollout.vllm.engine.get("kv_cache_dtype")).startswith("fp8")
    return {
        "model": str(BUILTIN_POLICIES.get(config.policy.path, config.policy.path)),
        "gpus": rollout.vllm.tensor_parallel if vllm else max(1, config.cluster.replicas),
        "tp": rollout.vllm.tensor_parallel if vllm else 1,
        "weights": "fp8" if quantised else "bf16",
        "kv": "fp8" if fp8_kv else "bf16",
        "engine": "vllm" if vllm else "paceline",
        "prompts": rollout.prompts_per_step,
        "samples": rollout.samples_per_prompt,
        "prompt_tokens": config.task.max_prompt_tokens or 128,
        "mean_length": max(16, rollout.max_tokens // 4),
        "min_length": 1,
        "max_length": rollout.max_tokens,
        "k": "0" if drafter == "none" else k,
        "drafter": shapes.get(drafter, "eagle"),
        "spec_max_running": speculation.max_running,
        "mode": rollout.mode,
        "lag": rollout.max_lag if rollout.mode in ("partial", "async") else None,
        "max_running": rollout.max_running,
        "kv_tokens": rollout.kv_tokens,
    }
