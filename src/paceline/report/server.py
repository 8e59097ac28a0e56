"""Serves the report of live runs, to browsers on this machine; `ssh -L` brings it to others.

A request chooses nothing: there is one page, and its data when they have changed. Requests that name another
host are refused, so that a page from elsewhere cannot ask through the browser.
"""

import contextlib
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from paceline.plots.page import script_json
from paceline.report.html_report import page_of, report_data
from paceline.report.run_data import read_runs
from paceline.report.run_directory import RunDirectory

LOOPBACK = ("127.0.0.1", "localhost")


class ReportServer(ThreadingHTTPServer):
    """The report of some runs on a port of this machine; 0: any that is free."""

    daemon_threads = True

    def __init__(self, runs: Sequence[Path], port: int, step: int | None = None) -> None:
        self.runs = runs
        self.step = step
        self.reading = threading.Lock()
        self.known: dict[str, Any] = {"live": ""}
        super().__init__(("127.0.0.1", port), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def state(self) -> str:
        """Returns a text that changes when the runs' files have."""
        directories = [RunDirectory(run) for run in self.runs]
        files = [path for run in directories for path in (run.metrics_path, run.closing_path)]
        stats = [path.stat() if path.exists() else None for path in files]
        return " ".join(f"{stat.st_mtime_ns:x}-{stat.st_size:x}" if stat else "-" for stat in stats)

    def data(self) -> dict[str, Any]:
        """Returns what the report shows, read again only where there is something new."""
        with self.reading:
            state = self.state()
            if state != self.known["live"]:
                self.known = report_data(read_runs(self.runs), self.step) | {"live": state}
            return self.known


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: ReportServer

    def do_GET(self) -> None:
        """Answers the page, or its data where they differ from the state that the browser has."""
        if self.headers.get("Host", "").partition(":")[0] not in LOOPBACK:
            self.send_error(HTTPStatus.FORBIDDEN, explain=f"open {self.server.url}")
        elif self.path not in ("/", "/data"):
            self.send_error(HTTPStatus.NOT_FOUND, explain=f"there is one page: {self.server.url}")
        elif self.path == "/data" and self.headers.get("If-None-Match") == self.server.state():
            self.send_response(HTTPStatus.NOT_MODIFIED)
            self.end_headers()
        else:
            self._send_report()

    do_HEAD = do_GET

    def _send_report(self) -> None:
        try:
            data = self.server.data()
        except (OSError, ValueError) as error:  # a run was removed; it may come back
            return self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, explain=str(error))
        is_page = self.path == "/"
        body = (page_of(data) if is_page else script_json(data)).encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/html; charset=utf-8" if is_page else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command == "GET":
            with contextlib.suppress(ConnectionError):  # the page was closed
                self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keeps the terminal quiet: every request would be a line."""
