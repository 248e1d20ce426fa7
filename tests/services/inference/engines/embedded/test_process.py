"""The engine as a process: its HTTP contract, its start and its end."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from .process import EXAMPLE, PROMPT, Client, EngineProcess
from .support import make_model

EOS = 2
LONG: dict[str, Any] = {"max_new_tokens": 110, "ignore_eos": True}


@pytest.fixture(scope="module")
def process() -> Iterator[EngineProcess]:
    started = EngineProcess().wait_ready()
    yield started
    started.kill()


@pytest.fixture
async def client(process: EngineProcess) -> AsyncIterator[Client]:
    async with Client(process.url) as opened:
        yield opened


def scaled(tmp_path: Path, factor: float) -> Path:
    """The example with another head: another distribution."""
    folder = tmp_path / f"scaled-{factor}"
    shutil.copytree(EXAMPLE, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] *= factor
    save_file(tensors, folder / "model.safetensors")
    return folder


async def lines(response: Any) -> list[dict[str, Any]]:
    return [json.loads(line) async for line in response.content]


async def test_generate_without_stream_returns_choices(client: Client) -> None:
    status, body = await client.post(
        "/generate", {"input_ids": PROMPT, "sampling": {"n": 3, "seed": 1, "top_logprobs": 2}}
    )
    assert (status, body["prompt_tokens"]) == (200, len(PROMPT))
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    for choice in body["choices"]:
        count = len(choice["token_ids"])
        assert len(choice["logprobs"]) == len(choice["versions"]) == len(choice["top_logprobs"]) == count
        assert (choice["finish_reason"], choice["stop_token_id"], choice["token_ids"][-1]) == ("stop", EOS, EOS)


async def test_slow_constraint_build_does_not_block_other_calls(client: Client) -> None:
    pytest.importorskip("llguidance")
    choice = [f"{number * 7919 % 1_000_000:06d}=" for number in range(60_000)]
    body = {
        "input_ids": PROMPT,
        "sampling": {"max_new_tokens": 4},
        "response_format": {"type": "choice", "choice": choice},
    }
    asked = asyncio.create_task(client.post("/generate", body), name="constrained")
    calls = 0
    while not asked.done():
        assert (await client.get("/stats"))[0] == 200
        calls += not asked.done()
    status, answer = asked.result()
    assert status == 200 and answer["choices"][0]["token_ids"], answer
    assert calls > 10  # in the one to two seconds that it takes


async def test_batched_generate_matches_single_prompts(client: Client) -> None:
    sampling = {"n": 2, "seed": 1, **LONG}
    prompts = [PROMPT, PROMPT[:-1], PROMPT]
    status, body = await client.post("/generate", {"input_ids": prompts, "sampling": sampling})
    assert (status, body["prompt_tokens"]) == (200, sum(map(len, prompts)))
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    for number, prompt in enumerate(prompts):
        _, alone = await client.post("/generate", {"input_ids": prompt, "sampling": sampling})
        mine = body["choices"][2 * number : 2 * number + 2]
        assert [each["token_ids"] for each in mine] == [each["token_ids"] for each in alone["choices"]]


async def test_batched_generate_with_one_bad_prompt_is_refused(client: Client) -> None:
    status, body = await client.post("/generate", {"input_ids": [PROMPT, [10**8]], "sampling": LONG})
    assert (status, body["error"]["param"]) == (400, "input_ids")


@pytest.mark.parametrize("prompt", [5, [], [10**8], [PROMPT], None])
async def test_score_rejects_invalid_prompt(client: Client, prompt: object) -> None:
    status, body = await client.post("/score", {"input_ids": prompt})
    assert (status, body["error"]["param"]) == (400, "input_ids")


async def test_streamed_generate_returns_same_tokens_in_lines(client: Client) -> None:
    body = {"input_ids": PROMPT, "sampling": {"n": 2, "seed": 1, **LONG}, "stream": True}
    async with client.http.post("/generate", json=body) as response:
        assert response.content_type == "application/x-ndjson"
        received = await lines(response)
    whole = await client.generate(n=2, seed=1, **LONG)
    for choice in whole:
        own = [line for line in received if line["index"] == choice["index"]]
        assert [token for line in own for token in line["token_ids"]] == choice["token_ids"]
        assert [line["finish_reason"] for line in own] == [None] * (len(own) - 1) + ["length"]


async def test_same_seed_repeats_answer_under_load(client: Client) -> None:
    alone = await client.generate(seed=9, **LONG)
    crowd = await asyncio.gather(*(client.generate(seed=seed, **LONG) for seed in range(12)))
    assert crowd[9][0]["token_ids"] == alone[0]["token_ids"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [1, 99]}, "99"),
        ({"input_ids": [1, -1]}, "-1"),
        ({"input_ids": [1, True]}, "True"),
        ({"input_ids": [1] * 128}, "room for 128"),
        ({"input_ids": PROMPT, "sampling": {"temperature": -1}}, "temperature"),
        ({"input_ids": PROMPT, "sampling": []}, "sampling"),
        ({"input_ids": PROMPT, "sampling": {"beams": 2}}, "beams"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_bad_generate_request_is_400_with_reason(client: Client, body: dict[str, Any], message: str) -> None:
    status, answer = await client.post("/generate", body)
    assert status == 400
    assert message in answer["error"]["message"]
    assert answer["error"]["request_id"]


async def test_generate_beyond_context_ends_with_length(client: Client) -> None:
    (choice,) = await client.generate(ignore_eos=True, max_new_tokens=100_000)
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (128 - len(PROMPT), "length")


async def test_abort_of_running_request_returns_its_tokens(client: Client) -> None:
    await client.post("/pause")
    body = {"input_ids": PROMPT, "sampling": LONG, "request_id": "mine"}
    running = asyncio.create_task(client.post("/generate", body))
    await client.wait_stats(waiting=1)
    again = await client.post("/generate", body)
    aborted = await client.post("/abort", {"request_id": "mine"})
    await client.post("/resume")
    status, answer = await running
    assert again[0] == 409
    assert aborted == (200, {"aborted": True})
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "abort")
    assert await client.post("/abort", {"request_id": "mine"}) == (200, {"aborted": False})


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnected_client_frees_its_row(client: Client, stream: bool) -> None:
    await client.post("/pause")
    body = {"input_ids": PROMPT, "sampling": LONG, "stream": stream}
    leaving = asyncio.create_task(client.post("/generate", body))
    await client.wait_stats(waiting=1)
    leaving.cancel()
    await client.wait_stats(waiting=0, running=0)
    await client.post("/resume")


@pytest.mark.extended
async def test_pause_returns_after_last_token_of_open_streams(tmp_path: Path) -> None:
    """1,000 tokens take long enough for a pause to come in between."""
    make_model(tmp_path / "old", seed=1, max_position_embeddings=2048)
    make_model(tmp_path / "new", seed=2, max_position_embeddings=2048)
    body = {"input_ids": PROMPT, "sampling": {"max_new_tokens": 1000, "ignore_eos": True}, "stream": True}
    received: list[list[int]] = [[] for _ in range(6)]

    async def follow(client: Client, into: list[int]) -> None:
        async with client.http.post("/generate", json=body) as response:
            async for line in response.content:
                into.extend(json.loads(line)["versions"])

    process = EngineProcess(model=tmp_path / "old").wait_ready()
    try:
        async with Client(process.url) as client:
            following = [asyncio.create_task(follow(client, into)) for into in received]
            await client.wait_stats(running=6)
            assert (await client.post("/pause"))[0] == 200
            frozen = (await client.get("/stats"))[1]["generated_tokens"]
            status, answer = await client.post("/load_weights", {"path": str(tmp_path / "new"), "version": 7})
            assert (status, answer["version"]) == (200, 7)
            assert (await client.get("/stats"))[1]["generated_tokens"] == frozen
            assert sum(map(len, received)) == frozen  # all that there was is with the clients
            await client.post("/resume")
            await asyncio.gather(*following)
    finally:
        process.kill()
    for versions in received:
        assert versions == sorted(versions)
        assert (len(versions), set(versions)) == (1000, {0, 7})


async def test_load_weights_changes_served_model_and_back(client: Client, tmp_path: Path) -> None:
    before = await client.generate(temperature=0)
    status, answer = await client.post("/load_weights", {"path": str(scaled(tmp_path, 0.5)), "version": 2})
    assert (status, answer) == (200, {"status": "ok", "version": 2})
    after = await client.generate(temperature=0)
    await client.post("/load_weights", {"path": str(EXAMPLE), "version": 3})
    again = await client.generate(temperature=0)
    assert after[0]["logprobs"] != before[0]["logprobs"]
    assert again[0]["logprobs"] == before[0]["logprobs"]
    assert (set(after[0]["versions"]), set(again[0]["versions"])) == ({2}, {3})


async def test_failed_load_weights_is_400_and_keeps_version(client: Client, tmp_path: Path) -> None:
    await client.post("/set_version", {"version": 11})
    status, answer = await client.post("/load_weights", {"path": str(tmp_path), "version": 12})
    assert status == 400
    assert "the old ones serve on" in answer["error"]["message"]
    assert await client.get("/get_version") == (200, {"version": 11})


async def test_metrics_count_tokens_of_ended_requests(client: Client) -> None:
    await client.generate(max_new_tokens=5, ignore_eos=True)
    async with client.http.get("/metrics") as response:
        text = await response.text()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("areal_engine"))
    assert float(values['areal_engine_tokens_total{kind="generated"}']) >= 5
    assert (values["areal_engine_running"], values["areal_engine_waiting"]) == ("0.0", "0.0")


@pytest.mark.extended
async def test_admin_key_guards_all_but_probes(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("s3cret\n")
    key.chmod(0o600)
    process = EngineProcess("--admin-key-file", str(key)).wait_ready()
    try:
        async with Client(process.url) as open_client, Client(process.url, "s3cret") as keyed:
            assert (await open_client.get("/health"))[0] == 200
            for path in ("/generate", "/abort", "/pause", "/load_weights", "/set_version"):
                assert (await open_client.post(path))[0] == 401
            assert (await open_client.get("/stats"))[0] == 401
            assert (await keyed.get("/stats"))[0] == 200
            assert len(await keyed.generate()) == 1
    finally:
        process.kill()


@pytest.mark.extended
async def test_sigterm_lets_running_streams_finish_and_exits_0() -> None:
    process = EngineProcess().wait_ready()
    try:
        async with Client(process.url) as client:
            body = {"input_ids": PROMPT, "sampling": LONG, "stream": True}
            async with client.http.post("/generate", json=body) as response:
                first = json.loads(await response.content.readline())
                process.popen.send_signal(signal.SIGTERM)
                rest = await lines(response)
        tokens = [token for line in [first, *rest] for token in line["token_ids"]]
        assert (len(tokens), rest[-1]["finish_reason"]) == (110, "length")
        assert process.wait_exit() == 0
    finally:
        process.kill()


@pytest.mark.extended
async def test_sigterm_while_paused_errors_frozen_requests() -> None:
    process = EngineProcess().wait_ready()
    try:
        async with Client(process.url) as client:
            await client.post("/pause")
            body = {"input_ids": PROMPT, "sampling": LONG}
            whole = asyncio.create_task(client.post("/generate", body))
            async with client.http.post("/generate", json={**body, "stream": True}) as response:
                await client.wait_stats(waiting=2)
                process.popen.send_signal(signal.SIGTERM)
                (line,) = await lines(response)
            status, answer = await whole
        assert (status, answer["error"]["code"]) == (503, "engine_stopped")
        assert line["error"]["code"] == "engine_stopped"
        assert process.wait_exit() == 0
    finally:
        process.kill()


async def test_start_writes_stages_and_is_healthy_before_ready(tmp_path: Path) -> None:
    file = tmp_path / "stage.json"
    process = EngineProcess(env={"AREAL_STAGE_FILE": str(file)})
    try:
        async with Client(process.url) as client:
            status, health = await client.get("/health")
            assert (status, health["status"]) == (200, "ok")
            process.wait_ready()
            while (await client.get("/ready"))[0] != 200:
                pass
            health = (await client.get("/health"))[1]
            reported = {name: health[name] for name in ("stage", "version", "paused", "max_model_len")}
            assert reported == {"stage": "serving", "version": 0, "paused": False, "max_model_len": 128}
        assert json.loads(file.read_text())["stage"] == "serving"
    finally:
        process.kill()


def _broken(tmp_path: Path, change: str) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(EXAMPLE, folder)
    tensors = load_file(folder / "model.safetensors")
    if change == "tensor":
        del tensors["model.norm.weight"]
    else:
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [("tensor", r"error: .*lacks model.norm.weight"), ("shape", r"error: .*model.norm.weight is \[63\]")],
)
def test_start_on_broken_folder_prints_one_line_and_exits_1(tmp_path: Path, change: str, message: str) -> None:
    process = EngineProcess(model=_broken(tmp_path, change))
    assert process.wait_exit() == 1
    process.expect(message)
    assert len(process.stderr) == 1


def test_start_on_missing_folder_exits_1(tmp_path: Path) -> None:
    process = EngineProcess(model=tmp_path / "none")
    assert process.wait_exit() == 1
    process.expect(r"error: model folder .*none does not exist")


@pytest.mark.extended
def test_start_on_taken_port_prints_address_and_exits_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = EngineProcess("--port", str(port))
        assert process.wait_exit() == 1
    process.expect(rf"error: cannot listen on 127.0.0.1:{port}")


@pytest.mark.extended
def test_exit_during_computation_keeps_exit_status() -> None:
    """What a taken port, or a signal, finds while the model is loaded: torch in another thread."""
    source = """
import threading, torch
from areal.services.inference.engines.embedded.__main__ import exit_process
begun = threading.Event()
def compute():
    x = torch.ones(300, 300)
    while True:
        x @ x
        begun.set()
threading.Thread(target=compute, daemon=True).start()
begun.wait()
exit_process(3)
"""
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (3, "")
