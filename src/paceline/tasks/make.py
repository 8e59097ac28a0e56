"""From the recipe's `task` section to a `Task`."""

import importlib.util
import json
import re
from pathlib import Path
from typing import cast

from tokenizers import Tokenizer

from paceline.config import ConfigError, RewardConfig, TaskConfig
from paceline.config.extras import Extra, needs_package
from paceline.tasks import calculator
from paceline.tasks.base import ProblemSet, ScoredProblemSet
from paceline.tasks.chat import ChatTemplate
from paceline.tasks.countdown import Countdown, parse_options
from paceline.tasks.countdown_search import RENDERINGS
from paceline.tasks.extract import NAMED
from paceline.tasks.files import FileProblems
from paceline.tasks.prompts import PromptEncoder, filter_overlong_prompts
from paceline.tasks.reasoning_gym import ReasoningGymProblems
from paceline.tasks.rewards.coroutines import EventLoop
from paceline.tasks.rewards.functions import BUILTIN, Target
from paceline.tasks.rewards.pool import WorkerPool
from paceline.tasks.rewards.scoring import Reward, Scoring, from_event_loop, from_pool, from_verifier
from paceline.tasks.rewards.worker import Step
from paceline.tasks.running_sums import ALPHABET, RunningSums
from paceline.tasks.task import Task, Turns

# The named tools of `task.turns.step`: function, and the texts that end a turn.
TOOLS = {"calculator": ("paceline.tasks.calculator:step", (calculator.STOP,))}

# The reward function behind `task` for reasoning-gym.
GYM_VERIFIER = "paceline.tasks.rewards.gym_verifier:verify"

# Scorers that need an optional package: the package, and the extra that installs it.
EXTRAS: dict[str, tuple[str, Extra]] = {"math-verify": ("math_verify", "math")}


def make_task(config: TaskConfig, tokenizer: Tokenizer, folder: Path) -> Task:
    """Puts a task together; `folder` is the policy's, whose chat template renders messages."""
    _check_extraction(config.extract)
    template = ChatTemplate.from_folder(folder, config.template_options)
    prompts = PromptEncoder(tokenizer, template, config.prompt_format, config.chat, config.system_prompt)
    problems = _problems(config)
    train = problems.train
    held_out = problems.held_out
    if config.max_prompt_tokens:
        train = filter_overlong_prompts(train, prompts, config.max_prompt_tokens, "training")
        held_out = filter_overlong_prompts(held_out, prompts, config.max_prompt_tokens, "held-out")
    # A prompt that cannot be rendered fails now, not in a later step. Generated ones are all alike.
    for side in (train, held_out):
        prompts.check(side if config.name == "file" else side[:1])
    scoring, turns = _workers(config, problems)
    demonstrations = getattr(problems, "demonstrations", None)
    return Task(train, held_out, prompts, scoring, turns, demonstrations)


def task_alphabet(config: TaskConfig) -> tuple[str, ...]:
    """Returns the characters and numbers of a task's texts; raises ConfigError where that is no small set."""
    if config.name == "running-sums":
        return tuple(ALPHABET)
    if config.name == "countdown":
        options = parse_options(config.options)
        if symbols := RENDERINGS[options.rendering].symbols:
            return (*(str(number) for number in range(options.max_value + 1)), *symbols)
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
            f"task.extract = {how!r}: must be {', '.join(NAMED)} or a regular expression "
            "with a group around the answer, such as '####\\s*(.+)'"
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
    """Makes rewards and tool, which share one pool.

    The pool starts a worker here, so that a function that cannot be loaded fails before the run begins.
    """
    wanted = config.rewards or [RewardConfig(function="task", name="verifier")]
    for reward in wanted:
        _refuse_ignored(reward, config, problems)
    called = [reward for reward in wanted if not _runs_in_loop(reward, problems)]
    tool, stop = _tool(config)
    targets: list[Target | Step] = [
        *(_target(reward, config) for reward in called),
        *([tool] if tool else []),
    ]
    if not targets:
        verifiers = [
            Reward(reward, from_verifier(cast(ScoredProblemSet, problems).score), require_end=False)
            for reward in wanted
        ]
        return Scoring(verifiers), None

    pool = WorkerPool(targets, config.reward_workers, config.reward_memory_gb)
    try:
        coroutines = pool.load_targets().coroutines
    except ValueError as error:
        pool.close()
        raise ConfigError(f"task.{'rewards or task.turns.step' if tool else 'rewards'}: {error}") from None
    if tool and coroutines[-1]:
        raise ConfigError(
            f"task.turns.step = {config.turns.step!r} is a coroutine; a tool must be a plain function"
        )
    loop = EventLoop() if any(coroutines) else None

    def make_reward(reward: RewardConfig) -> Reward:
        if _runs_in_loop(reward, problems):
            return Reward(reward, from_verifier(cast(ScoredProblemSet, problems).score), require_end=False)
        index = called.index(reward)
        target = targets[index]
        if not coroutines[index] and not reward.is_default("concurrency"):
            raise ConfigError(
                f"task.rewards: concurrency = {reward.concurrency} applies to coroutines, and "
                f"{reward.function!r} is none; leave it out, or set task.reward_workers"
            )
        assert isinstance(target, Target), "the tool comes after the rewards"
        if coroutines[index]:
            assert loop is not None
            call = from_event_loop(loop, target, reward.concurrency)
        else:
            call = from_pool(pool, index)
        is_builtin = target.function in (GYM_VERIFIER, *BUILTIN.values())
        return Reward(reward, call, require_end=config.require_end and is_builtin)

    turns = Turns(pool, len(targets) - 1, stop) if tool else None
    return Scoring([make_reward(reward) for reward in wanted], pool, loop), turns


def _runs_in_loop(reward: RewardConfig, problems: ProblemSet) -> bool:
    """Returns whether the reward is the problem set's own verifier, which needs no worker process."""
    return reward.function == "task" and hasattr(problems, "score")


def _refuse_ignored(reward: RewardConfig, config: TaskConfig, problems: ProblemSet) -> None:
    if reward.function != "task":
        return
    ignored = ["options"] if reward.options else []
    if _runs_in_loop(reward, problems):
        ignored += [key for key in ("time_limit", "concurrency") if not reward.is_default(key)]
    if ignored:
        raise ConfigError(
            f"task.rewards: {', '.join(ignored)} would be ignored, since {config.name!r} has a verifier of "
            "its own; leave it out"
        )


def _target(reward: RewardConfig, config: TaskConfig) -> Target:
    function = reward.function
    options = reward.options
    if reward.batch and (function == "task" or function in BUILTIN):
        raise ConfigError(f"task.rewards: {function!r} takes one response at a time; leave out `batch`")
    if function == "task":
        if config.name != "reasoning-gym":
            raise ConfigError(
                f"task.rewards: {config.name!r} has no verifier of its own; "
                f"use {', '.join(BUILTIN)} or module:function"
            )
        function = GYM_VERIFIER
        options = {
            "dataset": config.dataset,
            "options": json.dumps(config.options),
            "threshold": config.threshold,
        }
    if function in EXTRAS and importlib.util.find_spec(EXTRAS[function][0]) is None:
        raise ConfigError(f"task.rewards: {function!r} {needs_package(*EXTRAS[function])}")
    return Target(BUILTIN.get(function, function), options, reward.time_limit, reward.batch, config.extract)


def _tool(config: TaskConfig) -> tuple[Step | None, tuple[str, ...]]:
    turns = config.turns
    name = turns.step or ("calculator" if config.name == "calculator" else "")
    if not name:
        return None, ()
    function, stop = TOOLS.get(name, (name, ()))
    if not re.search(r".:.", function):
        raise ConfigError(
            f"task.turns.step = {name!r}: must be one of {', '.join(TOOLS)}, "
            "module:function or path/to/file.py:function"
        )
    return Step(function, turns.options, turns.time_limit), tuple(turns.stop) or stop
