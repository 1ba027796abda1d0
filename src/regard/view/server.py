"""Local web server of the viewer: a page with a text box, and the windows of weights that the page requests.

It listens on 127.0.0.1 only and refuses requests from pages of other sites.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import anyio
import numpy as np
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from regard.view.document import Document
from regard.view.page import page, script_json
from regard.view.record import Record
from regard.view.workspace import REQUESTS, RUNS, RequestError, Workspace

LOCAL = ("127.0.0.1", "localhost", "[::1]")
BODY = 1 << 20  # most bytes of a request body
SECONDS = 120.0  # most time to compute a response
REQUEST_SECONDS = 10.0  # most time for a request to arrive
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
log = logging.getLogger("regard.view")

CaptureText = Callable[[str], Record]
"""Captures the text of the text box; the message of a ValueError is shown to the user."""


class Session(Workspace):
    """The records of the latest texts, by id. The model runs one text or experiment after the other.

    against: captures texts with a second model, to compare the two.
    """

    def __init__(
        self,
        capture_text: CaptureText,
        first: str,
        *,
        against: CaptureText | None = None,
        longest: int = 250_000,
        seconds: float = SECONDS,
    ) -> None:
        super().__init__()
        self.capture_text, self.against, self.longest, self.seconds = capture_text, against, longest, seconds
        self.busy = threading.Lock()
        self.run(first)

    @property
    def record(self) -> Record:
        return self.last.record

    def run(self, text: str) -> Document:
        """Capture a text, make it the current one, and return its document."""
        with self._alone():
            held = self.add(self.capture_text(text).precompute(), text)
            contents = held.document()
        contents.about["compares"] = ["text"] if self.against is None else ["text", "model"]
        self.last, self.last_document = held, contents
        return contents

    def compare(self, text: str, *, second: bool) -> dict[str, Any]:
        """Capture a text next to the current one, with the second model if `second`; return its summary."""
        capture_text = self.against if second else self.capture_text
        if capture_text is None:
            raise RequestError(422, "there is no second model to compare with; start the server with two")
        with self._alone():
            return self.add(capture_text(text).precompute(), text, derived=True).summary()

    def answer(self, kind: str, body: Mapping[str, Any]) -> Any:
        """Answer a request with plain data, one at a time where the model runs."""
        with self._alone() if kind in RUNS else nullcontext():
            return super().answer(kind, body)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self.busy.acquire(timeout=self.seconds / 2):
            raise RequestError(503, "another text is still being computed; try again")
        try:
            yield
        finally:
            self.busy.release()


def application(session: Session, *, lang: str = "en", hosts: Sequence[str] = LOCAL) -> ASGIApp:
    """Return the ASGI application: the page at `/`, and its requests below `/api`."""

    async def home(request: Request) -> Response:
        return HTMLResponse(await _with_timeout(session, lambda: page(session.last_document, lang, live=True)))

    async def run(request: Request) -> Response:
        text = read_text(await _read_json(request))
        return _json(await _with_timeout(session, lambda: session.run(text).json()))

    async def compare(request: Request) -> Response:
        body = await _read_json(request)
        text, second = read_text(body), body.get("second", False)
        if not isinstance(second, bool):
            raise RequestError(422, "second must be true or false")
        return _json(await _with_timeout(session, lambda: session.compare(text, second=second)))

    async def ask(request: Request) -> Response:
        body, kind = await _read_json(request), request.path_params["kind"]
        if kind not in REQUESTS:
            raise RequestError(404, "page not found")
        return _json(await _with_timeout(session, lambda: session.answer(kind, body)))

    def read_text(body: dict[str, Any]) -> str:
        text = body.get("text")
        if not isinstance(text, str) or not text.strip():
            raise RequestError(422, "text must be a string of at least one word")
        if len(text) > session.longest:
            raise RequestError(422, f"text must have at most {session.longest:,} characters, but has {len(text):,}")
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # replace lone surrogates

    async def window(request: Request) -> Response:
        body = await _read_json(request)
        cells = await _with_timeout(session, lambda: session.window(body))
        sizes = np.array(cells.weights.shape, "<i4")
        parts = (sizes, cells.rows.astype("<i4"), cells.columns.astype("<i4"), cells.weights.astype("<f4"))
        return Response(b"".join(part.tobytes() for part in parts), media_type="application/octet-stream")

    async def refuse(request: Request, error: Exception) -> Response:
        if isinstance(error, RequestError):
            return _json({"error": str(error)}, error.status)
        if isinstance(error, ValueError):  # caused by the contents of the request
            return _json({"error": str(error)}, 422)
        return _json({"error": "page not found"}, getattr(error, "status_code", 404))

    async def fail(request: Request, error: Exception) -> Response:
        log.error("a request failed", exc_info=error)  # details are logged, not sent to the browser
        return _json({"error": "internal error; see the terminal of regard serve for details"}, 500)

    routes = [
        Route("/", home, methods=["GET"]),
        Route("/api/run", run, methods=["POST"]),
        Route("/api/window", window, methods=["POST"]),
        Route("/api/compare", compare, methods=["POST"]),
        Route("/api/{kind}", ask, methods=["POST"]),
    ]
    handlers: dict[Any, Any] = {RequestError: refuse, ValueError: refuse, 404: refuse, 405: refuse, Exception: fail}
    return _Guard(Starlette(routes=routes, exception_handlers=handlers), tuple(hosts))


class _Guard:
    """Accept only requests from our own pages: check Host, against DNS rebinding, and Origin."""

    def __init__(self, inner: ASGIApp, hosts: tuple[str, ...]) -> None:
        self.inner, self.hosts = inner, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.inner(scope, receive, send)
            return
        if scope["type"] != "http":  # websockets are not supported
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

        with suppress(Exception):  # already answered and logged, or the client has disconnected
            await self.inner(scope, receive, with_headers)

    def _why_not(self, request: Request) -> str | None:
        host = request.headers.get("host", "")
        if len(request.headers.getlist("host")) != 1 or _without_port(host) not in self.hosts:
            return "this viewer accepts requests to 127.0.0.1 only"
        origin = request.headers.get("origin")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return "this viewer accepts requests from its own pages only"
        if request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return "this viewer accepts requests from its own pages only"
        return None


def _json(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON response that may contain any text, including lone surrogates."""
    return Response(script_json(data), status, headers, media_type="application/json")


def _without_port(host: str) -> str:
    """Return the name of a host without its port."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower()


async def _read_json(request: Request) -> dict[str, Any]:
    """Read the JSON object of a request, of at most `BODY` bytes."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise RequestError(415, "expected application/json")  # which forms of other sites cannot send
    content = bytearray()
    try:
        with anyio.fail_after(REQUEST_SECONDS):
            async for part in request.stream():
                content += part
                if len(content) > BODY:
                    raise RequestError(413, f"a request may have at most {BODY:,} bytes")
    except TimeoutError:
        raise RequestError(408, f"the request did not arrive within {REQUEST_SECONDS:g} seconds") from None
    except ClientDisconnect:
        raise RequestError(400, "the request ended early") from None  # for the log; the client has disconnected
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        raise RequestError(400, "expected JSON") from None
    if not isinstance(data, dict):
        raise RequestError(400, "expected a JSON object")
    return data


async def _with_timeout(session: Session, work: Callable[[], Any]) -> Any:
    """Run `work` in a thread for at most `session.seconds`; the result of a late thread is dropped."""
    try:
        with anyio.fail_after(session.seconds):
            return await anyio.to_thread.run_sync(work, abandon_on_cancel=True)
    except TimeoutError:
        raise RequestError(
            503, f"the computation took longer than {session.seconds:g} seconds; try a shorter text"
        ) from None


def server_config(app: ASGIApp, port: int) -> Any:
    """Return the uvicorn configuration, which closes a connection whose request does not arrive in time."""
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class TimeoutProtocol(H11Protocol):
        """Close a connection that has not sent a complete header within `REQUEST_SECONDS`."""

        timer: Any = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._start_timer()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:  # a request is being answered
                self._stop_timer()
            elif self.timer is None:
                self._start_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _start_timer(self) -> None:
            self.timer = self.loop.call_later(REQUEST_SECONDS, self.transport.close)

        def _stop_timer(self) -> None:
            if self.timer is not None:
                self.timer.cancel()
                self.timer = None

    return uvicorn.Config(
        app, host="127.0.0.1", port=port, log_level="warning", server_header=False, http=TimeoutProtocol,
        lifespan="off",
        h11_max_incomplete_event_size=1 << 16, timeout_keep_alive=30, limit_concurrency=64,
    )  # fmt: skip


def listen(port: int) -> socket.socket:
    """Return a socket that listens on 127.0.0.1; call it before loading a model, so that a port in use raises early."""
    listener = socket.socket()
    try:
        if os.name == "posix":  # on Windows this option would share the port
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
    """Serve on a socket of `listen` until Ctrl-C; `report` is called with the address."""
    import uvicorn

    port = listener.getsockname()[1]
    server = uvicorn.Server(server_config(application(session, lang=lang), port))
    report(f"http://127.0.0.1:{port}/")
    server.run(sockets=[listener])
