"""`paceline launch`: a run whose processes a Ray cluster places, one that is there or one of this machine."""

from pathlib import Path
from typing import Annotated, Optional

import typer

from paceline.cli.options import QuietOption, split_recipe
from paceline.config import Config, ConfigError, load_config
from paceline.report.run_directory import RunDirectory


def launch(
    recipe: Annotated[
        Optional[str], typer.Argument(help="a YAML file or a shipped recipe's name; see `paceline recipes`")
    ] = None,
    overrides: Annotated[Optional[list[str]], typer.Argument(help="section.key=value, any number")] = None,
    address: Annotated[
        str,
        typer.Option(help="of a Ray cluster, such as auto or HOST:6379; default: one on this machine alone"),
    ] = "",
    resume: Annotated[Optional[Path], typer.Option(help="continue the run in this directory")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="say what would be started, and start nothing")
    ] = False,
    quiet: QuietOption = False,
) -> None:
    """Trains with the replicas and learners of `cluster`, on the machines of a Ray cluster."""
    named, given = split_recipe(recipe or "default", overrides)
    config = load_config(named, given) if resume is None else RunDirectory.open(resume).config(given)
    if not config.cluster.replicas:
        raise ConfigError(
            "cluster.replicas = 0: there is nothing to place; set cluster.replicas, or use `paceline train`"
        )
    if dry_run:
        typer.echo(describe(config, address))
        return
    given.append("cluster.runtime=ray")
    from paceline.cli.train import run_train_command
    from paceline.cluster.ray_cluster import ray_cluster

    with ray_cluster(address, config.cluster, _gpus_here()):
        _check_device(config.run.device)
        run_train_command(named, given, resume, None, None, quiet)


def describe(config: Config, address: str) -> str:
    cluster = config.cluster
    where = f"on the Ray cluster at {address}" if address else "on a Ray cluster of this machine"
    learners = f"{cluster.learners} FSDP2 ranks learn" if cluster.learners else "the launching process learns"
    needed = f", {cluster.gpus} GPUs ({cluster.placement})"
    if config.run.device == "cpu" or not (address or _computes_on_gpus(config)):
        needed = ", on CPUs"
    return (
        f"{config.policy.path} on {config.task.name}, {config.run.steps} steps, {where}\n"
        f"{cluster.replicas} replicas generate, {learners}{needed}; weights travel by {cluster.transport}\n"
        f"runs are kept in {config.run.root}, which every machine must reach under this path"
    )


def _computes_on_gpus(config: Config) -> bool:
    """Whether a cluster of this machine would use its GPUs; raises if it has too few."""
    from paceline.cluster.placing import local_gpus
    from paceline.device import best_device

    if config.run.device == "auto" and best_device().type == "cpu":
        return False
    local_gpus(config.cluster, _gpus_here())
    return True


def _check_device(asked: str) -> None:
    """Raises where the cluster's GPUs would idle because this machine, which decides for all, has none."""
    import ray

    from paceline.device import best_device

    gpus = ray.cluster_resources().get("GPU", 0)
    if asked == "auto" and gpus and best_device().type == "cpu":
        raise ConfigError(
            f"run.device = 'auto': the Ray cluster has {gpus:g} GPUs, and this machine, which runs the loop, "
            "has none that our kernels run on: launch from a machine that has one, or set run.device=cpu to "
            "compute on CPUs everywhere"
        )


def _gpus_here() -> int:
    import torch

    return torch.cuda.device_count()
