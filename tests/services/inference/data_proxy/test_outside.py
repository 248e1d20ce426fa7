"""An external API's connections: to addresses that were judged and nowhere else; what is sent there, what is not."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from areal.resources.addresses import parse_external_url
from areal.services.inference.engines.base import Dialect
from areal.services.inference.engines.external import ANTHROPIC_VERSION, ExternalApi, Redirected, open_checked_session
from tests.services.inference.running_service import CHAT, in_thread
from tests.services.processes import Answer, Process, Processes
from tests.services.scripted_api import ScriptedApi, scripted_api

CHATTED = (200, {"choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}]})


class Names:
    """A name server: what ``getaddrinfo`` says of any name but localhost."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: list[str] = []
        self.asked: list[str] = []
        self._real: Any = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._lookup)

    def _lookup(self, host: Any, port: Any, *rest: Any, **more: Any) -> Any:
        if not str(host).endswith(".example"):
            return self._real(host, port, *rest, **more)
        self.asked.append(str(host))
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in self.addresses]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    return Names(monkeypatch)


async def ask(api: ScriptedApi, *, allow_private: bool) -> int:
    url = parse_external_url(api.url.replace("127.0.0.1", "api.example"), allow_private=allow_private)
    async with open_checked_session(url, allow_private=allow_private) as http:
        async with ExternalApi(http, url, "theirs", "secret").post("/chat/completions", {}, "r", 5.0) as answer:
            return answer.status


async def test_name_resolving_to_private_address_is_not_followed(names: Names) -> None:
    async with scripted_api() as api:
        for addresses in (["127.0.0.1"], ["10.0.0.1"], ["8.8.8.8", "127.0.0.1"]):  # one bad one spoils the answer
            names.addresses = addresses
            with pytest.raises(aiohttp.ClientConnectorError, match="allowPrivate"):
                await ask(api, allow_private=False)
        assert api.got == []


async def test_connection_uses_the_checked_address(names: Names) -> None:
    async with scripted_api() as api:
        api.replies["POST /v1/chat/completions"] = CHATTED
        names.addresses = ["127.0.0.1"]
        assert await ask(api, allow_private=True) == 200
        assert names.asked == ["api.example"]  # once, for the one connection
        assert api.got[0][2]["Host"].startswith("api.example")
        names.addresses = ["169.254.169.254"]  # the name means something else now
        with pytest.raises(aiohttp.ClientConnectorError, match="metadata"):
            await ask(api, allow_private=True)


async def test_redirect_is_a_failure_and_is_not_followed() -> None:
    async with scripted_api() as api:
        api.replies["POST /v1/chat/completions"] = (307, {})
        url = parse_external_url(api.url)
        async with open_checked_session(url, allow_private=False) as http:
            with pytest.raises(Redirected):
                async with ExternalApi(http, url, "theirs", "secret").post("/chat/completions", {}, "r", 5.0):
                    pass
        assert [route for route, _, _ in api.got] == ["POST /v1/chat/completions"]


async def test_anthropic_key_and_version_use_anthropic_headers() -> None:
    async with scripted_api() as api:
        api.replies["POST /v1/messages"] = (200, {})
        url = parse_external_url(api.url)
        async with open_checked_session(url, allow_private=False) as http:
            external = ExternalApi(http, url, "theirs", "secret", Dialect.ANTHROPIC)
            async with external.post("/messages", {"model": "ours"}, "r", 5.0):
                pass
            async with external.post("/messages", {}, "r", 5.0, {"anthropic-version": "2030-01-01"}):
                pass
        headers = [each for _, _, each in api.got]
        assert [each["anthropic-version"] for each in headers] == [ANTHROPIC_VERSION, "2030-01-01"]
        assert all(each["x-api-key"] == "secret" and "Authorization" not in each for each in headers)
        assert api.bodies("POST /v1/messages")[0] == {"model": "theirs"}


async def proxy_before(processes: Processes, api: ScriptedApi) -> Process:
    argv = ("--model", "friend", "--engine", "external", "--engine-url", api.url, "--provider-model", "theirs")
    return await in_thread(processes.service, "data_proxy", *argv, env={"AREAL_PROVIDER_API_KEY": "secret"})


IMAGE = "data:image/png;base64,aGk="
SEEN = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": IMAGE}}]
_SOURCE = {"type": "base64", "media_type": "image/png", "data": "aGk="}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": SEEN}]}),
        (
            "/v1/messages",
            {
                "max_tokens": 5,
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "What is it?"}, {"type": "image", "source": _SOURCE}],
                    }
                ],
            },
        ),
        (
            "/v1/responses",
            {
                "input": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "input_text", "text": "What is it?"},
                            {"type": "input_image", "image_url": IMAGE},
                        ],
                    }
                ]
            },
        ),
    ],
    ids=["chat", "messages", "responses"],
)
async def test_images_reach_external_model_without_our_key(
    processes: Processes, path: str, body: dict[str, Any]
) -> None:
    async with scripted_api() as api:
        api.replies["POST /v1/chat/completions"] = CHATTED
        proxy = await proxy_before(processes, api)
        answer: Answer = await in_thread(proxy.call, "POST", path, {"model": "friend", **body}, key=processes.key)
        assert answer.status == 200, answer.body
        (sent,) = api.bodies("POST /v1/chat/completions")
        assert sent["messages"] == [{"role": "user", "content": SEEN}] and sent["model"] == "theirs"
        ((_, _, headers),) = [each for each in api.got if each[0] == "POST /v1/chat/completions"]
        assert headers["Authorization"] == "Bearer secret"
        assert processes.key not in str(headers)


async def test_redirecting_api_is_502_with_advice(processes: Processes) -> None:
    async with scripted_api() as api:
        api.replies["POST /v1/chat/completions"] = (308, {})
        proxy = await proxy_before(processes, api)
        body = {"messages": [{"role": "user", "content": "a"}]}
        answer: Answer = await in_thread(proxy.call, "POST", CHAT, body, key=processes.key)
        assert answer.status == 502 and "redirects" in answer.json()["error"]["message"]


@pytest.mark.parametrize("url", ["http://10.0.0.1/v1", "http://169.254.169.254"])
def test_data_proxy_exits_on_refused_address(processes: Processes, url: str) -> None:
    argv = ("--model", "friend", "--engine", "external", "--engine-url", url)
    process = processes.spawn("-m", "areal.services.inference.data_proxy", "--port", "0", *argv)
    assert process.wait() != 0
    process.wait_log("address")


def test_rejects_key_file_with_more_than_a_key(processes: Processes, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("one\ntwo")
    argv = (
        "--model",
        "m",
        "--engine",
        "external",
        "--engine-url",
        "http://localhost:9",
        "--provider-key-file",
        str(file),
    )
    process = processes.spawn("-m", "areal.services.inference.data_proxy", "--port", "0", *argv)
    assert process.wait() != 0
    process.wait_log("more than a key")
