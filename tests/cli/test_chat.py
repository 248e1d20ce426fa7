"""A conversation when an answer is stopped, fails or ends. The real client is tested over a service."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from areal.cli.inf.chat import SETTINGS, ModelChat
from areal.client.http import ChatClient, ChatDelta, TokenLogprob
from areal.errors import ArealError, UsageFault
from tests.cli.conftest import Areal, serving


class Scripted(ChatClient):
    """Answers with the given pieces; an exception among them is raised in its place."""

    def __init__(self, *pieces: ChatDelta | BaseException) -> None:
        super().__init__("http://127.0.0.1:1")
        self.pieces = pieces
        self.asked: list[dict[str, Any]] = []
        self.closed = False

    @contextlib.contextmanager
    def stream(self, messages: Any, *, model: str | None = None, **fields: Any) -> Iterator[Iterator[ChatDelta]]:
        self.asked.append({"messages": list(messages), "model": model, **fields})
        try:
            yield self._pieces()
        finally:
            self.closed = True

    def complete(self, messages: Any, *, model: str | None = None, **fields: Any) -> ChatDelta:
        return ChatDelta(
            "".join(piece.text for piece in self.pieces if isinstance(piece, ChatDelta)), finish_reason="stop"
        )

    def _pieces(self) -> Iterator[ChatDelta]:
        for piece in self.pieces:
            if isinstance(piece, BaseException):
                raise piece
            yield piece


def test_answer_is_printed_as_it_arrives_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    talk = ModelChat(Scripted(ChatDelta("one "), ChatDelta("two", finish_reason="stop")), {"model": "m"})
    answer = talk.ask("hello", show=True)
    assert capsys.readouterr().out == "one two\n"
    assert answer.finish_reason == "stop"
    assert talk.messages == [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "one two"}]


def test_ctrl_c_keeps_partial_answer_and_closes_connection() -> None:
    client = Scripted(ChatDelta("one "), KeyboardInterrupt(), ChatDelta("two"))
    talk = ModelChat(client)
    answer = talk.ask("hello", show=False)
    assert answer.stopped and answer.text == "one "
    assert client.closed
    assert talk.messages[-1] == {"role": "assistant", "content": "one "}


def test_failed_question_is_removed_from_conversation() -> None:
    client = Scripted(ChatDelta("one "), ArealError("cut"))
    talk = ModelChat(client)
    with pytest.raises(ArealError):
        talk.ask("hello", show=False)
    assert talk.messages == [] and client.closed


def test_system_prompt_goes_first_and_settings_are_sent() -> None:
    client = Scripted(ChatDelta("x"))
    talk = ModelChat(client)
    talk.set("system", "be brief")
    talk.set("temperature", "0.5")
    talk.set("max_tokens", "7")
    talk.set("logprobs", "on")
    talk.ask("hello", show=False)
    asked = client.asked[0]
    assert asked["messages"][0] == {"role": "system", "content": "be brief"}
    assert (asked["temperature"], asked["max_tokens"], asked["logprobs"], asked["seed"]) == (0.5, 7, True, None)
    assert talk.messages[0]["role"] == "user"


def test_stream_off_requests_whole_answer() -> None:
    talk = ModelChat(Scripted(ChatDelta("a"), ChatDelta("b")))
    talk.set("stream", "off")
    assert talk.ask("hello", show=False).text == "ab"


def test_logprobs_are_shown_and_documented(capsys: pytest.CaptureFixture[str]) -> None:
    talk = ModelChat(Scripted(ChatDelta("a", (TokenLogprob("a", -0.25),), "stop", {"totalTokens": 2})))
    answer = talk.ask("hello", show=True)
    assert '"a"' in capsys.readouterr().out
    assert answer.document("m")["logprobs"] == [{"token": "a", "logprob": -0.25}]
    assert answer.document("m")["usage"] == {"totalTokens": 2}


@pytest.mark.parametrize(
    ("name", "text"), [("temperatur", "1"), ("top_k", "1.5"), ("stream", "yes"), ("seed", "x"), ("top_p", "nan")]
)
def test_rejects_unknown_setting_or_value(name: str, text: str) -> None:
    talk = ModelChat(Scripted())
    with pytest.raises(UsageFault):
        talk.set(name, text)
    assert talk.settings == {}


def test_setting_without_a_value_is_unset() -> None:
    talk = ModelChat(Scripted(), {"seed": 1})
    talk.set("seed", "")
    assert talk.settings == {}
    assert "seed" in SETTINGS


def test_saved_conversation_loads_unchanged(tmp_path: Path) -> None:
    talk = ModelChat(Scripted(ChatDelta("x")), {"temperature": 0.0})
    talk.ask("hello", show=False)
    talk.save(str(tmp_path / "talk.json"))
    other = ModelChat(Scripted(), {"model": "m", "temperature": 1.0})
    other.load(str(tmp_path / "talk.json"))
    assert other.messages == talk.messages
    assert other.settings == {"model": "m", "temperature": 0.0}


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", json.dumps({"format": "areal-chat/1", "messages": [{}], "settings": {}})]
)
def test_loading_invalid_conversation_changes_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "talk.json").write_text(text)
    talk = ModelChat(Scripted(), {"seed": 1}, [{"role": "user", "content": "kept"}])
    with pytest.raises(ArealError):
        talk.load(str(tmp_path / "talk.json"))
    with pytest.raises(ArealError):
        talk.load(str(tmp_path / "none.json"))
    assert (talk.settings, talk.messages) == ({"seed": 1}, [{"role": "user", "content": "kept"}])


@pytest.mark.parametrize(
    ("words", "body", "content_type"),
    [
        ("inf chat", b"<html>welcome</html>", "text/html"),
        ("inf chat", b"data: <html>\n\n", "text/event-stream"),
        ("inf chat", b"data: [1]\n\n", "text/event-stream"),
        ("inf chat", b'data: {"choices": [{}]}\n\n', "text/event-stream; charset=utf-8"),
        ("inf chat --no-stream", b"<html>welcome</html>", "text/html"),
        ("inf chat --no-stream", b"[]", "application/json"),
        ("inf chat --no-stream", b'{"choices": []}', "application/json"),
    ],
)
def test_malformed_answer_of_other_server_names_it(
    words: str, body: bytes, content_type: str, areal: Areal, tmp_path: Path
) -> None:
    found = _chat_with(areal, tmp_path, words, 200, body, content_type)
    assert (found.code, found.out) == (1, "")
    assert "answered 200, and the body has another form than a gateway's" in found.err


@pytest.mark.parametrize("error", ["model not found", None, ["model not found"]])
def test_error_of_other_server_shows_status_and_body(error: Any, areal: Areal, tmp_path: Path) -> None:
    body = json.dumps({"error": error}).encode()
    found = _chat_with(areal, tmp_path, "inf chat", 404, body, "application/json")
    assert (found.code, found.out) == (1, "")
    assert f"answered 404: {body.decode()}" in found.err


def _chat_with(areal: Areal, folder: Path, words: str, status: int, body: bytes, content_type: str) -> Any:
    """A message to a server that answers so."""

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    key = folder / "key"
    key.write_text("k" * 32)
    with serving(Answer) as url:
        return areal(*words.split(), "--gateway", url, "--api-key-file", str(key), "--model", "m", "-m", "hello")


def test_html_error_of_other_server_shows_status_in_one_line(areal: Areal) -> None:
    class Pages(BaseHTTPRequestHandler):  # answers a POST with 501 and a page of HTML
        def log_message(self, *args: object) -> None:
            pass

    with serving(Pages) as url:
        found = areal("inf", "chat", "--gateway", url, "--model", "m", "-m", "hello")
    line = f"error: {url} answered 501: Unsupported method ('POST')\n  hint: is it the address of a gateway?\n"
    assert (found.code, found.out, found.err) == (1, "", line)
