"""What crosses the wire: errors, the request and its checks, and the limits on bytes. No queue, no tensors.

Every error has one shape, {"error": {"type", "message", "index"?}}, stays under 4 KB and never repeats the
input: an error message is no place for other people's text, nor for a megabyte of it.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_DRAFT_TOKENS = 64
MAX_SESSION_CHARS = 256
FIELDS = ("tokens", "num_draft_tokens", "session", "accepted", "sources")


# ---------------------------------------------------------------------------- errors


class ApiError(Exception):
    def __init__(
        self, status: int, kind: str, message: str, index: int | None = None, retry_after_s: int | None = None
    ):
        self.status = status
        self.headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
        self.body = {"error": {"type": kind, "message": message}}
        if index is not None:
            self.body["error"]["index"] = index

    def response(self, **headers: str) -> JSONResponse:
        return JSONResponse(self.body, self.status, {**self.headers, **headers})


# ---------------------------------------------------------------------------- the request


@dataclass(frozen=True)
class DraftCall:
    """A checked request. It goes to the engine as it is: `tokens` and `k` are what a DraftRequest has, and making
    one here would import torch into the process before /health can answer."""

    tokens: list[int]
    k: int
    session: str | None
    accepted: int | None  # tokens of this session's last draft that the target accepted; needs `session`
    sources: bool


def _refuse_constant(name: str) -> None:
    raise ValueError(name)  # NaN and Infinity are Python's, not JSON's


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(fields := dict(pairs)) != len(pairs):
        raise ValueError("a key stands twice: which one is meant?")
    return fields


def _integer(value: Any, name: str, low: int, high: int) -> int:
    # `type is`, not isinstance: bool is a subclass of int, and JSON's true must not become 1 (nor 1.0, nor "1").
    if type(value) is not int or not low <= value <= high:
        raise ApiError(422, "invalid_request", f"{name} must be an integer from {low} to {high}")
    return value


def parse_call(body: bytes, *, context: int, num_ids: int, default_k: int) -> DraftCall:
    """Checks one request body; ApiError 400 (not JSON) or 422 (schema, ids, length).

    Lengths are looked at before ids, so that a list of 100,000 ids costs no more than its JSON.
    """
    try:
        fields = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError):  # ValueError: also bad UTF-8 and integers of thousands of digits
        raise ApiError(400, "invalid_json", "the body is not JSON in UTF-8 (RFC 8259)") from None
    if type(fields) is not dict:
        raise ApiError(422, "invalid_request", 'the body must be an object such as {"tokens": [1, 2, 3]}')
    if not fields.keys() <= set(FIELDS):
        raise ApiError(422, "invalid_request", f"unknown field; there are: {', '.join(FIELDS)}")
    tokens = fields.get("tokens")
    if type(tokens) is not list or not tokens:
        raise ApiError(422, "invalid_request", "tokens must be a list of at least one token id")
    k = _integer(fields.get("num_draft_tokens", default_k), "num_draft_tokens", 1, MAX_DRAFT_TOKENS)
    if len(tokens) + k > context:
        message = f"{len(tokens)} tokens + {k} drafted pass the context of {context}: send at most {context - k} tokens"
        raise ApiError(422, "too_long", message)
    for index, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token < num_ids:
            message = f"tokens[{index}] must be an integer from 0 to {num_ids - 1}"
            raise ApiError(422, "invalid_token", message, index)
    session, accepted, sources = fields.get("session"), fields.get("accepted"), fields.get("sources", False)
    if "session" in fields and (type(session) is not str or not 0 < len(session) <= MAX_SESSION_CHARS):
        raise ApiError(422, "invalid_request", f"session must be a string of 1 to {MAX_SESSION_CHARS} characters")
    if "accepted" in fields:
        _integer(accepted, "accepted", 0, MAX_DRAFT_TOKENS)
        if session is None:
            message = "accepted counts tokens of a session's last draft: send session with it"
            raise ApiError(422, "invalid_request", message)
    if type(sources) is not bool:
        raise ApiError(422, "invalid_request", "sources must be true or false")
    return DraftCall(tokens, k, session, accepted, sources)


# ---------------------------------------------------------------------------- the edge: bytes in, status out


class Edge:
    """ASGI middleware: reads the whole body under a size and a time limit before the application sees it.

    The limits hold while bytes arrive: a declared length over the limit is refused unread, a chunked body as soon
    as the running count passes it. The connection is closed then, for its rest is unread.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int, read_timeout_s: float, on_status: Callable[[str, int], None]):
        self.app = app
        self.max_body_bytes = max_body_bytes
        self.read_timeout_s = read_timeout_s
        self.on_status = on_status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def counted_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.on_status(scope["path"], message["status"])
            await send(message)

        try:
            async with asyncio.timeout(self.read_timeout_s):
                body = await self._read(scope, receive)
        except TimeoutError:
            error = ApiError(408, "read_timeout", f"the body did not arrive within {self.read_timeout_s:g} s")
            await error.response(Connection="close")(scope, receive, counted_send)
            return
        except ApiError as error:
            await error.response(Connection="close")(scope, receive, counted_send)
            return
        if body is None:
            return
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return unread.pop() if unread else await receive()

        await self.app(scope, replay, counted_send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body; None when the client has gone."""
        too_large = ApiError(413, "body_too_large", f"the body is larger than the limit of {self.max_body_bytes} bytes")
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared[:20]) > self.max_body_bytes:
            raise too_large
        chunks: list[bytes] = []
        size_bytes = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            chunks.append(message.get("body", b""))
            size_bytes += len(chunks[-1])
            if size_bytes > self.max_body_bytes:
                raise too_large
            if not message.get("more_body", False):
                return b"".join(chunks)


class HttpProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, with a time limit for request heads, and our shape for what is not HTTP at all."""

    def __init__(self, *args: Any, head_timeout_s: float, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._head_timeout_s = head_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(self._head_timeout_s, transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering and self._head_timer:
            self._head_timer.cancel()
            self._head_timer = None
        elif not answering and not self._head_timer:
            self._head_timer = self.loop.call_later(self._head_timeout_s, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        body = ApiError(400, "invalid_http", "this is not an HTTP request").response().body
        head = f"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        self.transport.close()
