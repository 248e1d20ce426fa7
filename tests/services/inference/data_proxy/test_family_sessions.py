"""Sessions of three questions over HTTP with every chat template of TRL's wheel, streamed and whole, with a reasoning
parser and without: one row exactly where the template writes what was sampled.

A data proxy in the test's own process serves each template; one scripted engine samples for all of them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from areal.conversation import Chat, ConversationError, normalise
from areal.services.http.process import bind, serve_options
from areal.services.http.server import HttpServer
from areal.services.inference.data_proxy.parsers.registry import detect_tool_format
from areal.services.inference.data_proxy.process import data_proxy
from areal.services.inference.data_proxy.tokenizer import load_codec
from areal.wire.processes import DataProxyConfig
from tests.conversation.families import Family, families
from tests.services.inference.data_proxy.test_conversations import TOOLS, Talk, user
from tests.services.processes import Process, Processes

MODELS = [name for name in families() if not name.endswith("_training")]
CALL = {"id": "callabc01", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
THOUGHT = "Hm, the rain."
PARSERS = {
    "deepseek": "deepseek_r1", "gptoss": "gpt_oss", "glm": "glm45", "gemma4": "gemma4", "diffusion": "gemma4",
    "muse": "muse_glimmer",
}  # others: qwen3  # fmt: skip


@pytest.fixture(scope="module")
def engine(module_processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Process:
    return module_processes.engine(families()["qwen3"].write_folder(tmp_path_factory.mktemp("engine")))


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    found = asyncio.new_event_loop()
    thread = threading.Thread(target=found.run_forever, name="data-proxies")
    thread.start()
    yield found
    found.call_soon_threadsafe(found.stop)
    thread.join()
    found.close()


@contextlib.contextmanager
def served(loop: asyncio.AbstractEventLoop, config: DataProxyConfig, engine: Process) -> Iterator[Process]:
    """Serve a model from another thread's loop while the block runs."""
    stack = contextlib.AsyncExitStack()

    async def begin() -> int:
        options = serve_options(config)
        service = await stack.enter_async_context(data_proxy(config, options))
        sock = bind(options.host, 0, reuse_port=False)
        await stack.enter_async_context(service.lifespan())
        server = HttpServer(service.answer)
        await server.listen(sock)
        stack.push_async_callback(server.cancel)
        return int(sock.getsockname()[1])

    try:
        yield replace(engine, port=asyncio.run_coroutine_threadsafe(begin(), loop).result(30))
    finally:
        asyncio.run_coroutine_threadsafe(stack.aclose(), loop).result(30)


def sampled_as(chat: Chat, prompt: str, known: list[dict[str, Any]], message: dict[str, Any], tools: Any) -> str:
    """The text of a response after this prompt, as the template writes it; where it does not, thought and content."""
    unthought = {name: value for name, value in message.items() if name != "reasoning_content"}
    whole = ""
    for form in (message, unthought):
        if not whole.startswith(prompt):
            with contextlib.suppress(ConversationError):
                whole = chat.template.plain(normalise([*known, form], tools))
    ends = [chat.decode([token]) for token in chat.turn_ends("tool_calls" in message)]
    if not whole.startswith(prompt):
        thought = f"{THOUGHT}\n</think>\n\n" if prompt.endswith("<think>\n") else ""
        return f"{thought}{message['content']}{min(ends)}"
    text = whole[len(prompt) :]
    found = [at + len(end) for end in ends if (at := text.find(end)) >= 0]
    return text[: min(found)] if found else text + min(ends)


def written(family: Family, chat: Chat, messages: list[dict[str, Any]], tools: Any) -> str:
    """The next prompt, by transformers."""
    held, tokenizer = normalise(messages, tools), cast(Any, family.tokenizer)
    shaped, schemas = chat.template.shaped(held), list(held.tools) or None
    return str(tokenizer.apply_chat_template(shaped, tools=schemas, add_generation_prompt=True, tokenize=False))


def without_empty_thoughts(text: str) -> str:
    """Where a thought was sampled in its place, it stays."""
    for thought in ("<think></think>", "<think>\n\n</think>\n\n", "<think>\n\n</think>"):
        text = text.replace(thought, "")
    return "".join(text.split())


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("parser", [True, False], ids=["reasoning parser", "no parser"])
@pytest.mark.parametrize("name", MODELS)
def test_session_is_one_row_where_template_keeps_sampled_text(
    loop: asyncio.AbstractEventLoop,
    module_processes: Processes,
    engine: Process,
    tmp_path: Path,
    name: str,
    parser: bool,
    streamed: bool,
) -> None:
    family = families()[name]
    folder = family.write_folder(tmp_path / "model")
    chat = load_codec(str(folder)).chat
    assert chat is not None
    reasoning = next((form for prefix, form in PARSERS.items() if name.startswith(prefix)), "qwen3")
    config = DataProxyConfig(
        model="tiny", engine="embedded", engine_url=engine.url, tokenizer_path=str(folder), port=0,
        state_dir=str(tmp_path / "state"), admin_key_file=str(module_processes.key_file),
        reasoning_parser=reasoning if parser else "none",
    )  # fmt: skip
    calls = family.takes_tools and detect_tool_format(family.source) is not None
    tools = TOOLS if calls else None
    answers = [
        {"role": "assistant", "content": text, "reasoning_content": THOUGHT} for text in ("Rain.", "Dry.", "So.")
    ]
    with served(loop, config, engine) as proxy:
        talk = Talk(family, engine, proxy, module_processes.key, streamed, {"tools": tools} if tools else {})
        full: list[dict[str, Any]] = []  # the conversation with what a client does not keep
        wanted: list[str] = []
        turns: list[list[int]] = []  # each prompt and its response
        asked: list[dict[str, Any]] = []

        def say(message: dict[str, Any], *before: dict[str, Any]) -> dict[str, Any]:
            asked.extend(before)
            full.extend(before)
            wanted.append(written(family, chat, full, tools))
            fresh = written(family, chat, [*talk.messages, *before], tools)
            text = sampled_as(chat, wanted[-1], full, message, tools)
            answer = talk.say(text, *before)
            prompt = talk.prompts()[-1]
            if turns and prompt[: len(turns[-1])] == turns[-1]:
                assert without_empty_thoughts(chat.decode(prompt)) == without_empty_thoughts(wanted[-1])
            else:
                assert chat.decode(prompt) == fresh
                assert not turns or not wanted[-1].startswith(chat.decode(turns[-1]))
            turns.append([*prompt, *family.letters(text)])
            full.append({**answer, **({} if parser else {"content": answer["content"]})})
            return answer

        for number, answer in enumerate(answers):
            question = user(f"Question {number}?")
            if number == 1 and calls:
                called = say({**answer, "content": "", "tool_calls": [CALL]}, question)
                (call,) = called["tool_calls"]
                assert call["function"]["name"] == "weather"
                question = {"role": "tool", "tool_call_id": call["id"], "name": "weather", "content": "rain"}
            say(answer, question)
        rows = talk.rows()
    ends = [
        turn
        for turn, after in zip(turns, [*turns[1:], None], strict=True)
        if after is None or after[: len(turn)] != turn
    ]
    assert sorted(rows) == sorted(ends)
