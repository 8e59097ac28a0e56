"""Problems from rows of data (`data.py`): a prompt column, an answer column, the rest for the rewards.

verl's files work as they are: `prompt` as chat messages, `reward_model.ground_truth`, `extra_info`,
`data_source`.
"""

import hashlib
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.config import ConfigError, DataConfig
from paceline.tasks.base import Demonstration, Message, Problem
from paceline.tasks.data import Row, read_rows

logger = logging.getLogger(__name__)


class FileProblems:
    """The problems of a file, split by a hash of the prompt or by a second, held-out file."""

    def __init__(self, config: DataConfig, seed: int) -> None:
        if not config.path:
            raise ConfigError(
                "task.data.path is empty; give a .jsonl or .parquet file, such as task.data.path=train.jsonl"
            )
        rows = read_problems(Path(config.path), config, "path")
        if config.held_out_path:
            self.held_out = read_problems(Path(config.held_out_path), config, "held_out_path")
            known = {_digest(problem.prompt) for problem in self.held_out}
            self.train = [problem for problem in rows if _digest(problem.prompt) not in known]
            if len(self.train) < len(rows):
                logger.warning(
                    "%s: %d rows are also in %s and were dropped",
                    config.path,
                    len(rows) - len(self.train),
                    config.held_out_path,
                )
        else:
            self.held_out = [problem for problem in rows if is_held_out(problem, config.held_out_share, seed)]
            self.train = [
                problem for problem in rows if not is_held_out(problem, config.held_out_share, seed)
            ]
        self.demonstrations = self._demonstrations if config.response_column else None
        self.response_column = config.response_column
        for side, problems in (("training", self.train), ("held-out", self.held_out)):
            if not problems:
                raise ConfigError(
                    f"task.data: no {side} problems among the {len(rows)} rows of {config.path} "
                    f"(held_out_share = {config.held_out_share}); "
                    "change the share, or give task.data.held_out_path"
                )

    def _demonstrations(self, count: int, seed: int) -> Iterator[Demonstration]:
        """Yields the training rows with their responses: the first `count`, of 0 all."""
        for problem in self.train[: count or None]:
            response = _column(problem.extra, self.response_column, "response_column", problem.source)
            if not isinstance(response, str):
                raise ConfigError(
                    f"{problem.source}: task.data.response_column = {self.response_column!r} must hold text, "
                    f"not {response!r:.80}"
                )
            yield Demonstration(problem, response)


def is_held_out(problem: Problem, share: float, seed: int) -> bool:
    """Returns whether a problem is for evaluation, by a hash of the prompt alone.

    Appended rows do not change the split, and rows with the same prompt stay on one side.
    """
    digest = hashlib.blake2b(f"{seed}/{_digest(problem.prompt)}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64


def read_problems(path: Path, config: DataConfig, key: str) -> list[Problem]:
    """Reads a file; errors name the key `task.data.<key>`."""
    _check_pattern(config.answer_pattern)
    problems = [_problem(row, config, where) for where, row in read_rows(path, f"task.data.{key}")]
    if not problems:
        raise ConfigError(f"task.data.{key} = {str(path)!r} holds no rows")
    return problems


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"task.data.answer_pattern = {pattern!r}: not a regular expression ({error})"
        ) from None


def _problem(row: Row, config: DataConfig, where: str) -> Problem:
    prompt = _prompt(_column(row, config.prompt_column, "prompt_column", where), where)
    answer_column = config.answer_column or (
        "reward_model.ground_truth" if "answer" not in row and "reward_model" in row else "answer"
    )
    answer = _column(row, answer_column, "answer_column", where)
    answer = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)
    if config.answer_pattern:
        found = re.search(config.answer_pattern, answer)
        if found is None or not found.groups():
            raise ConfigError(
                f"{where}: task.data.answer_pattern = {config.answer_pattern!r} finds no group "
                f"in the answer {answer[-80:]!r}"
            )
        answer = found.group(1)
    extra = {name: value for name, value in row.items() if name != config.prompt_column.split(".")[0]}
    return Problem(_digest([prompt, answer]), prompt, answer.strip(), extra, source=where)


def _prompt(value: Any, where: str) -> str | tuple[Message, ...]:
    if isinstance(value, str) and value:
        return value
    if (
        isinstance(value, list)
        and value
        and all(isinstance(message, dict) and "role" in message for message in value)
    ):
        # Parquet gives every message of a column the same keys; missing ones are None.
        return tuple({name: part for name, part in message.items() if part is not None} for message in value)
    raise ConfigError(
        f"{where}: a prompt must be text or a list of messages with `role` and `content`, not {value!r:.80}"
    )


def _column(row: Row, name: str, key: str, where: str) -> Any:
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if value is None:
        raise ConfigError(
            f"{where} has no value in task.data.{key} = {name!r}; its columns are {', '.join(row)}"
        )
    return value


def _digest(value: Any) -> str:
    return hashlib.blake2b(
        json.dumps(value, sort_keys=True, ensure_ascii=False, default=str).encode(), digest_size=12
    ).hexdigest()
