"""Sends metrics to TensorBoard, Weights & Biases, Trackio or MLflow, each an optional install."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

from paceline.config import Config, ConfigError
from paceline.config.extras import needs_package
from paceline.config.recipe import flatten

# The project, or experiment, that runs are listed under.
PROJECT = "paceline"
# What MLflow takes in one call, and in one value.
MLFLOW_PARAMETERS = 100
MLFLOW_TEXT = 500


class Writer(Protocol):
    """A receiver of metrics besides `metrics.jsonl`."""

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Writes the metrics of one step."""

    def close(self) -> None:
        """Flushes the buffer and closes the writer."""


class TensorBoardWriter:
    """Writes event files for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        with _needed("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter
        self.writer = SummaryWriter(str(folder))

    def write(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class RunWriter:
    """Logs to a run of Weights & Biases or Trackio, whose interfaces are the same."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self.run.log(metrics, step=step)

    def close(self) -> None:
        self.run.finish()


class MlflowWriter:
    """Logs to an MLflow run named after the run directory, which a resumed run continues.

    Where it is kept is MLflow's own setting (MLFLOW_TRACKING_URI).
    """

    def __init__(self, folder: Path, config: Config) -> None:
        with _needed("mlflow"):
            from mlflow.entities import Metric, Param
            from mlflow.tracking import MlflowClient
        self.metric = Metric
        self.client = MlflowClient()
        known = self.client.get_experiment_by_name(PROJECT)
        experiment = known.experiment_id if known is not None else self.client.create_experiment(PROJECT)
        begun = self.client.search_runs([experiment], f"attributes.run_name = '{folder.name}'", max_results=1)
        if begun:
            self.run = begun[0].info.run_id
            return
        self.run = self.client.create_run(experiment, run_name=folder.name).info.run_id
        keys = flatten(config.model_dump(mode="json"))
        parameters = [Param(key, str(value)[:MLFLOW_TEXT]) for key, value in keys.items()]
        for start in range(0, len(parameters), MLFLOW_PARAMETERS):
            self.client.log_batch(self.run, params=parameters[start : start + MLFLOW_PARAMETERS])

    def write(self, step: int, metrics: dict[str, float]) -> None:
        now = int(1000 * time.time())
        values = [self.metric(name, value, now, step) for name, value in metrics.items()]
        self.client.log_batch(self.run, metrics=values)

    def close(self) -> None:
        self.client.set_terminated(self.run)


def make_writers(config: Config, folder: Path) -> list[Writer]:
    """Returns the writers that the recipe asks for; a run's own report needs none of them."""
    writers: list[Writer] = []
    if config.report.tensorboard:
        writers.append(TensorBoardWriter(folder / "tensorboard"))
    named = dict(project=PROJECT, name=folder.name, config=config.model_dump(mode="json"), resume="allow")
    if config.report.wandb:
        with _needed("wandb"):
            import wandb
        writers.append(RunWriter(wandb.init(**named, dir=str(folder), id=folder.name)))
    if config.report.trackio:
        with _needed("trackio"):
            import trackio
        writers.append(RunWriter(trackio.init(**named, embed=False)))
    if config.report.mlflow:
        writers.append(MlflowWriter(folder, config))
    return writers


@contextmanager
def _needed(name: Literal["tensorboard", "wandb", "trackio", "mlflow"]) -> Iterator[None]:
    """Raises for a package that cannot be imported within; its key, its extra and it have one name."""
    try:
        yield
    except ImportError:
        raise ConfigError(f"report.{name} = true {needs_package(name, name)}") from None
