"""Keeping what an external model answers, while its bytes go through: recorded before the last of them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from areal.services.inference.data_proxy.transcript import Transcript, chunks_of, recorded_completion, text_samples
from areal.services.inference.data_proxy.visits import Answer, Visit
from areal.services.inference.recording.values import Turn
from areal.services.web.errors import bad_request
from areal.services.web.server import AnyResponse, Request, StreamResponse
from areal.services.web.service import json_response

CHAT_PATH = "/chat/completions"
_DONE = b"data: [DONE]"


class Heard:
    """One answer as it passes. ``held``: its last event, which waits for the record."""

    def __init__(self, visit: Visit, model: str, messages: Sequence[Mapping[str, Any]], answer_id: str | None) -> None:
        self._visit = visit
        self._model = model
        self._messages = messages
        self._answer_id = answer_id
        self._transcript = Transcript()
        self.held = b""

    def events(self, part: bytes) -> bytes:
        """What of these whole events may be said now."""
        if self.held or _DONE in part:
            before, _, after = (b"", b"", part) if self.held else part.partition(_DONE)
            self.held += after if self.held else _DONE + after
            part = before
        for line in part.splitlines():
            if line.startswith(b"data:"):
                with contextlib.suppress(orjson.JSONDecodeError):
                    self.data(orjson.loads(line[5:]), whole=False)
        return part

    def data(self, data: Mapping[str, Any], *, whole: bool) -> None:
        if isinstance(data, Mapping):
            (self._transcript.whole if whole else self._transcript.chunk)(data)

    async def answer(self, status: int, body: bytes) -> None:
        """A whole answer."""
        if status != 200:
            if status >= 500:
                await self._visit.failed("engine_failed")
            return
        with contextlib.suppress(orjson.JSONDecodeError):
            self.data(orjson.loads(body), whole=True)
        await self.end()

    async def end(self) -> None:
        """Raises ApiError 507 where the answer cannot be kept. One that broke off is a failure of the API's."""
        completion = self._transcript.completion()
        if completion is None:
            await self._visit.failed("engine_failed")
            return
        conversation = self._visit.goes_on(self._messages)
        answer_id = self._answer_id or str(completion.get("id") or self._visit.answer_id("chatcmpl-"))
        created = completion.get("created")
        answer = Answer(
            answer_id=answer_id,
            model=self._model,
            created=created if isinstance(created, int) else 0,
            samples=text_samples(completion, self._messages, conversation),
        )
        await self._visit.record(answer)


class NotHeard(Heard):
    """Nothing of it is kept."""

    def __init__(self) -> None:
        self.held = b""

    def events(self, part: bytes) -> bytes:
        return part

    def data(self, data: Mapping[str, Any], *, whole: bool) -> None:
        return None

    async def answer(self, status: int, body: bytes) -> None:
        return None

    async def end(self) -> None:
        return None


def hearing(visit: Visit, model: str, path: str, data: Mapping[str, Any], answer_id: str | None = None) -> Heard:
    """Raises 400 for a call of a session that could not be recorded."""
    if not visit.keeps(data.get("store") is not False):
        return NotHeard()
    messages = data.get("messages")
    if path != CHAT_PATH:
        prompt = data.get("prompt")
        if not isinstance(prompt, str) and not visit.of_a_session:
            return NotHeard()
        if not isinstance(prompt, str):
            raise bad_request("a session's completion needs one prompt, as text", param="prompt")
        messages = [{"role": "user", "content": prompt}]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return NotHeard()  # the API says what is wrong with it
    return Heard(visit, model, messages, answer_id)


async def say_again(request: Request, turns: Sequence[Turn], *, stream: bool) -> AnyResponse:
    completion = recorded_completion(turns)
    if not stream:
        return json_response(completion)
    out = StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await out.prepare(request)
    await out.write(b"".join(chunks_of(completion)))
    return out
