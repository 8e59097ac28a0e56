"""`paceline report`: looking at runs, as a file or while they are running."""

from pathlib import Path
from typing import Annotated, Optional

import typer

from paceline.cli.saving import OutputFile
from paceline.config import ConfigError


def report(
    runs: Annotated[list[Path], typer.Argument(help="run directories; several are compared with the first")],
    step: Annotated[
        Optional[int], typer.Option(help="a step whose rollout must be among those shown in detail")
    ] = None,
    out: Annotated[
        Optional[Path],
        typer.Option(
            help="file to write; default: report.html in the run directory, or here for several runs"
        ),
    ] = None,
    serve: Annotated[
        Optional[int],
        typer.Option(
            metavar="PORT",
            help="write nothing: show the page on this port of this machine and follow live runs",
            min=0,
            max=65535,
        ),
    ] = None,
) -> None:
    """Writes a page with every view of a run, or of several side by side, that needs no network."""
    from paceline.report.html_report import write_report
    from paceline.report.run_directory import RunDirectory

    directories = [RunDirectory.open(run) for run in runs]
    if serve is not None:
        if out is not None:
            raise ConfigError("--serve writes no file; leave out --out, or --serve")
        return _serve(runs, serve, step)
    own = directories[0].report_path if len(runs) == 1 else Path("report.html")
    page = OutputFile("--out", out or own, is_default=out is None)
    page.refuse_special()
    page.refuse_unwritable()
    with page.writing():
        write_report(runs, page.path, step)
    typer.echo(f"written to {page.path}: open it in a browser")


def _serve(runs: list[Path], port: int, step: int | None) -> None:
    from paceline.report.server import ReportServer

    try:
        server = ReportServer(runs, port, step)
    except OSError as error:
        raise ConfigError(f"--serve {port}: {error.strerror}; choose another port, or 0 for any") from None
    with server:
        server.data()  # raises here if --step is wrong
        typer.echo(f"open {server.url} (Ctrl-C ends this; it changes nothing)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("")
