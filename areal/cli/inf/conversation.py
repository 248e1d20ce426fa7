"""A conversation with a model: what was said, with which settings, and how an answer reaches the terminal."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.cli.output.emit import write
from areal.cli.output.table import Column, render_table
from areal.errors import ArealError, UsageFault

if TYPE_CHECKING:
    from areal.client.chat import ChatClient, Piece, TokenLogprob

_NUMBERS = {
    "temperature": float,
    "top_p": float,
    "min_p": float,
    "top_k": int,
    "max_tokens": int,
    "seed": int,
    "presence_penalty": float,
    "frequency_penalty": float,
}
_SWITCHES = ("stream", "logprobs")
SETTINGS = ("system", "model", "stop", *_NUMBERS, *_SWITCHES)
_FORMAT = "areal-chat/1"

_LOGPROBS = (
    Column("TOKEN", lambda row: json.dumps(row["token"], ensure_ascii=False)),
    Column("LOGPROB", lambda row: f"{row['logprob']:.4f}", right=True),
)


@dataclass
class Answer:
    """What came back; ``stopped`` when the user ended it."""

    text: str = ""
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    usage: Mapping[str, int] | None = None
    stopped: bool = False

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.logprobs.extend(piece.logprobs)
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.usage = piece.usage or self.usage

    def document(self, model: str | None) -> dict[str, Any]:
        return {
            "model": model,
            "message": {"role": "assistant", "content": self.text},
            "finishReason": self.finish_reason,
            "usage": dict(self.usage) if self.usage else None,
            "logprobs": self.tokens or None,
        }

    @property
    def tokens(self) -> list[dict[str, Any]]:
        return [{"token": item.token, "logprob": item.logprob} for item in self.logprobs]


@dataclass
class Conversation:
    """``settings`` hold what was set; what was not is the server's to choose."""

    client: ChatClient
    settings: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)

    @property
    def model(self) -> str | None:
        return self.settings.get("model")

    def ask(self, text: str, *, show: bool) -> Answer:
        """Say ``text`` and take the answer, printing it while it comes when ``show``. A question that failed was never
        asked; an answer that Ctrl-C stopped stays as far as it came."""
        self.messages.append({"role": "user", "content": text})
        answer = Answer()
        try:
            with contextlib.closing(self._pieces()) as pieces:
                for piece in pieces:
                    answer.add(piece)
                    if show:
                        sys.stdout.write(piece.text)
                        sys.stdout.flush()
        except KeyboardInterrupt:
            answer.stopped = True
        except BaseException:
            self.messages.pop()
            raise
        self.messages.append({"role": "assistant", "content": answer.text})
        if show:
            _end(answer)
        return answer

    def _pieces(self) -> Generator[Piece]:
        system = self.settings.get("system")
        messages = [{"role": "system", "content": system}, *self.messages] if system else self.messages
        fields = {name: self.settings.get(name) for name in (*_NUMBERS, "stop")}
        fields["logprobs"] = True if self.settings.get("logprobs") else None
        if not self.settings.get("stream", True):
            yield self.client.complete(messages, model=self.model, **fields)
            return
        with self.client.stream(messages, model=self.model, **fields) as pieces:
            yield from pieces

    def set(self, name: str, text: str) -> None:
        """Raises UsageFault for a setting or a value that does not exist. An empty text unsets."""
        if name not in SETTINGS:
            from areal.resources.suggest import did_you_mean

            raise UsageFault(
                f'no setting "{name}"{did_you_mean(name, SETTINGS)}', hint=f"settings: {', '.join(SETTINGS)}"
            )
        if not text:
            self.settings.pop(name, None)
        elif name in _SWITCHES:
            if text not in ("on", "off"):
                raise UsageFault(f"{name} is on or off")
            self.settings[name] = text == "on"
        elif name in _NUMBERS:
            try:
                self.settings[name] = _NUMBERS[name](text)
            except ValueError:
                raise UsageFault(f"{name} is a number, not {text!r}") from None
        else:
            self.settings[name] = text

    def save(self, path: str) -> None:
        from areal.state.files import write_atomic

        document = {"format": _FORMAT, "settings": self.settings, "messages": self.messages}
        write_atomic(_absolute(path), json.dumps(document, indent=2, ensure_ascii=False) + "\n")

    def load(self, path: str) -> None:
        """Raises ArealError, and changes nothing, when the file holds no conversation."""
        try:
            document = json.loads(_absolute(path).read_text("utf-8"))
            assert document["format"] == _FORMAT
            messages = [{"role": str(m["role"]), "content": str(m["content"])} for m in document["messages"]]
            settings = {name: document["settings"][name] for name in SETTINGS if name in document["settings"]}
        except OSError as error:
            raise ArealError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AssertionError) as error:
            raise ArealError(f"{path} holds no conversation saved by /save") from error
        self.messages, self.settings = messages, {**self.settings, **settings}


def _absolute(path: str) -> Path:
    return Path(path).expanduser().absolute()


def _end(answer: Answer) -> None:
    """After the last token: a line's end, and the logprobs when they were asked for."""
    write("\n" if not answer.text.endswith("\n") else "")
    if answer.logprobs:
        write(render_table(answer.tokens, _LOGPROBS))
    sys.stdout.flush()
