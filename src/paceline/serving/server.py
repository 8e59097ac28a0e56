"""One server: starts the engine's process, listens, and ends in order.

SIGTERM or Ctrl-C    no new connections; those that are being answered are, for `drain_seconds` at most
the engine ends      every request gets an error, and the server ends
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from paceline.config import Config, dump_config
from paceline.models.source import policy_folder
from paceline.policy.tokenizer import load_tokenizer
from paceline.serving.app import App
from paceline.serving.engine_client import EngineClient, EngineLost
from paceline.serving.limits import Limits
from paceline.serving.metrics import Metrics
from paceline.serving.service import Service
from paceline.tasks.chat import ChatTemplate

LOOPBACK = ("127.0.0.1", "::1", "localhost")
# Seconds for the engine's process to end by itself.
END_SECONDS = 10.0


@dataclass(frozen=True)
class ServerSettings:
    """Where a server listens, and for whom."""

    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[str, ...] = ()
    name: str = ""  # of the model; empty: as policy.path says
    drain_seconds: int = 30
    limits: Limits = field(default_factory=Limits)


def serve(config: Config, settings: ServerSettings, said: Callable[[str], None]) -> None:
    """Serves a recipe's policy until a signal ends it; raises where it cannot begin, or the engine ends."""
    if settings.host not in LOOPBACK and not settings.keys:
        raise ValueError(
            f"--host {settings.host}: others could use this server; give --key-file with a key, or serve on "
            "127.0.0.1"
        )
    folder = policy_folder(config.policy.path)
    ours, theirs = socket.socketpair()
    command = f"from paceline.serving.engine_process import main; main({theirs.fileno()})"
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", command],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)},
            start_new_session=True,  # Ctrl-C is for the server, which drains first
        )
    try:
        asyncio.run(_serve(config, settings, folder, ours, said))
    finally:
        ours.close()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()


async def _serve(
    config: Config,
    settings: ServerSettings,
    folder: Path,
    connection: socket.socket,
    said: Callable[[str], None],
) -> None:
    name = settings.name or config.policy.path
    said(f"starting the engine for {name}")
    engine = EngineClient()
    try:
        await engine.connect(connection, dump_config(config))
    except EngineLost as error:
        raise ValueError(str(error)) from None
    tokenizer = load_tokenizer(folder)
    service = Service(engine, tokenizer, ChatTemplate.from_folder(folder), name, settings.limits, Metrics())
    server = make_server(App(service, settings.keys), settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    ending = asyncio.create_task(_end_with(engine, server))
    said(
        f"{name} at http://{settings.host}:{settings.port}/v1, {service.max_length} tokens; see /openapi.json"
    )
    await server.serve()
    ending.cancel()
    lost = engine.lost.is_set()
    await engine.close()
    if lost:
        raise OSError("the engine's process ended; its last words are above")


async def _end_with(engine: EngineClient, server: "HttpServer") -> None:
    await engine.lost.wait()
    server.stop()


class HttpServer(uvicorn.Server):
    """Uvicorn, without its own handling of signals: the engine ends after the last answer."""

    should_exit: bool

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        """Stops listening and answers what has begun; a second call ends that, too."""
        self.force_exit = self.should_exit
        self.should_exit = True


class _Protocol(AutoHTTPProtocol):
    """Closes a connection whose first request does not begin in time."""

    wait_seconds: float

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        asyncio.get_running_loop().call_later(self.wait_seconds, self._close_unless_used)

    def _close_unless_used(self) -> None:
        if self.cycle is None:
            self.transport.close()


def make_server(app: App, settings: ServerSettings) -> HttpServer:
    return HttpServer(
        uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            http=type("Protocol", (_Protocol,), {"wait_seconds": settings.limits.body_seconds}),
            backlog=2048,
            limit_concurrency=settings.limits.connections,
            timeout_graceful_shutdown=settings.drain_seconds,
            server_header=False,
        )
    )
