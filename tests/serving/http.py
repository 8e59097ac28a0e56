"""A client as small as can be, which can go away at any point of an answer."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Answer:
    """An answer whose body is still to be read."""

    status: int
    headers: dict[str, str]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def body(self) -> bytes:
        if "content-length" in self.headers:
            data = await self.reader.readexactly(int(self.headers["content-length"]))
        else:
            data = b"".join([chunk async for chunk in self.chunks()])
        self.writer.close()
        return data

    async def json(self) -> Any:
        return json.loads(await self.body())

    async def chunks(self) -> AsyncIterator[bytes]:
        while True:
            size = int(await self.reader.readline(), 16)
            data = await self.reader.readexactly(size + 2)
            if not size:
                return
            yield data[:-2]

    async def events(self) -> AsyncIterator[Any]:
        """Yields the data of server-sent events, and fails if the last one is missing."""
        buffer = b""
        async for chunk in self.chunks():
            buffer += chunk
            while b"\n\n" in buffer:
                block, _, buffer = buffer.partition(b"\n\n")
                data = b"".join(line[6:] for line in block.splitlines() if line.startswith(b"data: "))
                if data == b"[DONE]":
                    self.writer.close()
                    return
                yield json.loads(data)
        self.writer.close()
        assert not buffer

    def leave(self) -> None:
        """Closes the connection in the middle of the answer."""
        self.writer.transport.abort()


async def send(url: str, method: str, body: bytes | None = None, headers: str = "") -> Answer:
    """Sends a request and returns its answer, once that has begun."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    length = "" if body is None else f"Content-Length: {len(body)}\r\n"
    head = f"{method} {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\n{length}{headers}\r\n"
    writer.write(head.encode() + (body or b""))
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
    known = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
    return Answer(int(lines[0].split()[1]), known, reader, writer)


async def post(url: str, body: Any, headers: str = "") -> Answer:
    return await send(url, "POST", json.dumps(body).encode(), headers)


async def get(url: str, headers: str = "") -> Answer:
    return await send(url, "GET", None, headers)
