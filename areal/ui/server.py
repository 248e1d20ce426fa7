"""The page's HTTP server: static files, the views as JSON, and one stream of changes a page. Threads of the standard
library; it writes nothing to disk, unless it is given ``actions``.

``/api/VIEW`` and ``/api/changes`` need the token. The files of the page hold no data and need none. Any other path is
the page, whose router reads it. Every answer of every method, errors too, has passed ``access`` and has its headers.
"""

from __future__ import annotations

import itertools
import json
import math
import mimetypes
import select
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from areal import __version__
from areal.errors import ArealError, Conflict, NotFound, UsageFault
from areal.ui import access
from areal.ui.views import Marks, ViewContext, ViewReader, expect_reader

STATIC = Path(__file__).parent / "static"
_MOST_BODY = 4 << 20
_MOST_WATCHED = 8
_IDLE_S = 60.0  # of a connection
_THREADS = 128
_EVICTION_S = 1.0  # for the thread of a connection that was closed to end
_STATUS = {NotFound: 404, UsageFault: 400, Conflict: 409}
_TYPES = {".js": "text/javascript", ".mjs": "text/javascript", ".css": "text/css", ".html": "text/html"}


# What changed, as server-sent events: the cursors of the views that a page shows, compared once a second. A page opens
# one stream and names its views. It gets all their cursors once, so that it sees a change between its read and the
# opening of the stream, then only those that differ. Pages that show the same view share one look at the files.

PERIOD_S = 1.0
PING_S = 15.0  # after so long without an event, a comment keeps proxies from closing the stream

Look = Callable[[str, Mapping[str, str]], Marks]


class SharedMarks:
    """The cursors of each watched view, looked up at most once in a period whatever the number of pages."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._known: dict[str, tuple[float, Marks]] = {}
        self._lock = threading.Lock()

    def of(self, watch: str) -> Marks:
        """``watch``: a view with its query, ``job?name=x``. Cursors that cannot be read are one that says why."""
        with self._lock:
            now = time.monotonic()
            at, marks = self._known.get(watch, (-PERIOD_S, {}))
            if now - at < PERIOD_S / 2:
                return marks
            name, _, query = watch.partition("?")
            try:
                marks = self._look(name, dict(parse_qsl(query)))
            except Exception as error:  # noqa: BLE001 - the answer has begun, and cannot become an error
                marks = {"unreadable": str(error)}
            self._known = {key: entry for key, entry in self._known.items() if now - entry[0] < 10 * PERIOD_S}
            self._known[watch] = (now, marks)
            return marks


def events(
    watched: Sequence[str], shared: SharedMarks, ended: threading.Event, left: Callable[[], bool]
) -> Iterator[bytes]:
    """Yield the stream of one page: first all cursors, then what differs, and a comment when nothing did for a while.
    It ends with the server, or once the page has ``left``."""
    seen: dict[str, Marks] = {}
    sent_at = time.monotonic()
    while not ended.is_set() and not left():
        for watch in watched:
            marks, before = shared.of(watch), seen.get(watch)
            differing = changed(before, marks)
            if before is None or differing:
                seen[watch], sent_at = marks, time.monotonic()
                kind, data = "marks" if before is None else "changed", json.dumps({"watch": watch, "marks": differing})
                yield f"event: {kind}\ndata: {data}\n\n".encode()
        if time.monotonic() - sent_at >= PING_S:
            sent_at = time.monotonic()
            yield b": still here\n\n"
        ended.wait(PERIOD_S)


def changed(before: Marks | None, now: Marks) -> dict[str, int | str | None]:
    """Return the cursors that differ; None for one that is gone. Pure."""
    old = before or {}
    gone = {name: None for name in old if name not in now}
    return {name: cursor for name, cursor in now.items() if old.get(name) != cursor} | gone


class Answer(NamedTuple):
    status: int
    body: bytes
    type: str = "application/json"
    headers: Mapping[str, str] = {}


class PageServer(ThreadingHTTPServer):
    """One page server. ``context`` is what its views are given beside the query."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, host: str, port: int, context: ViewContext, rules: access.PageAccess) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.rules = rules
        self.context = context
        self.ended = threading.Event()
        self.marks = SharedMarks(self._marks)
        self._free = threading.Semaphore(_THREADS)
        self._unproven: dict[int, socket.socket] = {}  # connections that have not sent the token yet, oldest first
        super().__init__((host, port), _Handler)

    def view(self, query: Mapping[str, str], body: object = None) -> ViewContext:
        return replace(self.context, query=query, body=body)

    def _marks(self, name: str, query: Mapping[str, str]) -> Marks:
        view = self.view(query)
        return expect_reader(name, view).marks(view)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve in a thread. Above the limit the oldest connection that has not sent the token is closed for a new one;
        if all have, the new one is closed."""
        if not self._free.acquire(blocking=False) and not self._evict():
            self.shutdown_request(request)
            return
        self._unproven[id(request)] = request
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._unproven.pop(id(request), None)
            self._free.release()
            raise

    def _evict(self) -> bool:
        for oldest in list(self._unproven.values())[:1]:
            with suppress(OSError):  # it has just ended
                oldest.shutdown(socket.SHUT_RDWR)
            return self._free.acquire(timeout=_EVICTION_S)
        return False

    def prove(self, request: socket.socket) -> None:
        """Note that a connection has sent the token."""
        self._unproven.pop(id(request), None)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._unproven.pop(id(request), None)
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: a client that left is no error, and a failure of a view has been answered."""

    def server_close(self) -> None:
        self.ended.set()
        super().server_close()
        if self.context.actions is not None:
            self.context.actions.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    server: PageServer

    def _serve(self) -> None:
        try:
            parts = urlsplit(self.path)
        except ValueError:
            self.send_error(HTTPStatus.BAD_REQUEST)
            return
        is_api = parts.path.startswith("/api/")
        refusal = self.server.rules.refuses(self._headers(), secret=is_api)
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # what is not read of its body must not be taken for a request
        if refusal is not None:
            self.close_connection = True
            self._answer(_failure(refusal.status, "Refused", refusal.message, refusal.hint))
            return
        if is_api:
            self.server.prove(self.connection)
        try:
            self._route(parts.path, parts.query, is_api)
        except ArealError as error:
            self._answer(_error(error))
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            self.close_connection = True
        except Exception as error:  # noqa: BLE001 - a fault of one view must not end the page
            self._answer(
                _failure(500, type(error).__name__, f"the view failed: {error}", "reload; report it if it stays")
            )

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _serve

    def _route(self, path: str, query: str, is_api: bool) -> None:
        pairs = parse_qsl(query, keep_blank_values=True)
        if not is_api:
            self._allow("GET", "HEAD")
            self._answer(_static(unquote(path), self.headers.get("If-None-Match")))
        elif path == "/api/changes":
            self._allow("GET")
            self._stream([value for name, value in pairs if name == "watch"])
        else:
            reader = expect_reader(path.removeprefix("/api/"), self.server.context)
            self._allow("GET", "HEAD", "POST")
            self._view(reader, dict(pairs))

    def _view(self, reader: ViewReader, query: Mapping[str, str]) -> None:
        view = self.server.view(query, self._body() if self.command == "POST" else None)
        marks = reader.marks(view) if self.command != "POST" else {}  # before the read: what comes after it is a change
        found = reader.read(view)
        if isinstance(found, Mapping):
            self._answer(Answer(200, to_json(found), headers={"Areal-Marks": json.dumps(marks)}))
        else:
            self._parts(found)

    def _parts(self, parts: Iterator[Mapping[str, object]]) -> None:
        """Stream an answer in parts, each a line of JSON. The first part is computed before the status is sent, so that
        an error has its status; a later error is the last part. Closed when the client disconnects."""
        with closing(parts):  # type: ignore[type-var]
            first = next(parts, None)
            self.close_connection = True
            self._start(200, {"Content-Type": "application/x-ndjson"})
            try:
                for part in itertools.chain([] if first is None else [first], parts):
                    self.wfile.write(to_json(part) + b"\n")
            except ArealError as error:
                self.wfile.write(_error(error).body + b"\n")

    def _allow(self, *methods: str) -> None:
        if self.command not in methods:
            self.close_connection = True
            raise _MethodNotAllowed(f"{self.command} is not allowed here", hint=f"allowed: {', '.join(methods)}")

    def _body(self) -> object:
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit() or len(length) > 9 or int(length) > _MOST_BODY:
            raise UsageFault(f"the body needs a Content-Length of at most {_MOST_BODY} bytes")
        try:
            return json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            raise UsageFault("the body is not JSON") from None

    def _headers(self) -> access.AccessHeaders:
        def one(name: str) -> str:
            values = self.headers.get_all(name, [])
            return values[0] if len(values) == 1 else ""

        origin = one("Origin") if "Origin" in self.headers else None
        return access.AccessHeaders(one("Host"), origin, one("Authorization"), self.headers.get("Sec-Fetch-Site"))

    def _answer(self, answer: Answer) -> None:
        self._start(
            answer.status, {"Content-Length": str(len(answer.body)), "Content-Type": answer.type, **answer.headers}
        )
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Cache-Control": "no-store", **access.HEADERS, **headers}.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def _stream(self, watched: Iterable[str]) -> None:
        chosen = list(dict.fromkeys(watched))
        if not 0 < len(chosen) <= _MOST_WATCHED:
            raise UsageFault(f"watch=VIEW?QUERY is needed, at most {_MOST_WATCHED} times")
        self.close_connection = True
        self._start(200, {"Content-Type": "text/event-stream"})
        for event in events(chosen, self.server.marks, self.server.ended, self._left):
            self.wfile.write(event)

    def _left(self) -> bool:
        """Return whether the client has closed the connection: a stream that waits for a change does not write."""
        readable = select.poll()
        readable.register(self.connection, select.POLLIN)
        try:
            return bool(readable.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that cannot be parsed, or of an unknown method, without echoing it."""
        self.close_connection = True
        self._answer(_failure(code, "BadRequest", HTTPStatus(code).phrase, ""))

    def version_string(self) -> str:
        return f"areal/{__version__}"

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


class _MethodNotAllowed(ArealError):
    pass


def _error(error: ArealError) -> Answer:
    status = next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 500)
    status = 405 if isinstance(error, _MethodNotAllowed) else status
    detail = f"{error.message}\n{error.detail}" if error.detail else error.message
    return _failure(status, type(error).__name__.strip("_"), detail, error.hint or "")


def _failure(status: int, type: str, message: str, hint: str) -> Answer:
    return Answer(status, to_json({"error": {"type": type, "message": message, "hint": hint}}))


def _static(path: str, known: str | None) -> Answer:
    """Return a file of the page, or the page itself, whose router reads all other paths."""
    file = _file(path) if path.startswith("/static/") else STATIC / "index.html"
    if file is None:
        return _failure(404, "NotFound", "there is no such file", "")
    content = file.read_bytes()
    tag = f'"{__version__}-{zlib.crc32(content):08x}"'
    headers = {"ETag": tag, "Cache-Control": "no-cache"}
    kind = _TYPES.get(file.suffix) or mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    if known == tag:
        return Answer(304, b"", kind, headers)
    text = "; charset=utf-8" if kind.startswith("text/") else ""
    return Answer(200, content, kind + text, headers)


def _file(path: str) -> Path | None:
    """Return the static file of a path; None if it does not exist or is outside of the folder."""
    if "\0" in path or "\\" in path:
        return None
    try:
        file = (STATIC / path.removeprefix("/static/")).resolve()
        return file if file.is_relative_to(STATIC.resolve()) and file.is_file() else None
    except OSError:  # a name that is too long
        return None


def serve(server: PageServer, ready: Callable[[], None]) -> None:
    """Serve until KeyboardInterrupt, or until another thread calls ``shutdown``."""
    try:
        ready()
        server.serve_forever(poll_interval=0.5)
    finally:
        server.server_close()


def to_json(value: Any) -> bytes:
    """JSON that every browser parses: numbers that are not finite are strings, lone surrogates are escaped."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, separators=(",", ":")).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
