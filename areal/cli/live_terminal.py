"""The live view: its terminal, which reads keys, writes screens, handles signals, and runs the threads that read data;
and its data: tables, descriptions and logs, as text without control characters.

The loop waits for keys, signals and results, and never blocks on a read of data or on the terminal: data is read in
separate threads, and the terminal is opened a second time in non-blocking mode, so that a terminal that accepts no
output does not delay keys and signals. The terminal's settings are always restored at the end.
"""

from __future__ import annotations

import os
import queue
import select
import signal
import sys
import termios
import threading
import time
from codecs import getincrementaldecoder
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

from areal.cli.live import Live, LivePage, LiveRow, LiveTarget, Pane, failed, paged, press, refreshed, resized, screen
from areal.cli.logs import FollowedLogs, LinePrinter, LogQuery, logged
from areal.cli.options import Invocation
from areal.cli.output import Row, Table, folded, orderable, text_of
from areal.dataclasses import replace
from areal.errors import ArealError, UsageFault
from areal.reconcilers.home_view import document_name
from areal.resources.kinds import Ref, parse_ref
from areal.terminal import fancy, spelled

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"  # the other screen, no cursor, no wrapping
_LEAVE = "\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l"
_ESCAPE_S = 0.05  # an escape character that nothing follows for so long is the key
_TICK_S = 1.0
_LEAVE_S = 0.5  # that the last output may take
_MOST_READS = 8  # threads, where reads hang

_NAMES = {
    "\r": "enter",
    "\n": "enter",
    "\t": "tab",
    "\x7f": "backspace",
    "\x08": "backspace",
    "\x0c": "ctrl-l",
    "\x15": "ctrl-u",
    "\x04": "pagedown",
    "\x06": "pagedown",
    "\x02": "pageup",
}
_FINALS = {"A": "up", "B": "down", "C": "right", "D": "left", "H": "home", "F": "end"}
_TILDES = {"1": "home", "7": "home", "4": "end", "8": "end", "5": "pageup", "6": "pagedown"}


def keys_of(text: str, *, is_whole: bool) -> tuple[list[str], str]:
    """Return the keys in the bytes from a terminal, and the rest that may be the start of a key. ``is_whole``: no more
    bytes follow soon. Unknown escape sequences are left out."""
    found: list[str] = []
    at = 0
    while at < len(text):
        if text[at] != "\x1b":
            name = _NAMES.get(text[at], text[at] if text[at].isprintable() else "")
            found += [name] if name else []
            at += 1
            continue
        key, length = _sequence(text[at:])
        if length == 0:
            if not is_whole:
                return found, text[at:]
            key, length = "esc", 1
        found += [key] if key else []
        at += length
    return found, ""


def _sequence(text: str) -> tuple[str, int]:
    """Return the key of the escape sequence at the start of ``text`` ("" for an unknown one), and its number of
    characters; 0 if it is incomplete."""
    if len(text) == 1:
        return "", 0
    if text[1] not in "[O":
        return "esc", 1
    for at, each in enumerate(text[2:], 2):
        if "@" <= each <= "~":
            words = text[2:at]
            return (_TILDES.get(words, "") if each == "~" else _FINALS.get(each, "")), at + 1
        if not " " <= each <= "?":
            return "", at
    return "", 0


class LiveReads(NamedTuple):
    """The functions that read data. ``tables``: for each table, the function and the seconds between reads. ``page``:
    the same for a page."""

    tables: Sequence[tuple[Callable[[], Pane], float]]
    page: Callable[[LivePage], tuple[Callable[[], LivePage], float]]


class _Result(NamedTuple):
    source: _LiveReader
    value: Pane | LivePage | ArealError | OSError


class _LiveReader:
    """Runs one read function on a thread, one call at a time."""

    def __init__(self, target: int | LivePage, read: Callable[[], Pane | LivePage], seconds: float) -> None:
        self.target, self._read, self._seconds = target, read, seconds
        self.is_running = False
        self.due = 0.0

    def start(self, put: Callable[[_Result], None]) -> None:
        self.is_running = True
        threading.Thread(target=self._run, args=(put,), name="live read", daemon=True).start()

    def _run(self, put: Callable[[_Result], None]) -> None:
        value: Any
        try:
            value = self._read()
        except Exception as error:  # noqa: BLE001 - shown on the screen, which goes on
            value = error
        put(_Result(self, value))

    def ended(self) -> None:
        self.is_running = False
        self.due = time.monotonic() + self._seconds


class _Ended(BaseException):
    """A signal that ends the process has arrived."""

    def __init__(self, number: int) -> None:
        self.number = number


class LiveTerminal:
    """The terminal of standard output. Its settings are restored at the end of the ``with`` block."""

    def __init__(self) -> None:
        name = os.ttyname(sys.stdout.fileno())
        self.fd = os.open(name, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
        self.is_coloured = fancy(sys.stdout)
        self.signals: set[int] = set()
        self._waiting = b""  # output that the terminal has not taken yet
        self._shown: list[str] = []
        self._before: list[Any] = []
        self._handlers: dict[int, Any] = {}
        self.wake_read, self._wake_write = os.pipe()
        for fd in (self.wake_read, self._wake_write):
            os.set_blocking(fd, False)

    def __enter__(self) -> LiveTerminal:
        sys.stdout.flush()
        for number in (signal.SIGTERM, signal.SIGHUP):
            self._handlers[number] = signal.signal(number, self._end)
        for number in (signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH):
            self._handlers[number] = signal.signal(number, lambda each, frame: self.signals.add(each))
        self._handlers[-1] = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._before = termios.tcgetattr(self.fd)
        self.enter()
        return self

    def __exit__(self, *_: object) -> None:
        with _signals_blocked():
            self.leave()
            signal.set_wakeup_fd(self._handlers.pop(-1))
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            for fd in (self.fd, self.wake_read, self._wake_write):
                os.close(fd)

    @staticmethod
    def _end(number: int, frame: FrameType | None) -> None:
        raise _Ended(number)

    def enter(self) -> None:
        """Switch the terminal to single keys without echo. Ctrl-C and Ctrl-Z still send signals."""
        mode = termios.tcgetattr(self.fd)
        mode[0] &= ~(termios.IXON | termios.ICRNL)  # Ctrl-S would stop the screen
        mode[3] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN)
        mode[6][termios.VMIN], mode[6][termios.VTIME] = 1, 0
        termios.tcsetattr(self.fd, termios.TCSANOW, mode)
        self._waiting, self._shown = _ENTER.encode(), []
        self.flush()

    def leave(self) -> None:
        """Restore the terminal, within ``_LEAVE_S`` even if it accepts no output."""
        with suppress(termios.error):
            if self._before:
                termios.tcsetattr(self.fd, termios.TCSANOW, self._before)
        self._waiting += _LEAVE.encode()
        deadline = time.monotonic() + _LEAVE_S
        with suppress(OSError):
            while self.flush() and (left := deadline - time.monotonic()) > 0:
                select.select([], [self.fd], [], left)

    def suspend(self) -> None:
        """Stop the process, as Ctrl-Z does. Returns when the process continues."""
        with _signals_blocked():
            self.leave()
        before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, before)

    def size(self) -> tuple[int, int]:
        found = os.get_terminal_size(self.fd)
        return found.columns or 80, found.lines or 24

    def forget(self) -> None:
        """Discard the record of the screen, so that the next screen is written completely."""
        self._shown = []

    @property
    def is_behind(self) -> bool:
        return bool(self._waiting)

    def flush(self) -> bool:
        """Write as much as the terminal accepts now. Returns whether some output is left."""
        while self._waiting:
            try:
                self._waiting = self._waiting[os.write(self.fd, self._waiting) :]
            except BlockingIOError:
                return True
        return False

    def show(self, lines: Sequence[str]) -> None:
        """Write the lines that differ from the previous screen."""
        parts = [] if len(lines) == len(self._shown) else ["\x1b[2J"]
        before = self._shown if not parts else [None] * len(lines)
        for number, (line, old) in enumerate(zip(lines, before, strict=True), 1):
            if line != old:
                parts.append(f"\x1b[{number};1H{spelled(line, chr(27))}\x1b[0m\x1b[K")
        self._shown = list(lines)
        self._waiting += "".join(parts).encode("utf-8", "replace")
        self.flush()


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block the signals that would end the process."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_live(live: Live, reads: LiveReads) -> int:
    """Show ``live`` until ``q``, the end of the input, or a signal. Returns the exit status."""
    try:
        with LiveTerminal() as terminal:
            _Loop(terminal, live, reads).run()
    except _Ended as ended:
        signal.signal(ended.number, signal.SIG_DFL)
        os.kill(os.getpid(), ended.number)
    return 0


class _Loop:
    def __init__(self, terminal: LiveTerminal, live: Live, reads: LiveReads) -> None:
        self._terminal, self._live, self._reads = terminal, live, reads
        self._tables = [_LiveReader(place, read, seconds) for place, (read, seconds) in enumerate(reads.tables)]
        self._page: _LiveReader | None = None
        self._results: queue.SimpleQueue[_Result] = queue.SimpleQueue()
        self._running = 0
        self._text, self._decode = "", getincrementaldecoder("utf-8")("ignore").decode
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    def run(self) -> None:
        self._live = resized(self._live, *self._terminal.size())
        drawn: tuple[object, ...] = ()
        while not self._live.has_ended:
            self._start_reads()
            now = time.monotonic()
            if not self._terminal.is_behind and drawn != (self._live, int(now)):
                drawn = self._live, int(now)
                self._terminal.show(screen(self._live, now, colour=self._terminal.is_coloured))
            if not self._wait():
                return

    def _wait(self) -> bool:
        """Wait for a key, a signal, a result or the time of the next read, and handle it. Returns False at the end of
        the input."""
        terminal = self._terminal
        sources = [*self._tables[self._live.active :][:1], *([self._page] if self._page else [])]
        due = min((each.due for each in sources if not each.is_running), default=float("inf"))
        timeout = min(_TICK_S, max(0.0, due - time.monotonic()), _ESCAPE_S if self._text else _TICK_S)
        waits = [terminal.fd, terminal.wake_read, self._wake_read]
        ready, _, _ = select.select(waits, [terminal.fd] if terminal.is_behind else [], [], timeout)
        try:
            for fd in (terminal.wake_read, self._wake_read):
                while fd in ready and _drain(fd):
                    pass
            terminal.flush()
            read = _drain(terminal.fd) if terminal.fd in ready else None
        except OSError:  # the terminal is gone
            return False
        if read == b"":
            return False
        self._signals()
        self._take_results()
        self._text += self._decode(read or b"")
        keys, self._text = keys_of(self._text, is_whole=not read)
        for key in keys:
            self._press(key)
        return True

    def _press(self, key: str) -> None:
        if key == "ctrl-l":
            self._terminal.forget()
        self._live = press(self._live, key)
        page = self._live.page
        if page is None or page.kind == "help":
            self._page = None
        elif self._page is None or not _is_same(self._page.target, page):
            try:
                self._page = _LiveReader(page, *self._reads.page(page))
            except ArealError as error:
                self._page, self._live = None, failed(self._live, page, error.message)

    def _signals(self) -> None:
        seen, self._terminal.signals = self._terminal.signals, set()
        if signal.SIGTSTP in seen:
            self._terminal.suspend()
        if seen & {signal.SIGTSTP, signal.SIGCONT}:  # a shell has used the terminal meanwhile
            self._terminal.enter()
        if seen:
            self._live = resized(self._live, *self._terminal.size())
            self._terminal.forget()

    def _start_reads(self) -> None:
        now = time.monotonic()
        for source in (self._page, self._tables[self._live.active]):
            if source is not None and not source.is_running and source.due <= now and self._running < _MOST_READS:
                self._running += 1
                source.start(self._put)

    def _put(self, result: _Result) -> None:
        """Queue a result. Called on the thread of a read."""
        self._results.put(result)
        with suppress(OSError):
            os.write(self._wake_write, b"\0")

    def _take_results(self) -> None:
        while not self._results.empty():
            source, value = self._results.get()
            source.ended()
            self._running -= 1
            if isinstance(value, Pane) and isinstance(source.target, int):
                self._live = refreshed(self._live, source.target, value)
            elif isinstance(value, LivePage):
                self._live = paged(self._live, value)
            else:
                text = value.message if isinstance(value, ArealError) else f"{type(value).__name__}: {value}"
                self._live = failed(self._live, source.target, " ".join(spelled(text).split()))


def _is_same(target: int | LivePage, page: LivePage) -> bool:
    return isinstance(target, LivePage) and (target.kind, target.target) == (page.kind, page.target)


def _drain(fd: int) -> bytes | None:
    """Return the bytes that can be read now; None if there are none."""
    try:
        return os.read(fd, 4096)
    except BlockingIOError:
        return None


_LINES = 5000  # of logs that are kept
_LAST = 500  # of them, those of each process at first


class ViewTable(NamedTuple):
    title: str
    look: Callable[[], Table]
    seconds: float = 1.0  # between its reads


def show_live(
    cli: Invocation,
    tables: Sequence[ViewTable],
    describe: Callable[[Ref], str],
    *,
    sort_by: str | None = None,
    read: Table | None = None,
    has_logs: bool = True,
) -> int:
    """Run the live view until ``q`` or Ctrl-C, and return the exit status. ``sort_by``: the sort column of the first
    table; ``read``: the data to show until the first read."""
    wide = cli.format.kind == "wide"

    def reader(table: ViewTable, order: str | None) -> Callable[[], Pane]:
        return lambda: pane_of(table.look(), table.title, wide=wide, sort_by=order)

    readers = [(reader(each, None if at else sort_by), each.seconds) for at, each in enumerate(tables)]
    panes = [Pane(table.title) for table in tables]
    if read is not None:
        panes[0] = pane_of(read, tables[0].title, wide=wide, sort_by=sort_by)
    return run_live(Live(tuple(panes)), LiveReads(readers, partial(_open, cli, describe, has_logs)))


def pane_of(table: Table, title: str, *, wide: bool, sort_by: str | None = None) -> Pane:
    columns = tuple(column for column in table.columns if wide or not column.wide)
    rows = tuple(
        LiveRow(
            text_of(table.name(row)),
            tuple(text_of(column.cell(row)) for column in columns),
            tuple(orderable((column.order or column.cell)(row)) for column in columns),
            _target(row),
        )
        for row in table.sorted(sort_by)
    )
    notes = [table.note, *(f"{path} is unreadable: {reason}" for path, reason in table.unreadable)]
    return Pane(
        title, columns, rows, text_of("; ".join(filter(None, notes))) if any(notes) else "", at=time.monotonic()
    )


def _target(row: Row) -> LiveTarget:
    if "owner" not in row:
        return LiveTarget(document_name(row))
    component, _, replica = str(row.get("process") or f"{row['component']}/{row['replica']}").partition("/")
    return LiveTarget(row["owner"], component, int(replica))


def _open(
    cli: Invocation, describe: Callable[[Ref], str], has_logs: bool, page: LivePage
) -> tuple[Callable[[], LivePage], float]:
    """Return the function that reads a page, and the seconds between reads."""
    if page.kind == "logs":
        if not has_logs:
            raise UsageFault("a gateway shows no logs: they are on its own machine")
        return _Logs(cli, page).read, 0.3
    return partial(_describe, describe, page), 2.0


def _describe(describe: Callable[[Ref], str], page: LivePage) -> LivePage:
    text = describe(parse_ref(page.target.ref))
    return replace(page, lines=tuple(folded(spelled(text)).expandtabs().split("\n")), at=time.monotonic())


class _Logs:
    """The last lines of a target's processes."""

    def __init__(self, cli: Invocation, page: LivePage) -> None:
        self._cli, self._page = cli, page
        self._kept: deque[str] = deque(maxlen=_LINES)
        self._count = 0
        self._logs: FollowedLogs | None = None

    def read(self) -> LivePage:
        if self._logs is None:
            ref = parse_ref(self._page.target.ref)
            query = LogQuery(self._page.target.component, self._page.target.replica, follow=True, lines=_LAST)
            states = logged(self._cli, ref, query)
            self._printer = LinePrinter(self._cli, states, lines=True)
            self._logs = FollowedLogs(self._cli, ref, query, states)
            lines = self._logs.first
        else:
            lines = self._logs.poll()
        self._kept.extend(spelled(self._printer.readable(line)).expandtabs() for line in lines)
        self._count += len(lines)
        return replace(self._page, lines=tuple(self._kept), dropped=self._count - len(self._kept), at=time.monotonic())
