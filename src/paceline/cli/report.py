"""`paceline report`, `paceline trace` and `paceline dashboard`: looking at runs."""

import json
from pathlib import Path
from typing import Annotated, Optional

import typer

from paceline.cli.saving import OutputFile
from paceline.config import ConfigError

RunsArgument = Annotated[
    list[Path], typer.Argument(help="run directories; several are compared with the first")
]


def report(
    runs: RunsArgument,
    step: Annotated[
        Optional[int], typer.Option(help="a step whose rollout must be among those shown in detail")
    ] = None,
    out: Annotated[
        Optional[Path],
        typer.Option(
            help="file to write; default: report.html in the run directory, or here for several runs"
        ),
    ] = None,
) -> None:
    """Writes a page with every view of a run, or of several side by side, that needs no network."""
    from paceline.report.html_report import write_report
    from paceline.report.run_directory import RunDirectory

    directories = [RunDirectory.open(run) for run in runs]
    own = directories[0].report_path if len(runs) == 1 else Path("report.html")
    page = OutputFile("--out", out or own, is_default=out is None)
    page.refuse_special()
    page.refuse_unwritable()
    with page.writing():
        write_report(runs, page.path, step)
    typer.echo(f"written to {page.path}: open it in a browser")


def trace(
    run: Annotated[Path, typer.Argument(help="a run directory")],
    step: Annotated[Optional[int], typer.Option(help="which step; default: the last one")] = None,
    out: Annotated[
        Optional[Path], typer.Option(help="file to write; default: trace_step_N.json in the run directory")
    ] = None,
) -> None:
    """Writes one step's requests, decoding and stages as a trace for ui.perfetto.dev or chrome://tracing."""
    from paceline.report.perfetto import to_perfetto
    from paceline.report.run_directory import RunDirectory
    from paceline.report.step_trace import read_step_trace, traced_steps

    folder = RunDirectory.open(run).requests_path
    steps = traced_steps(folder)
    if not steps:
        raise ConfigError(f"{folder} holds no requests: this run has not finished a step, or does not trace")
    if step is not None and step not in steps:
        raise ConfigError(
            f"--step {step}: requests are recorded of steps {steps[0]} to {steps[-1]}; older ones are removed"
        )
    chosen = steps[-1] if step is None else step
    record = read_step_trace(folder, chosen)
    if record is None:
        raise ConfigError(f"the requests of step {chosen} in {folder} are damaged; choose another --step")
    file = OutputFile("--out", out or run / f"trace_step_{chosen:06d}.json", is_default=out is None)
    file.refuse_unwritable()
    with file.writing():
        file.path.write_text(json.dumps(to_perfetto(record)))
    typer.echo(f"step {chosen} written to {file.path}: open it in https://ui.perfetto.dev")


def dashboard(
    runs: Annotated[
        Path, typer.Argument(help="the folder that holds run directories, or one of them")
    ] = Path("runs"),
    port: Annotated[int, typer.Option(help="0: any that is free", min=0, max=65535)] = 8265,
    host: Annotated[
        str, typer.Option(help="address to listen on; any but this machine's own asks for a token")
    ] = "127.0.0.1",
    token: Annotated[str, typer.Option(help="to ask for; default: a new one where --host needs it")] = "",
) -> None:
    """Serves the views of runs to a browser, and follows runs that go on; Ctrl-C ends it."""
    from paceline.dashboard.runs_folder import RunsFolder
    from paceline.dashboard.server import DashboardServer

    folder = RunsFolder(runs)
    try:
        server = DashboardServer(folder, host, port, token)
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port}: {error}; choose another --port, or 0 for any"
        ) from None
    typer.echo(
        f"{len(folder.names())} runs in {runs}: open {server.url} (Ctrl-C ends this; it changes nothing)"
    )
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        typer.echo("")
    finally:
        server.server_close()
