"""The standard-library clients against a real server process, and what they import."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal.client.gateway import GatewayClient, NoResponse, ServiceClient
from areal.client.http import ChatClient
from areal.errors import ArealError, NotFound, TimedOut
from tests.services.inference.running_service import Service, build_service
from tests.services.processes import Processes, engine_calls, release, script
from tests.services.tokenizer_folder import write_tokenizer

USER = [{"role": "user", "content": "Hello"}]
ANSWER = "Hello there, friend!"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    processes = Processes(tmp_path_factory.mktemp("client"))
    yield build_service(processes, write_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    processes.stop()


@pytest.fixture
def service(running: Service) -> Service:
    script(running.engine, reset=True)
    return running


@pytest.fixture
def chat(service: Service) -> ChatClient:
    return ChatClient(service.gateway.url, service.key, timeout_s=30)


def test_chat_streams_pieces_and_finish_reason(chat: ChatClient, service: Service) -> None:
    script(service.engine, gate=2)
    with chat.stream(USER, model="tiny", stream_options={"include_usage": True}) as stream:
        first = next(piece for piece in stream if piece.text)
        release(service.engine)
        pieces = [first, *stream]
    assert "".join(piece.text for piece in pieces) == ANSWER
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["stop"]
    usage = pieces[-1].usage
    assert usage is not None and usage["completion_tokens"] > 0


def test_chat_streams_logprobs(chat: ChatClient) -> None:
    with chat.stream(USER, logprobs=True) as stream:
        entries = [entry for piece in stream for entry in piece.logprobs]
    assert "".join(entry.token for entry in entries[:-1]) == ANSWER
    assert all(entry.logprob < 0 for entry in entries)


def test_whole_chat_is_one_piece(chat: ChatClient, service: Service) -> None:
    piece = chat.complete(USER, temperature=0.5, max_tokens=None)
    assert (piece.text, piece.finish_reason) == (ANSWER, "stop") and piece.usage
    assert service.engine_saw()["sampling"]["temperature"] == 0.5


def test_abandoned_chat_cancels_generation(chat: ChatClient, service: Service) -> None:
    script(service.engine, gate=2)
    with chat.stream(USER) as stream:
        next(stream)
    assert engine_calls(service.engine, until="cancelled")


def test_chat_lists_models(chat: ChatClient) -> None:
    assert chat.models() == ["tiny"]


def test_chat_with_an_unknown_model_is_not_found(chat: ChatClient) -> None:
    with pytest.raises(NotFound, match="nope"), chat.stream(USER, model="nope") as stream:
        next(stream)


def test_chat_with_wrong_key_fails_without_printing_key(service: Service) -> None:
    with pytest.raises(ArealError) as caught:
        ChatClient(service.gateway.url, "wrong-key").complete(USER)
    assert "key" in (caught.value.hint or "") and "wrong-key" not in str(caught.value)


def test_chat_error_in_the_stream_is_raised(chat: ChatClient, service: Service) -> None:
    script(service.engine, error_after=2)
    with pytest.raises(ArealError, match="scripted error line"), chat.stream(USER) as stream:
        list(stream)


def test_silent_chat_times_out(service: Service) -> None:
    script(service.engine, gate=0)
    with pytest.raises(TimedOut):
        ChatClient(service.gateway.url, service.key, timeout_s=0.3).complete(USER)


def test_chat_without_a_listener_names_the_address() -> None:
    with pytest.raises(ArealError, match=r"127\.0\.0\.1:9"):
        ChatClient("http://127.0.0.1:9").complete(USER)


def test_chat_with_other_server_shows_its_answer(service: Service) -> None:
    with pytest.raises(ArealError, match="no such path"):
        ChatClient(service.router.url, service.key).complete(USER)


def test_service_client_returns_status_and_body(service: Service) -> None:
    client = ServiceClient(service.router.url, service.key)
    status, body = client.ask("GET", "/workers")
    assert status == 200 and body["workers"][0]["model"] == "tiny"
    assert client.ask("POST", "/drain", {"worker_id": "absent"})[0] == 404
    assert ServiceClient(service.router.url).ask("GET", "/workers")[0] == 401


def test_service_client_keeps_base_path_and_hides_key(service: Service) -> None:
    client = ServiceClient(service.gateway.url + "/v1", service.key)
    assert client.ask("GET", "/models")[1]["models"] == ["tiny"]
    assert service.key not in repr(client)


@pytest.mark.parametrize(
    ("client", "message"),
    [
        (ServiceClient, "cannot reach http://127.0.0.1:9: [Errno 111] Connection refused"),
        (GatewayClient, "cannot reach the gateway http://127.0.0.1:9: [Errno 111] Connection refused"),
    ],
)
def test_call_without_a_listener_raises_its_reason(client: type[ServiceClient], message: str) -> None:
    with pytest.raises(NoResponse) as caught:
        client("http://127.0.0.1:9", timeout_s=2).ask("GET", "/workers")
    assert caught.value.message == message and not caught.value.is_late
    assert caught.value.why == "[Errno 111] Connection refused"


@pytest.mark.parametrize(
    ("answer", "why", "is_late"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", "IncompleteRead(1 bytes read, 8 more expected)", False),
        (b"SSH-2.0\r\n", "SSH-2.0", False),
        (b"", "Remote end closed connection without response", False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n", "timed out", True),
    ],
)
def test_call_without_a_whole_response_raises_its_reason(answer: bytes, why: str, is_late: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_answer_once, args=(server, answer, is_late), daemon=True).start()
        with pytest.raises(NoResponse) as caught:
            ServiceClient(f"http://127.0.0.1:{server.getsockname()[1]}", timeout_s=0.5).ask("GET", "/workers")
    assert (caught.value.why, caught.value.is_late) == (why, is_late)


def _answer_once(server: socket.socket, answer: bytes, stays: bool) -> None:
    peer = server.accept()[0]
    with peer:
        peer.recv(1 << 16)
        peer.sendall(answer)
        peer.recv(1 if stays else 0)


def test_clients_import_only_standard_library() -> None:
    code = (
        "import sys; import areal.client.http, areal.client.gateway;"
        "heavy = ('pydantic','aiohttp','httptools','httpx','yaml','torch','orjson');"
        "print([n for n in sys.modules if n.split('.')[0] in heavy])"
    )
    root = str(Path(__file__).parents[2])
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert found.stdout.strip() == "[]"
