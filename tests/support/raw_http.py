"""HTTP as an attacker writes it: raw bytes, so that no library corrects a header."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

UPGRADE = (
    "Connection: Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
)


@dataclass
class RawResponse:
    status: int
    head: str
    body: str


async def raw_request(
    port: int, path: str, headers: Sequence[str], *, method: str = "GET", version: str = "1.1", body: bytes = b""
) -> RawResponse:
    """Send exactly these headers and read until the other side closes, or has upgraded the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        lines = [f"{method} {path} HTTP/{version}", *headers]
        if not any(header.startswith("Connection:") for header in headers):
            lines.append("Connection: close")
        if body:
            lines.append(f"Content-Length: {len(body)}")
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        await writer.drain()
        async with asyncio.timeout(10):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            status = int(head.split(" ", 2)[1])
            content = b"" if status == 101 or "Content-Length: 0" in head else await reader.read(65536)
        return RawResponse(status, head, content.decode("latin-1"))
    finally:
        writer.close()
