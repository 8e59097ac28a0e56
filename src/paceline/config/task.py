"""The recipe's `task`: problems, prompts, rewards and turns."""

from typing import Any, Literal

from pydantic import Field, model_validator

from paceline.config.section import MOST_GB, MOST_PROBLEMS, MOST_SECONDS, Section

GENERATED = ("running-sums", "calculator", "countdown", "reasoning-gym")
# Keys of the section `task` that describe problems, and the tasks that they apply to.
TASKS_OF_KEYS: dict[str, tuple[str, ...]] = {
    "dataset": ("reasoning-gym",),
    "options": ("countdown", "reasoning-gym"),
    "threshold": ("reasoning-gym",),
    "data": ("file",),
    "train_problems": GENERATED,
    "eval_problems": GENERATED,
}
# Metrics under `reward/` that are not the score of one reward.
RESERVED_REWARD_NAMES = ("mean", "std", "failures", "overlong")


def keys_of_another_task(name: str) -> tuple[str, ...]:
    """Returns the keys of problems that do not apply, or mean something else, to the task `name`."""
    return tuple(key for key, tasks in TASKS_OF_KEYS.items() if key == "options" or name not in tasks)


class RewardConfig(Section):
    """An entry of `task.rewards`: a reward function, how it is called and what it counts."""

    function: str = Field(
        description="`task` (the task's own verifier), `exact`, `last-number`, `math-verify`, "
        "module:function or path/to/file.py:function"
    )
    weight: float = Field(1.0, ge=-1e6, le=1e6, description="factor of this reward in the sum")
    name: str = Field("", description="name in the metrics; empty: the function's name")
    batch: bool = Field(False, description="the function takes lists: the responses of one group in one call")
    options: dict[str, Any] = Field(
        default_factory=dict, description="further keyword arguments for the function"
    )
    time_limit: float = Field(
        10.0,
        gt=0,
        le=MOST_SECONDS,
        description="seconds that one call of this reward may take; then its worker process is killed, "
        "or its coroutine cancelled, and the response gets failed_score",
    )
    failed_score: float = Field(
        0.0,
        ge=-1e6,
        le=1e6,
        description="score of a response whose reward raised or exceeded its limits of time or memory",
    )
    concurrency: int = Field(64, ge=1, description="coroutines only: calls that may run at once")

    @property
    def label(self) -> str:
        return self.name or self.function.rpartition(":")[2]


class TurnsConfig(Section):
    """The section `task.turns`: the tool that answers the policy in a task with several turns."""

    step: str = Field(
        "",
        description="the tool: `calculator`, module:function or path/to/file.py:function; empty: one turn",
    )
    stop: list[str] = Field(
        default_factory=list, description="texts that end a turn; a named tool brings its own"
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="further keyword arguments for the function"
    )
    time_limit: float = Field(
        10.0,
        gt=0,
        le=MOST_SECONDS,
        description="seconds that one call of the tool may take; then the conversation ends",
    )

    @model_validator(mode="after")
    def _keys_apply(self) -> "TurnsConfig":
        if not self.step:
            why = "task.turns.step is empty, so there is one turn and no tool. Name a tool"
            self.refuse_unused("task.turns", ("stop", "options", "time_limit"), why)
        return self


class DataConfig(Section):
    """The section `task.data`: where the problems of `task.name: file` come from."""

    path: str = Field("", description="a .jsonl or .parquet file of problems")
    held_out_path: str = Field("", description="a second file to evaluate on; empty: a share of the first")
    held_out_share: float = Field(
        0.05,
        gt=0,
        lt=1,
        description="share of the rows to evaluate on, by a hash of the prompt, without a second file",
    )
    prompt_column: str = Field(
        "prompt",
        description="column of the prompt: text, or a list of chat messages; a dot reaches into a column",
    )
    answer_column: str = Field(
        "",
        description="column of the answer; empty: `answer`, or `reward_model.ground_truth` as in verl",
    )
    answer_pattern: str = Field(
        "", description="regular expression whose first group is the answer within the answer column"
    )
    response_column: str = Field(
        "", description="column of a response that `paceline sft` imitates before RL; empty: there is none"
    )

    @model_validator(mode="after")
    def _keys_apply(self) -> "DataConfig":
        if self.held_out_path:
            why = f"task.data.held_out_path = {self.held_out_path!r} is evaluated on. Leave that out"
            self.refuse_unused("task.data", ("held_out_share",), why)
        if self.held_out_path and self.held_out_path == self.path:
            raise ValueError(
                f"task.data.held_out_path = {self.held_out_path!r} is task.data.path: what is trained on "
                "would be evaluated on; name another file, or leave it out, and task.data.held_out_share "
                "of the rows is held out"
            )
        return self


class TaskConfig(Section):
    """The section `task`: problems, prompts, rewards and turns."""

    name: Literal["running-sums", "calculator", "countdown", "reasoning-gym", "file"] = Field(
        "running-sums", description="the source of problems"
    )
    seed: int = Field(
        0, description="which problems are drawn; not the run's seed, so that runs are comparable"
    )
    train_problems: int = Field(
        128, ge=1, le=MOST_PROBLEMS, description="problems to train on, of tasks that generate them"
    )
    eval_problems: int = Field(
        512, ge=1, le=MOST_PROBLEMS, description="held-out problems, of tasks that generate them"
    )
    dataset: str = Field("", description="reasoning-gym: name of the dataset")
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="countdown: how hard, see docs/tasks.md; reasoning-gym: the dataset's settings",
    )
    threshold: float = Field(
        0.1,
        ge=0,
        le=1,
        description="reasoning-gym: scores below this count as 0 (some verifiers give a little for anything)",
    )
    data: DataConfig = Field(DataConfig(), description="file: where the problems are")

    prompt_format: str = Field(
        "{prompt}", description="text of each prompt; {prompt} stands for the problem's text"
    )
    chat: bool = Field(
        False,
        description="render texts as a user message through the policy's chat template; messages always are",
    )
    system_prompt: str = Field("", description="system message before each chat; empty: none")
    template_options: dict[str, Any] = Field(
        default_factory=dict, description="further variables of the chat template, such as enable_thinking"
    )
    max_prompt_tokens: int = Field(0, ge=0, description="longer prompts are dropped; 0: none are")

    extract: str = Field(
        "whole",
        description="the answer within a response: whole, answer-line, or a regular expression "
        "whose first group it is",
    )
    require_end: bool = Field(
        True, description="a response cut off at max_tokens is wrong for every built-in scorer"
    )
    rewards: list[RewardConfig] = Field(
        default_factory=list,
        description="rewards, summed with their weights, each with its own time_limit; "
        "empty: the task's own verifier",
    )
    reward_workers: int = Field(4, ge=1, description="processes that run reward functions and tools")
    reward_memory_gb: float = Field(
        4.0,
        ge=0,
        le=MOST_GB,
        description="memory that each of these processes may have, on Linux; 0: no limit",
    )
    turns: TurnsConfig = Field(TurnsConfig(), description="the tool of a task with several turns")

    @model_validator(mode="after")
    def _keys_apply(self) -> "TaskConfig":
        for key, tasks in TASKS_OF_KEYS.items():
            if self.name not in tasks and not self.is_default(key):
                self._refuse(key, tasks)
        if self.name == "reasoning-gym" and not self.dataset:
            raise ValueError("task.name = 'reasoning-gym' needs task.dataset, such as task.dataset=chain_sum")
        if self.name == "file" and not any(reward.function for reward in self.rewards):
            raise ValueError(
                "task.name = 'file' needs task.rewards, such as task.rewards=[{function: last-number}]"
            )
        if "{prompt}" not in self.prompt_format:
            raise ValueError(f"task.prompt_format = {self.prompt_format!r} must contain {{prompt}}")
        labels = [reward.label for reward in self.rewards]
        if len(set(labels)) < len(labels):
            raise ValueError(
                f"task.rewards: the names {', '.join(labels)} must differ; "
                "set `name` where a function is used twice"
            )
        taken = [label for label in labels if label in RESERVED_REWARD_NAMES]
        if taken:
            raise ValueError(
                f"task.rewards: reward/{taken[0]} is a metric of its own (docs/metrics.md), so no reward "
                f"can be called {taken[0]!r}; set another `name`"
            )
        return self

    def _refuse(self, key: str, tasks: tuple[str, ...]) -> None:
        """Raises ValueError for a key that this task would ignore; of a section, names the first key set."""
        section: Section = self
        named, value = f"task.{key}", getattr(self, key)
        if isinstance(value, DataConfig):
            section = value
            key = next(key for key in DataConfig.model_fields if not value.is_default(key))
            named, value = f"{named}.{key}", getattr(value, key)
        default = type(section).model_fields[key].get_default(call_default_factory=True)
        raise ValueError(
            f"{named} = {value!r} does not apply to task.name = {self.name!r}, only to {', '.join(tasks)}; "
            f"change that, or leave it out ({named}={default})"
        )
