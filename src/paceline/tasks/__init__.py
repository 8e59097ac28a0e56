"""Prompts and verifiable rewards: `make_task` builds what the recipe's `task` section asks for."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.tasks.make import make_task
    from paceline.tasks.task import Task

__all__ = ["Task", "make_task"]


def __getattr__(name: str) -> Any:
    """Imports on first use: worker processes import this package for a reward function and little else."""
    if name == "make_task":
        from paceline.tasks.make import make_task

        return make_task
    if name == "Task":
        from paceline.tasks.task import Task

        return Task
    raise AttributeError(f"module 'paceline.tasks' has no attribute {name!r}")
