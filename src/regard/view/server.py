"""The viewer on this machine: a page with a text box, and the windows that it asks for. It listens to nobody else."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import anyio
import numpy as np
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from regard.view.document import Document, document
from regard.view.page import page, script_json
from regard.view.record import Record

LOCAL = ("127.0.0.1", "localhost", "[::1]")
BODY = 1 << 20  # bytes of a request
SIDE = 4096  # cells of a window each way
CELLS = 1 << 22  # and all of them
SECONDS = 120.0  # of one answer
REQUEST_SECONDS = 10.0  # seconds that a request may take to arrive
MAX_RECORDS = 4  # records of earlier texts, which other tabs may still show
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
LIVE = 3_000_000  # bytes of a document: what it does not hold is asked for
log = logging.getLogger("regard.view")

CaptureText = Callable[[str], Record]
"""From what is written into the text box to a record; a ValueError tells the reader what is wrong with the text."""


class RequestError(Exception):
    """A request that is not answered: a status, and a sentence."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


@dataclass(frozen=True, eq=False)
class CapturedText:
    """A record, its id, its text, and the document of a page that shows it and asks for windows."""

    id: str
    text: str
    record: Record
    document: Document


class Session:
    """The records of the last texts, by id. One text is looked at at once."""

    def __init__(
        self, capture_text: CaptureText, first: str, *, longest: int = 250_000, seconds: float = SECONDS
    ) -> None:
        self.capture_text, self.longest, self.seconds = capture_text, longest, seconds
        self.busy = threading.Lock()
        self.records: dict[str, CapturedText] = {}
        self.last = self.run(first)

    @property
    def record(self) -> Record:
        return self.last.record

    def run(self, text: str) -> CapturedText:
        """Look at another text."""
        if not self.busy.acquire(timeout=self.seconds / 2):
            raise RequestError(503, "another text is being looked at; try again")
        try:
            record = self.capture_text(text).precompute()
            made, name = document(record, LIVE), secrets.token_hex(8)
            about = made.about | {"text": text, "record": name}
            self.last = self.records[name] = CapturedText(name, text, record, replace(made, about=about))
            while len(self.records) > MAX_RECORDS:
                del self.records[next(iter(self.records))]
            return self.last
        finally:
            self.busy.release()

    def find(self, name: Any) -> CapturedText:
        """The record with an id."""
        found = self.records.get(name) if isinstance(name, str) else None
        if found is None:
            raise RequestError(410, "the server no longer holds this text; send it again")
        return found


def application(session: Session, *, lang: str = "en", hosts: Sequence[str] = LOCAL) -> ASGIApp:
    """The pages and the two questions that they ask: `api/run` and `api/window`."""

    async def home(request: Request) -> Response:
        return HTMLResponse(await _with_timeout(session, lambda: page(session.last.document, lang, live=True)))

    async def run(request: Request) -> Response:
        asked = await _read_json(request)
        text = asked.get("text")
        if not isinstance(text, str) or not text.strip():
            raise RequestError(422, "text must be a string of at least one word")
        if len(text) > session.longest:
            raise RequestError(422, f"text must have at most {session.longest:,} letters, but has {len(text):,}")
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # half of a pair is no letter
        made = await _with_timeout(session, lambda: session.run(whole).document.json())
        return _json(made)

    async def window(request: Request) -> Response:
        asked = await _read_json(request)
        try:
            name, head = str(asked["attention"]), _whole(asked["head"])
            rows, columns, size = ((_whole(edge) for edge in asked[part]) for part in ("rows", "columns", "size"))
            (top, bottom), (left, right), (tall, wide) = rows, columns, size
        except (KeyError, TypeError, ValueError):
            raise RequestError(
                422, "expected {record, attention, head, rows: [from, to], columns: [from, to], size: [rows, columns]}"
            ) from None
        if not 0 < tall <= SIDE or not 0 < wide <= SIDE or tall * wide > CELLS:
            raise RequestError(
                422, f"size must be 1 ... {SIDE} each way and {CELLS:,} together, but is {tall} x {wide}"
            )
        record = session.find(asked.get("record")).record
        captured = record.attention(name)
        if not 0 <= head < captured.heads:
            raise RequestError(422, f"head must be in 0 ... {captured.heads - 1}, but is {head}")
        found = await _with_timeout(
            session, lambda: record.window(name, head, (top, bottom), (left, right), (tall, wide))
        )
        sizes = np.array(found.weights.shape, "<i4")
        parts = (sizes, found.rows.astype("<i4"), found.columns.astype("<i4"), found.weights.astype("<f4"))
        return Response(b"".join(part.tobytes() for part in parts), media_type="application/octet-stream")

    async def refuse(request: Request, error: Exception) -> Response:
        if isinstance(error, RequestError):
            return _json({"error": str(error)}, error.status)
        if isinstance(error, ValueError):  # of what was asked
            return _json({"error": str(error)}, 422)
        return _json({"error": "there is no such page"}, getattr(error, "status_code", 404))

    async def fail(request: Request, error: Exception) -> Response:
        log.error("a request failed", exc_info=error)  # told here, not to the browser
        return _json({"error": "it failed; the terminal of regard serve says why"}, 500)

    routes = [
        Route("/", home, methods=["GET"]),
        Route("/api/run", run, methods=["POST"]),
        Route("/api/window", window, methods=["POST"]),
    ]
    handlers: dict[Any, Any] = {RequestError: refuse, ValueError: refuse, 404: refuse, 405: refuse, Exception: fail}
    return _Guard(Starlette(routes=routes, exception_handlers=handlers), tuple(hosts))


class _Guard:
    """Lets only this machine's own pages in: by Host, so that no other name can be bound to us, and by Origin."""

    def __init__(self, inner: ASGIApp, hosts: tuple[str, ...]) -> None:
        self.inner, self.hosts = inner, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.inner(scope, receive, send)
            return
        if scope["type"] != "http":  # nobody speaks websockets here
            return
        refusal = self._why_not(Request(scope))
        if refusal is not None:
            await _json({"error": refusal}, 403, HEADERS)(scope, receive, send)
            return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                more = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        with suppress(Exception):  # it is answered and logged; whoever went away needs no answer
            await self.inner(scope, receive, with_headers)

    def _why_not(self, request: Request) -> str | None:
        host = request.headers.get("host", "")
        if len(request.headers.getlist("host")) != 1 or _name(host) not in self.hosts:
            return "this viewer answers at 127.0.0.1 only"
        origin = request.headers.get("origin")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return "this viewer answers its own pages only"
        if request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return "this viewer answers its own pages only"
        return None


def _json(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON in which any text of a model can be, half pairs of letters too."""
    return Response(script_json(data), status, headers, media_type="application/json")


def _name(host: str) -> str:
    """A host without its port."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower()


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError
    return value


async def _read_json(request: Request) -> dict[str, Any]:
    """The JSON of a request, of which not more is read than it may have."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise RequestError(415, "expected application/json")  # a form of another site cannot send it unasked
    records = bytearray()
    try:
        with anyio.fail_after(REQUEST_SECONDS):
            async for part in request.stream():
                records += part
                if len(records) > BODY:
                    raise RequestError(413, f"a request may have {BODY:,} bytes")
    except TimeoutError:
        raise RequestError(408, f"the request did not arrive within {REQUEST_SECONDS:g} seconds") from None
    except ClientDisconnect:
        raise RequestError(400, "the request ended early") from None  # which nobody reads
    try:
        found = json.loads(records)
    except (ValueError, RecursionError):
        raise RequestError(400, "expected JSON") from None
    if not isinstance(found, dict):
        raise RequestError(400, "expected a JSON object")
    return found


async def _with_timeout(session: Session, work: Callable[[], Any]) -> Any:
    """Work in a thread, for so long and no longer; what a late thread finds is dropped."""
    try:
        with anyio.fail_after(session.seconds):
            return await anyio.to_thread.run_sync(work, abandon_on_cancel=True)
    except TimeoutError:
        raise RequestError(503, f"it took longer than {session.seconds:g} seconds; try a shorter text") from None


def server_config(app: ASGIApp, port: int) -> Any:
    """How the server runs: a connection whose request does not arrive in time is closed."""
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class TimeoutProtocol(H11Protocol):
        """Closes a connection that has sent no whole header ASKING seconds after it began to."""

        timer: Any = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:  # a request is being answered
                self._rest()
            elif self.timer is None:
                self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            self._rest()
            super().connection_lost(exc)

        def _wait(self) -> None:
            self.timer = self.loop.call_later(REQUEST_SECONDS, self.transport.close)

        def _rest(self) -> None:
            if self.timer is not None:
                self.timer.cancel()
                self.timer = None

    return uvicorn.Config(
        app, host="127.0.0.1", port=port, log_level="warning", server_header=False, http=TimeoutProtocol,
        lifespan="off",
        h11_max_incomplete_event_size=1 << 16, timeout_keep_alive=30, limit_concurrency=64,
    )  # fmt: skip


def listen(port: int) -> socket.socket:
    """A socket that listens at 127.0.0.1; taken before a model is loaded, so that a port in use raises at once."""
    listener = socket.socket()
    try:
        if os.name == "posix":  # elsewhere it would share the port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def serve(
    session: Session, listener: socket.socket, *, lang: str = "en", report: Callable[[str], None] = print
) -> None:
    """Serve at a socket of `listen` until Ctrl-C; `report` hears the address."""
    import uvicorn

    port = listener.getsockname()[1]
    server = uvicorn.Server(server_config(application(session, lang=lang), port))
    report(f"http://127.0.0.1:{port}/")
    server.run(sockets=[listener])
