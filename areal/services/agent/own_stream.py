"""The text in an agent's own stream (``StreamResponse``), for the formats that can be parsed."""

from __future__ import annotations

import base64
import codecs
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from areal.http.events import EventReader, ServerEvent

_MOST_JSON = 4 * 1024 * 1024
_API_EVENTS = ("response.", "message_", "content_block_")


class OwnStreamText:
    """Extracts text from the events ``response`` and ``data`` of a turn (``areal.wire.agents``).

    Text is taken from the deltas of OpenAI's and Anthropic's APIs and from whole JSON answers of these APIs. The data
    of other server-sent events is text, one line each, and plain text is text itself. Others and errors have no text.
    """

    def __init__(self) -> None:
        self._kind = ""
        self._events = EventReader()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._json = b""
        self._lines = False  # a line of text was read: the next one is preceded by a newline

    def take(self, event: Mapping[str, Any]) -> str:
        """Return the text that the event adds."""
        if event["type"] == "response":
            fields = {name.lower(): value for name, value in event["headers"].items()}
            kind = str(fields.get("content-type", "")).partition(";")[0].strip().lower()
            self._kind = kind if event["status"] < 300 else ""
            return ""
        data = base64.b64decode(event["data"])
        if self._kind == "text/event-stream":
            try:
                return self._texts(self._events.feed(data))
            except ValueError:  # an event is too long: ignore it and everything after it
                self._kind = ""
                return ""
        if self._kind.startswith("text/"):
            return self._decoder.decode(data)
        if self._kind == "application/json":
            self._json += data
            if len(self._json) > _MOST_JSON:  # too long to be parsed as a whole
                self._kind, self._json = "", b""
        return ""

    def end(self) -> str:
        """Return the text that the end of the stream adds."""
        if self._kind == "text/event-stream":
            last = self._events.end()
            return self._texts([last] if last is not None else [])
        if not self._json:
            return self._decoder.decode(b"", final=True)
        text = _known_text(self._json)
        return self._json.decode(errors="replace") if text is None else text

    def _texts(self, events: Iterable[ServerEvent]) -> str:
        texts = []
        for event in events:
            if not event.data or event.data.strip() == b"[DONE]":
                continue
            text = _known_text(event.data)
            if text is None:
                text = ("\n" if self._lines else "") + event.data.decode(errors="replace")
                self._lines = True
            texts.append(text)
        return "".join(texts)


def _known_text(data: bytes) -> str | None:
    """Return the text in an event or a whole answer of OpenAI's or Anthropic's API, or None for anything else."""
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    match found:
        case {"choices": [{"delta": {"content": str(text)}}, *_]}:
            return text
        case {"choices": [{"message": {"content": str(text)}}, *_]}:
            return text
        case {"choices": [{"text": str(text)}, *_]}:
            return text
        case {"type": "response.output_text.delta", "delta": str(text)}:
            return text
        case {"type": "content_block_delta", "delta": {"text": str(text)}}:
            return text
        case {"object": "response", "output": list(items)}:
            return "".join(_texts(item.get("content")) for item in items if isinstance(item, dict))
        case {"type": "message", "content": list(parts)}:
            return _texts(parts)
        case {"choices": list()} | {"type": "ping" | "error"}:
            return ""
        case {"type": str(kind)} if kind.startswith(_API_EVENTS):
            return ""
    return None


def _texts(parts: object) -> str:
    found = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return "".join(text for text in found if isinstance(text, str))
