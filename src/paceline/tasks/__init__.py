"""Prompts and verifiable rewards."""

from paceline.config import TaskConfig
from paceline.tasks.base import Task
from paceline.tasks.running_sums import RunningSums


def make_task(config: TaskConfig) -> Task:
    return RunningSums(config.seed, config.train_problems, config.eval_problems)
