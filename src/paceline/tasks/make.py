"""From the recipe's `task` section to a `Task`."""

import importlib.util
import json
import re
from pathlib import Path

from tokenizers import Tokenizer

from paceline.config import ConfigError, RewardConfig, TaskConfig
from paceline.tasks import calculator
from paceline.tasks.base import ProblemSet
from paceline.tasks.chat import ChatTemplate
from paceline.tasks.countdown import Countdown, parse_options
from paceline.tasks.countdown_search import RENDERINGS
from paceline.tasks.extract import NAMED
from paceline.tasks.files import FileProblems
from paceline.tasks.prompts import PromptEncoder, without_overlong
from paceline.tasks.reasoning_gym import ReasoningGymProblems
from paceline.tasks.rewards.coroutines import EventLoop
from paceline.tasks.rewards.functions import BUILTIN, Target
from paceline.tasks.rewards.pool import WorkerPool
from paceline.tasks.rewards.scoring import Reward, Scoring, from_event_loop, from_pool, own_verdict
from paceline.tasks.rewards.worker import Step
from paceline.tasks.running_sums import ALPHABET, RunningSums
from paceline.tasks.task import Task, Turns

TOOLS = {
    "calculator": ("paceline.tasks.calculator:step", (calculator.STOP,))
}  # function, and the texts that end a turn
GYM_VERIFIER = "paceline.tasks.rewards.gym_verifier:verify"
EXTRAS = {
    "math-verify": ("math_verify", "math")
}  # scorer: the package it needs, and the extra that brings it


def make_task(config: TaskConfig, tokenizer: Tokenizer, folder: Path) -> Task:
    """`folder` is the policy's: its chat template renders messages."""
    _check_extraction(config.extract)
    template = ChatTemplate.from_folder(folder, config.template_options)
    prompts = PromptEncoder(tokenizer, template, config.prompt_format, config.chat, config.system_prompt)
    problems = _problems(config)
    train, held_out = problems.train, problems.held_out
    if config.max_prompt_tokens:
        train = without_overlong(train, prompts, config.max_prompt_tokens, "training")
        held_out = without_overlong(held_out, prompts, config.max_prompt_tokens, "held-out")
    prompts.encode(train[0])  # a prompt that cannot be asked is found now, not in the first step
    scoring, turns = _workers(config, problems)
    demonstrations = getattr(problems, "demonstrations", None)
    return Task(train, held_out, prompts, scoring, turns, demonstrations)


def task_alphabet(config: TaskConfig) -> str:
    """Returns the characters that a task's texts keep to; raises where they keep to no small set."""
    if config.name == "running-sums":
        return ALPHABET
    if config.name == "countdown" and parse_options(config.options).rendering == "compact":
        return RENDERINGS["compact"].alphabet
    raise ConfigError(
        f"task.name = {config.name!r}: its texts keep to no small alphabet, so there is no fresh policy "
        "for it; name a policy's folder, or use task.name=countdown with task.options.rendering=compact"
    )


def _check_extraction(how: str) -> None:
    if how in NAMED:
        return
    try:
        groups = re.compile(how).groups
    except re.error as error:
        raise ConfigError(
            f"task.extract = {how!r}: neither {', '.join(NAMED)} nor a regular expression ({error})"
        ) from None
    if groups < 1:
        raise ConfigError(
            f"task.extract = {how!r}: must be {', '.join(NAMED)} or a regular expression with a group around "
            "the answer, such as '####\\s*(.+)'"
        )


def _problems(config: TaskConfig) -> ProblemSet:
    sizes = (config.seed, config.train_problems, config.eval_problems)
    match config.name:
        case "running-sums":
            return RunningSums(*sizes)
        case "calculator":
            return calculator.CalculatorProblems(*sizes)
        case "countdown":
            return Countdown(config.options, *sizes)
        case "reasoning-gym":
            return ReasoningGymProblems(config.dataset, config.options, *sizes)
        case "file":
            return FileProblems(config.data, config.seed)


def _workers(config: TaskConfig, problems: ProblemSet) -> tuple[Scoring, Turns | None]:
    """Rewards and the tool share one pool; it starts a worker here, to find a function that cannot be
    loaded.
    """
    wanted = config.rewards or [RewardConfig(function="task", name="verifier")]
    called = [reward for reward in wanted if not _is_own(reward, problems)]
    tool, stop = _tool(config)
    targets: list[Target | Step] = [
        *(_target(reward, config) for reward in called),
        *([tool] if tool else []),
    ]
    if not targets:
        return Scoring(
            [Reward(reward, own_verdict(problems.score), require_end=False) for reward in wanted]
        ), None

    pool = WorkerPool(targets, config.reward_workers)
    try:
        coroutines = pool.check().coroutines
    except ValueError as error:
        raise ConfigError(f"task.{'rewards or task.turns.step' if tool else 'rewards'}: {error}") from None
    if tool and coroutines[-1]:
        raise ConfigError(
            f"task.turns.step = {config.turns.step!r} is a coroutine; a tool must be a plain function"
        )
    loop = EventLoop() if any(coroutines) else None

    def run(reward: RewardConfig) -> Reward:
        if _is_own(reward, problems):
            return Reward(reward, own_verdict(problems.score), require_end=False)
        index = called.index(reward)
        target = targets[index]
        call = (
            from_event_loop(loop, target, reward.concurrency) if coroutines[index] else from_pool(pool, index)
        )
        return Reward(
            reward,
            call,
            require_end=config.require_end and target.function in (GYM_VERIFIER, *BUILTIN.values()),
        )

    turns = Turns(pool, len(targets) - 1, stop) if tool else None
    return Scoring([run(reward) for reward in wanted], pool, loop), turns


def _is_own(reward: RewardConfig, problems: ProblemSet) -> bool:
    return reward.function == "task" and hasattr(problems, "score")


def _target(reward: RewardConfig, config: TaskConfig) -> Target:
    function, options = reward.function, reward.options
    if reward.batch and (function == "task" or function in BUILTIN):
        raise ConfigError(f"task.rewards: {function!r} takes one response at a time; leave out `batch`")
    if function == "task":
        if config.name != "reasoning-gym":
            raise ConfigError(
                f"task.rewards: {config.name!r} has no verifier of its own; use {', '.join(BUILTIN)} or "
                "module:function"
            )
        function = GYM_VERIFIER
        options = {
            "dataset": config.dataset,
            "options": json.dumps(config.options),
            "threshold": config.threshold,
        }
    if function in EXTRAS and importlib.util.find_spec(EXTRAS[function][0]) is None:
        raise ConfigError(
            f"task.rewards: {function!r} needs a package that is not installed; pip install "
            f"'paceline[{EXTRAS[function][1]}]'"
        )
    return Target(BUILTIN.get(function, function), options, reward.time_limit, reward.batch, config.extract)


def _tool(config: TaskConfig) -> tuple[Step | None, tuple[str, ...]]:
    turns = config.turns
    name = turns.step or ("calculator" if config.name == "calculator" else "")
    if not name:
        return None, ()
    function, stop = TOOLS.get(name, (name, ()))
    if not re.search(r".:.", function):
        raise ConfigError(
            f"task.turns.step = {name!r}: must be one of {', '.join(TOOLS)}, module:function or "
            "path/to/file.py:function"
        )
    return Step(function, turns.options, turns.time_limit), tuple(turns.stop) or stop
