"""The HTTP side: paths, keys, limits, errors and streams, as an ASGI application.

request ──▶ key ──▶ body ──▶ schema ──▶ endpoint ──▶ answer, or events
                                          │
                       the client goes away or time is up: what runs in the engine is aborted
"""

import asyncio
import hashlib
import hmac
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from typing import Any

from pydantic import BaseModel, ValidationError

from paceline.serving.endpoints.base import Endpoint
from paceline.serving.endpoints.chat import ChatCompletions
from paceline.serving.endpoints.completions import Completions
from paceline.serving.endpoints.messages import CountTokens, Messages
from paceline.serving.endpoints.responses import Responses
from paceline.serving.endpoints.tokens import Generate
from paceline.serving.errors import ApiError, from_validation
from paceline.serving.openapi import description
from paceline.serving.service import Call, Service

logger = logging.getLogger(__name__)

Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
ENDPOINTS: tuple[type[Endpoint], ...] = (
    Completions,
    ChatCompletions,
    Responses,
    Messages,
    CountTokens,
    Generate,
)
PATHS = frozenset(endpoint.path for endpoint in ENDPOINTS)
OPEN_PATHS = ("/health",)


class ClientGone(Exception):
    """The client closed its connection."""


class App:
    """Serves one model."""

    def __init__(self, service: Service, keys: tuple[str, ...] = ()) -> None:
        self.service = service
        self.keys = [hashlib.sha256(key.encode()).digest() for key in keys]
        self.endpoints = {one.path: one(service) for one in ENDPOINTS}
        self.pages: dict[str, Callable[[], Event | str]] = {
            "/health": self._health,
            "/metrics": self._metrics,
            "/v1/models": self._models,
            "/openapi.json": lambda: description(list(self.endpoints.values())),
        }

    async def __call__(self, scope: Event, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        path = scope["path"].rstrip("/") or "/"
        endpoint = self.endpoints.get(path)
        answer = _Answer(send, self.service, path)
        try:
            await self._serve(scope, receive, answer, path, endpoint)
        except ApiError as error:
            told = error.anthropic() if _speaks_anthropic(path) else error.openai()
            await answer.json(error.status, told, close=error.status in (408, 413))
        except (ClientGone, asyncio.CancelledError):  # or the server ends, and waits no longer
            answer.count(499)

    async def _serve(
        self, scope: Event, receive: Receive, answer: "_Answer", path: str, endpoint: Endpoint | None
    ) -> None:
        method = scope["method"]
        caller = "" if path in OPEN_PATHS else self._caller(scope)
        if endpoint is None:
            page = self.pages.get(path) or self._model_page(path)
            if page is None:
                raise ApiError(404, f"there is nothing at {path}; /openapi.json lists the paths")
            if method not in ("GET", "HEAD"):
                raise ApiError(405, f"{path} is read with GET")
            content = page()
            status = 503 if path == "/health" and self.service.engine.lost.is_set() else 200
            if isinstance(content, str):
                await answer.text(status, content)
            else:
                await answer.json(status, content)
            return
        if method != "POST":
            raise ApiError(405, f"{path} takes POST")
        try:
            async with asyncio.timeout(self.service.limits.body_seconds):
                data = await self._body(receive)
        except TimeoutError:
            raise ApiError(
                408, f"the body did not arrive in {self.service.limits.body_seconds:g} s"
            ) from None
        try:
            body = endpoint.body.model_validate_json(data)
        except ValidationError as error:
            raise from_validation(error) from None
        await self._answer(endpoint, body, Call(caller), receive, answer)

    async def _answer(
        self, endpoint: Endpoint, body: BaseModel, call: Call, receive: Receive, answer: "_Answer"
    ) -> None:
        """Runs the endpoint while the client is there and has time."""
        working = asyncio.create_task(self._work(endpoint, body, call, answer))
        watching = asyncio.create_task(_gone(receive))
        limit = self.service.limits.request_seconds
        try:
            await asyncio.wait((working, watching), timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                await working
            elif watching.done():
                raise ClientGone
            else:
                working.cancel()
                await asyncio.wait((working,))
                await answer.fail(endpoint, ApiError(504, f"it is not done after {limit:g} s"))
        finally:
            call.close()
            for task in (working, watching):
                task.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    async def _work(self, endpoint: Endpoint, body: BaseModel, call: Call, answer: "_Answer") -> None:
        try:
            result = await endpoint.handle(body, call)
            if isinstance(result, BaseModel):
                await answer.model(result)
            else:
                await answer.stream(result)
        except ApiError as error:
            await answer.fail(endpoint, error)
        except OSError:
            raise ClientGone from None
        except Exception:
            logger.exception("%s failed", endpoint.path)
            await answer.fail(endpoint, ApiError(500, "the server failed; its log says why"))

    async def _body(self, receive: Receive) -> bytes:
        most = self.service.limits.body_bytes
        data = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            data += message.get("body", b"")
            if len(data) > most:
                raise ApiError(413, f"the body has more than {most} bytes")
            if not message.get("more_body", False):
                return bytes(data)

    def _caller(self, scope: Event) -> str:
        """Returns whose request it is; raises where its key is not one of ours."""
        if not self.keys:
            return ""
        headers = dict(scope["headers"])
        given = headers.get(b"x-api-key") or headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        digest = hashlib.sha256(given).digest()
        known = [hmac.compare_digest(digest, key) for key in self.keys]
        if not any(known):
            raise ApiError(401, "no valid key: send `Authorization: Bearer KEY` or `x-api-key: KEY`")
        return digest.hex()

    # -- pages --------------------------------------------------------------------------------------

    def _health(self) -> Event:
        return {"status": "the engine has ended" if self.service.engine.lost.is_set() else "ok"}

    def _metrics(self) -> str:
        engine = self.service.engine
        return self.service.metrics.text(engine.counters, len(engine.outstanding))

    def _models(self) -> Event:
        return {"object": "list", "data": [self._model()]}

    def _model(self) -> Event:
        return {
            "id": self.service.model,
            "object": "model",
            "created": self.service.engine.description["created"],
            "owned_by": "paceline",
            "max_model_len": self.service.max_length,
        }

    def _model_page(self, path: str) -> Callable[[], Event | str] | None:
        return self._model if path == f"/v1/models/{self.service.model}" else None


class _Answer:
    """Writes one HTTP answer, and counts it."""

    def __init__(self, send: Send, service: Service, path: str) -> None:
        self.send = send
        self.service = service
        self.path = path
        self.begun = False

    def count(self, status: int) -> None:
        known = self.path in ("/v1/models", "/metrics", "/health") or self.path in PATHS
        self.service.metrics.answers[self.path if known else "other", status] += 1

    async def json(self, status: int, content: Event, close: bool = False) -> None:
        await self._whole(status, json.dumps(content).encode(), b"application/json", close)

    async def text(self, status: int, content: str) -> None:
        await self._whole(status, content.encode(), b"text/plain; version=0.0.4; charset=utf-8")

    async def model(self, content: BaseModel) -> None:
        data = content.model_dump_json(exclude_unset=True, by_alias=True).encode()
        await self._whole(200, data, b"application/json")

    async def stream(self, events: AsyncIterator[str]) -> None:
        await self._start(200, [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")])
        async with aclosing(events):  # type: ignore[type-var]
            async for one in events:
                await self.send({"type": "http.response.body", "body": one.encode(), "more_body": True})
        await self.send({"type": "http.response.body", "body": b""})

    async def fail(self, endpoint: Endpoint, error: ApiError) -> None:
        """Answers with an error; in a stream that has begun, as its last event."""
        if not self.begun:
            await self.json(error.status, endpoint.error(error))
            return
        last = endpoint.error_event(error).encode()
        await self.send({"type": "http.response.body", "body": last})

    async def _whole(self, status: int, data: bytes, kind: bytes, close: bool = False) -> None:
        headers = [(b"content-type", kind), (b"content-length", str(len(data)).encode())]
        if status == 405:
            headers.append((b"allow", b"POST" if self.path in PATHS else b"GET, HEAD"))
        if status == 429:
            headers.append((b"retry-after", b"1"))
        if close:  # the rest of the body is not read
            headers.append((b"connection", b"close"))
        await self._start(status, headers)
        await self.send({"type": "http.response.body", "body": data})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.begun = True
        self.count(status)
        await self.send({"type": "http.response.start", "status": status, "headers": headers})


async def _gone(receive: Receive) -> None:
    """Returns when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _speaks_anthropic(path: str) -> bool:
    return path.startswith("/v1/messages")
