"""A recording of the quickstart as an animated SVG, and one of the live view beside it:
``python tools/recording.py docs/images/quickstart.svg --live docs/images/live.svg``.

Its commands are typed into a shell of a real terminal (tmux), and carried out. Each change of the screen is a frame;
what takes long is shown faster, by few frames of a second at most; the live view is shown as fast as it was. It needs
tmux, and the gateway's port to be free.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

COLUMNS, ROWS = 92, 24
PROMPT = "$"
COMMANDS = (
    "areal init quickstart q",
    "cd q && areal apply -f quickstart.yaml",
    "areal get",
    "areal inf chat -m 1234 --temperature 0",
    "areal wait trainjob/learn --for completed",
    "areal inf chat -m 1234 --temperature 0",
    "areal delete inferenceservice/default --cascade --yes",
)
LIVE = "areal get -w"
TRAINS = COMMANDS[3]  # after this command the job trains, which is what the live view shows
KEYS = ("j", "j", "Enter", "Escape", "l", "Escape", "Tab", "s", "Tab")
_FRAMES = 14  # at most, of one command
_TYPED_S, _SHOWN_S, _READ_S, _END_S = 0.05, 0.5, 1.6, 5.0
_VIEWED_S = 2.0  # after each key of a view
_POLL_S = 0.1
_COMMAND_S = 900.0
_BRIGHT = 8
_COLORS = (
    *("#1e2430", "#e06c75", "#98c379", "#e5c07b", "#61afef", "#c678dd", "#56b6c2", "#d7dae0"),
    *("#7f8794", "#ff7b86", "#b5e890", "#ffd68a", "#7fc4ff", "#dd93f0", "#6fd3df", "#ffffff"),
)
_SGR = re.compile(r"\x1b\[([\d;:]*)m")
_OTHER = re.compile(r"\x1b(?:\[[\d;?]*[A-Za-ln-z]|\(B|[=>]|\][^\x07\x1b]*(?:\x07|\x1b\\))|[\x0e\x0f]")
_WIDTH, _HEIGHT, _PAD = 8.4, 18, 14


class Failed(Exception):
    """A command did not end, or ended with an error."""


@dataclass
class Terminal:
    """A shell in tmux. ``frames``: what the screen showed, and for how many seconds it is shown."""

    folder: Path
    env: dict[str, str]
    frames: list[tuple[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._socket = Path(tempfile.mkdtemp(prefix="recording-"))
        given = [f"{name}={value}" for name, value in self.env.items()]
        shell = ["env", *given, f"PS1={PROMPT} ", "PROMPT_COMMAND=", "bash", "--norc", "--noprofile", "-i"]
        size = ["-x", str(COLUMNS), "-y", str(ROWS)]
        self._tmux("-f", os.devnull, "new-session", "-d", *size, "-c", str(self.folder), shlex.join(shell))
        self._tmux("set-option", "-g", "status", "off")
        self._until(lambda screen: screen.strip() == PROMPT, 30.0)

    def close(self) -> None:
        self._tmux("kill-server")
        shutil.rmtree(self._socket)

    def run(self, command: str) -> None:
        """Type ``command``, and record until the prompt is back. Raise Failed where its status is not 0."""
        self._type(command)
        seen = self._until(lambda screen: plain(screen).rstrip().endswith(f"\n{PROMPT}"), _COMMAND_S)
        step = max(1, -(-len(seen) // _FRAMES))
        self.frames += [(screen, _SHOWN_S) for screen in seen[:-1:step]]
        self.frames.append((seen[-1], _READ_S))
        self._status(command)

    def view(self, command: str, keys: Sequence[str]) -> None:
        """Type a command that fills the screen, then each of ``keys``, and record what happens. ``q`` ends it."""
        self._type(command)
        for key in ("", *keys):
            if key:
                self._tmux("send-keys", key)
            until = time.monotonic() + _VIEWED_S
            while time.monotonic() < until:
                began = time.monotonic()
                screen = self._screen()
                time.sleep(_POLL_S)
                self.frames.append((screen, time.monotonic() - began))
        self._tmux("send-keys", "q")
        self._until(lambda screen: plain(screen).rstrip().endswith(PROMPT), 30.0)

    def _type(self, command: str) -> None:
        for char in command:
            self._tmux("send-keys", "-l", char)
            self.frames.append((self._screen(), _TYPED_S))
        self._tmux("send-keys", "Enter")

    def _status(self, command: str) -> None:
        """Ask the shell in a second line, which is wiped from the screen and is no frame."""
        before = plain(self._screen())
        file = self._socket / "status"
        self._tmux("send-keys", "-l", f" echo $? > {file}.new; mv {file}.new {file}")
        self._tmux("send-keys", "Enter")
        deadline = time.monotonic() + 30.0
        while not file.exists():
            if time.monotonic() > deadline:
                raise Failed(f"the shell did not answer after: {command}")
            time.sleep(_POLL_S)
        status = int(file.read_text())
        file.unlink()
        if status:
            raise Failed(f"{command}: exit status {status}\n{before}")
        self._tmux("send-keys", "C-l")
        self._until(lambda screen: plain(screen).strip() == PROMPT, 30.0)

    def _until(self, done: Callable[[str], bool], limit_s: float) -> list[str]:
        """Every screen that was seen until ``done`` holds for one."""
        seen: list[str] = []
        deadline = time.monotonic() + limit_s
        while True:
            screen = self._screen()
            if not seen or screen != seen[-1]:
                seen.append(screen)
            if done(screen):
                return seen
            if time.monotonic() > deadline:
                raise Failed(f"no prompt after {limit_s:g} s:\n{plain(screen)}")
            time.sleep(_POLL_S)

    def _screen(self) -> str:
        return self._tmux("capture-pane", "-p", "-e")

    def _tmux(self, *words: str) -> str:
        command = ["tmux", "-S", str(self._socket / "tmux"), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise Failed(f"tmux {words[0]}: {done.stderr.strip()}")
        return done.stdout


def plain(screen: str) -> str:
    return _OTHER.sub("", _SGR.sub("", screen))


def spans(line: str) -> list[tuple[str, str, bool]]:
    """Parts of a line as text, color ("" for the usual one) and bold."""
    found, color, bold, dim, at = [], "", False, False, 0
    line = _OTHER.sub("", line)
    for match in [*_SGR.finditer(line), None]:
        if text := line[at : match.start() if match else len(line)]:
            found.append((text, _COLORS[_BRIGHT] if dim and not color else color, bold))
        if match is None:
            break
        at = match.end()
        for code in map(int, re.findall(r"\d+", match[1]) or ["0"]):
            if code in (0, 39):
                color = ""
            if code in (0, 22):
                bold = dim = False
            bold, dim = bold or code == 1, dim or code == 2
            if 30 <= code <= 37 or 90 <= code <= 97:
                color = _COLORS[code - 30 if code < 90 else code - 90 + _BRIGHT]
    return found


def svg(frames: Sequence[tuple[str, float]], title: str) -> str:
    """All frames beside each other, moved through the picture; without animation, the last one is shown."""
    joined: list[tuple[str, float]] = []
    for screen, seconds in frames:
        if joined and joined[-1][0] == screen:
            joined[-1] = (screen, joined[-1][1] + seconds)
        else:
            joined.append((screen, seconds))
    joined[-1] = (joined[-1][0], _END_S)
    width, height = round(COLUMNS * _WIDTH + 2 * _PAD), ROWS * _HEIGHT + 2 * _PAD
    total = sum(seconds for _, seconds in joined)
    steps: list[str] = []
    groups: list[str] = []
    names: dict[str, str] = {}
    at = 0.0
    for number, (screen, seconds) in enumerate(joined):
        steps.append(f"{100 * at / total:.3f}%{{transform:translateX({-number * width}px)}}")
        at += seconds
        uses = []
        for row, line in enumerate(screen.split("\n")[:ROWS]):
            if parts := spans(line.rstrip()):
                name = names.setdefault(_text(parts), f"l{len(names)}")
                uses.append(f'<use href="#{name}" y="{row * _HEIGHT}"/>')
        groups.append(f'<g transform="translate({number * width + _PAD} {_PAD})">{"".join(uses)}</g>')
    drawn = "".join(text.replace("<text ", f'<text id="{name}" ', 1) for text, name in names.items())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f"aria-label={_quoted(title)}>\n<title>{escape(title)}</title>\n"
        "<style>text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:#d7dae0;white-space:pre}"
        f"#film{{animation:film {total:.1f}s steps(1,end) infinite;"
        f"transform:translateX({-(len(joined) - 1) * width}px)}}"
        f"@keyframes film{{{''.join(steps)}}}</style>\n<defs>{drawn}</defs>\n"
        f'<rect width="{width}" height="{height}" rx="8" fill="#1e2430"/>\n<g id="film">\n'
        + "\n".join(groups)
        + "\n</g>\n</svg>\n"
    )


def _text(parts: list[tuple[str, str, bool]]) -> str:
    at, drawn = 0, []
    for text, color, bold in parts:
        style = (f' fill="{color}"' if color else "") + (' font-weight="bold"' if bold else "")
        drawn.append(f'<tspan x="{at * _WIDTH:.1f}"{style}>{escape(text)}</tspan>')
        at += len(text)
    return f'<text y="14" xml:space="preserve">{"".join(drawn)}</text>'


def _quoted(text: str) -> str:
    return f'"{escape(text)}"'


def record(commands: Sequence[str], folder: Path, env: dict[str, str], after: Callable[[str], None]) -> str:
    """The picture of ``commands`` in ``folder``; ``after`` is called with each that has ended."""
    terminal = Terminal(folder, env)
    try:
        for command in commands:
            terminal.run(command)
            after(command)
        return svg(terminal.frames, "Terminal: " + "; ".join(commands))
    finally:
        terminal.close()


def record_view(command: str, keys: Sequence[str], folder: Path, env: dict[str, str]) -> str:
    """The picture of a command that fills the screen, and what each key does."""
    terminal = Terminal(folder, env)
    try:
        terminal.view(command, keys)
        return svg(terminal.frames, f"Terminal: {command}, with the keys {' '.join(keys)}")
    finally:
        terminal.close()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="FILE.svg")
    parser.add_argument("--live", type=Path, metavar="FILE.svg")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="quickstart-") as folder:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        env = {"PATH": path, "AREAL_HOME": f"{folder}/home", "OMP_NUM_THREADS": "1"}

        def beside(command: str) -> None:
            if given.live is not None and command == TRAINS and not viewed:
                viewed.append(record_view(LIVE, KEYS, Path(folder), env))

        viewed: list[str] = []
        try:
            given.out.write_text(record(COMMANDS, Path(folder), env, beside), encoding="utf-8")
            for picture in viewed:
                given.live.write_text(picture, encoding="utf-8")
        except Failed as failed:
            print(f"error: {failed}", file=sys.stderr)
            return 1
        finally:
            clean = ["delete", "inferenceservice/default", "--cascade", "--yes", "--grace", "1"]
            subprocess.run(["areal", *clean], env={**os.environ, **env}, capture_output=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
