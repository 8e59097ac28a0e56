"""The recipe's `task`: problems, prompts, rewards and turns."""

from typing import Any, Literal

from pydantic import Field, model_validator

from paceline.config.section import Section


class RewardConfig(Section):
    function: str = Field(
        description="`task` (the task's own), `exact`, `last-number`, `math-verify`, module:function or path/to/file.py:function"
    )
    weight: float = 1.0
    name: str = Field("", description="what metrics call it; empty: the function's name")
    batch: bool = Field(False, description="the function takes lists: the responses of one group in one call")
    options: dict[str, Any] = Field(
        default_factory=dict, description="further keyword arguments for the function"
    )
    time_limit: float = Field(10.0, gt=0, description="seconds per call")
    failed_score: float = Field(
        0.0, description="score of a response whose reward raised or exceeded its time limit"
    )
    concurrency: int = Field(64, ge=1, description="coroutines: how many calls may run at once")

    @property
    def label(self) -> str:
        return self.name or self.function.rpartition(":")[2]


class TurnsConfig(Section):
    step: str = Field(
        "",
        description="what answers a response: `calculator`, module:function or path/to/file.py:function; empty: one turn",
    )
    stop: list[str] = Field(
        default_factory=list, description="texts that end a turn; a named tool brings its own"
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="further keyword arguments for the function"
    )
    time_limit: float = Field(10.0, gt=0, description="seconds per call")


class DataConfig(Section):
    path: str = Field("", description="a .jsonl or .parquet file")
    held_out_path: str = Field("", description="a second file to evaluate on; empty: a share of the first")
    held_out_share: float = Field(
        0.05, gt=0, lt=1, description="of the rows, by a hash of the prompt, where there is no second file"
    )
    prompt_column: str = Field(
        "prompt", description="text, or a list of chat messages; a dot reaches into a column"
    )
    answer_column: str = Field(
        "", description="empty: `answer`, or `reward_model.ground_truth` as verl has it"
    )
    answer_pattern: str = Field(
        "", description="regular expression whose first group is the answer within the answer column"
    )


class TaskConfig(Section):
    name: Literal["running-sums", "calculator", "countdown", "reasoning-gym", "file"] = "running-sums"
    seed: int = Field(
        0, description="which problems there are; not the run's seed, so that runs are comparable"
    )
    train_problems: int = Field(128, ge=1, description="of tasks that generate problems")
    eval_problems: int = Field(512, ge=1, description="of tasks that generate problems")
    dataset: str = Field("", description="reasoning-gym: which of its datasets")
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="countdown: how hard, see docs/tasks.md; reasoning-gym: the dataset's settings",
    )
    threshold: float = Field(
        0.1,
        ge=0,
        le=1,
        description="reasoning-gym: scores below this count 0 (some verifiers pay a little for anything)",
    )
    data: DataConfig = DataConfig()

    prompt_format: str = Field("{prompt}", description="what is asked; {prompt} stands for a problem's text")
    chat: bool = Field(
        False,
        description="render texts as a user message through the policy's chat template; messages always are",
    )
    system_prompt: str = Field("", description="a system message before each chat")
    template_options: dict[str, Any] = Field(
        default_factory=dict, description="further variables of the chat template, such as enable_thinking"
    )
    max_prompt_tokens: int = Field(0, ge=0, description="longer prompts are dropped; 0: none are")

    extract: str = Field(
        "whole",
        description="the answer within a response: whole, answer-line, or a regular expression whose first group it is",
    )
    require_end: bool = Field(
        True, description="a response cut off at max_tokens is wrong for every built-in scorer"
    )
    rewards: list[RewardConfig] = Field(
        default_factory=list, description="summed with their weights; empty: the task's own"
    )
    reward_workers: int = Field(4, ge=1, description="processes that run reward functions and tools")
    turns: TurnsConfig = TurnsConfig()

    @model_validator(mode="after")
    def _keys_apply(self) -> "TaskConfig":
        """A key that this task would ignore is a mistake."""
        wanted_by = {
            "dataset": ("reasoning-gym",),
            "options": ("countdown", "reasoning-gym"),
            "threshold": ("reasoning-gym",),
            "data": ("file",),
        }
        generated = ("running-sums", "calculator", "countdown", "reasoning-gym")
        wanted_by |= {"train_problems": generated, "eval_problems": generated}
        for key, tasks in wanted_by.items():
            if self.name not in tasks and not self.is_default(key):
                raise ValueError(
                    f"task.{key} does not apply to task.name = {self.name!r}, only to {', '.join(tasks)}"
                )
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
                f"task.rewards: the names {', '.join(labels)} must differ; set `name` where a function is "
                "used twice"
            )
        return self
