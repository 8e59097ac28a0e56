"""Serves the dashboard: one page, the views as JSON, and server-sent events while somebody looks.

Only this machine is answered unless another address is asked for, and then only who knows the token. Requests
that name another host are refused, so that a page from elsewhere cannot ask through the browser. Nothing is
changed by any request.
"""

import json
import secrets
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from paceline.dashboard.runs_folder import RunsFolder, UnknownRun
from paceline.plots.page import script_hashes, shell_page

LOOPBACK = ("127.0.0.1", "localhost", "::1")

# Seconds between two looks at the files, and between two signs of life on a quiet connection.
POLL = 0.25
HEARTBEAT = 15.0

SCRIPTS = ("report.js", "dashboard.js")


class DashboardServer(ThreadingHTTPServer):
    """The server, the folder it shows and the token it asks for ("": none)."""

    daemon_threads = True

    def __init__(self, folder: RunsFolder, host: str, port: int, token: str = "") -> None:
        if host not in LOOPBACK and not token:
            token = secrets.token_urlsafe(24)
        self.folder = folder
        self.host = host
        self.token = token
        super().__init__((host, port), Handler)

    @property
    def url(self) -> str:
        """Where a browser finds it, token included."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        query = f"/?token={self.token}" if self.token else "/"
        return f"http://{host}:{self.server_address[1]}{query}"


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: DashboardServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answers the page, a script, a view or the events."""
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        if not self._is_allowed(query):
            self._send(
                HTTPStatus.FORBIDDEN, b"open the address that paceline dashboard printed", "text/plain"
            )
            return
        try:
            self._answer(url.path, query)
        except UnknownRun as error:
            self._send_json({"error": f"there is no run {error.args[0]!r}"}, HTTPStatus.NOT_FOUND)
        except (ValueError, KeyError, IndexError) as error:
            self._send_json({"error": repr(error)}, HTTPStatus.BAD_REQUEST)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _answer(self, path: str, query: dict[str, list[str]]) -> None:
        folder = self.server.folder
        if path == "/":
            page = shell_page("Paceline", SCRIPTS)
            self._send(HTTPStatus.OK, page.encode(), "text/html; charset=utf-8")
        elif path == "/api/runs":
            self._send_json(folder.listing())
        elif path == "/api/view":
            self._send_json(folder.view(query["run"]))
        elif path == "/api/tail":
            self._send_json(folder.tail(query["run"][0], int(query["step"][0])))
        elif path == "/api/samples":
            self._send_json(folder.samples(query["run"][0], int(query["step"][0])))
        elif path == "/api/slowest":
            self._send_json(folder.slowest(query["run"][0]))
        elif path == "/events":
            self._send_events(query["run"])
        else:
            self._send_json({"error": "there is no such page"}, HTTPStatus.NOT_FOUND)

    def _is_allowed(self, query: dict[str, list[str]]) -> bool:
        if self.server.token:
            given = query.get("token", [""])[0] or self.headers.get("Authorization", "").removeprefix(
                "Bearer "
            )
            return secrets.compare_digest(given.encode(), self.server.token.encode())
        host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        return host in LOOPBACK

    def _send_events(self, names: list[str]) -> None:
        """Sends the views whenever they have changed, until the browser goes away."""
        folder = self.server.folder
        runs = [folder.run(name) for name in names]
        self.send_response(HTTPStatus.OK)
        self._send_headers("text/event-stream")
        self.end_headers()
        self.close_connection = True
        shown: list[int] = []
        last_sign = time.monotonic()
        while True:
            versions = [run.poll() for run in runs]
            if versions != shown:
                shown = versions
                data = json.dumps(folder.view(names), separators=(",", ":"))
                self.wfile.write(f"event: view\ndata: {data}\n\n".encode())
                last_sign = time.monotonic()
            elif time.monotonic() - last_sign > HEARTBEAT:
                self.wfile.write(b": still here\n\n")
                last_sign = time.monotonic()
            self.wfile.flush()
            time.sleep(POLL)

    def _send_json(self, data: object, status: HTTPStatus = HTTPStatus.OK) -> None:
        body = json.dumps(data, separators=(",", ":"), allow_nan=False).encode()
        self._send(status, body, "application/json")

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        self._send_headers(kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_headers(self, kind: str) -> None:
        policy = (
            "default-src 'none'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
            f"script-src {script_hashes(SCRIPTS)}; frame-ancestors 'none'"
        )
        self.send_header("Content-Type", kind)
        self.send_header("Content-Security-Policy", policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")

    def log_message(self, format: str, *args: object) -> None:
        """Keeps the terminal quiet: every request would be a line."""
