"""Sends metrics to TensorBoard and Weights & Biases, each an optional install."""

from pathlib import Path
from typing import Protocol

from paceline.config import Config, ConfigError
from paceline.config.extras import needs_package


class Writer(Protocol):
    """A receiver of metrics besides `metrics.jsonl`."""

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Writes the metrics of one step."""

    def close(self) -> None:
        """Flushes the buffer and closes the writer."""


class TensorBoardWriter:
    """Writes event files for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(
                f"report.tensorboard = true {needs_package('tensorboard', 'tensorboard')}"
            ) from None
        self.writer = SummaryWriter(str(folder))

    def write(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WandbWriter:
    """Logs to a Weights & Biases run named after the run directory."""

    def __init__(self, folder: Path, config: Config) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError(f"report.wandb = true {needs_package('wandb', 'wandb')}") from None
        self.run = wandb.init(
            project="paceline",
            name=folder.name,
            dir=str(folder),
            config=config.model_dump(),
            resume="allow",
            id=folder.name,
        )

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self.run.log(metrics, step=step)

    def close(self) -> None:
        self.run.finish()


def make_writers(config: Config, folder: Path) -> list[Writer]:
    writers: list[Writer] = []
    if config.report.tensorboard:
        writers.append(TensorBoardWriter(folder / "tensorboard"))
    if config.report.wandb:
        writers.append(WandbWriter(folder, config))
    return writers
