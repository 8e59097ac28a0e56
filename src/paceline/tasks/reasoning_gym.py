"""Problems from reasoning-gym (optional extra `reasoning`): any of its datasets, by name and settings.

Their verifiers are in `rewards/gym_verifier.py`; they run in worker processes, since some raise on odd
answers and some are slow.
"""

import difflib
import hashlib
import json
from typing import Any

from paceline.config import ConfigError
from paceline.config.extras import needs_package
from paceline.tasks.base import Problem

# Draws per wanted problem before the dataset counts as exhausted.
DRAWS_PER_PROBLEM = 20


class ReasoningGymProblems:
    """Different problems drawn from one procedural dataset; each carries its `entry` for the verifier."""

    def __init__(
        self, dataset: str, options: dict[str, Any], seed: int, train_problems: int, held_out_problems: int
    ) -> None:
        wanted = train_problems + held_out_problems
        draws = DRAWS_PER_PROBLEM * wanted
        source = open_dataset(dataset, options | {"seed": seed, "size": draws})
        problems: dict[str, Problem] = {}
        for index in range(draws):
            entry = source[index]
            problem_id = f"{dataset}/{hashlib.blake2b(entry['question'].encode(), digest_size=8).hexdigest()}"
            # Problems with many right answers have None here, and only a verifier.
            answer = "" if entry["answer"] is None else str(entry["answer"])
            problems.setdefault(problem_id, Problem(problem_id, entry["question"], answer, {"entry": entry}))
            if len(problems) == wanted:
                break
        else:
            raise ConfigError(
                f"task.dataset = {dataset!r} with these options has {len(problems)} different problems, "
                f"but task.train_problems + task.eval_problems = {train_problems} + {held_out_problems}; "
                "lower them or widen task.options"
            )
        unique = list(problems.values())
        self.train = unique[:train_problems]
        self.held_out = unique[train_problems:]


def open_dataset(name: str, options: dict[str, Any]) -> Any:
    """Makes a reasoning-gym dataset; raises ConfigError with the way out where that fails."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:  # of the package, or of one of the many it imports
        raise ConfigError(
            f"task.name = 'reasoning-gym' {needs_package('reasoning-gym', 'reasoning')} ({error})"
        ) from None
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"task.dataset = {name!r}: reasoning-gym has no such dataset.{hint} "
            f"It has {', '.join(sorted(DATASETS))}."
        )
    try:
        return reasoning_gym.create_dataset(name, **options)
    except (TypeError, AssertionError, ValueError) as error:
        given = {key: value for key, value in options.items() if key not in ("seed", "size")}
        known = [field for field in DATASETS[name][1].__dataclass_fields__ if field not in ("seed", "size")]
        raise ConfigError(
            f"task.options = {json.dumps(given, default=str)}: {name} refuses them ({error}); "
            f"it knows {', '.join(known)}"
        ) from None
