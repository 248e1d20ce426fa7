"""An engine that runs already, behind a key of its own: attached, recorded, updated, and left as it was."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal.services.http.auth import load_admin_key
from areal.services.weight_update.publisher import TrainerPair, serve_endpoint
from areal.services.weight_update.staging import open_publisher
from areal.training.run_folder import config_files
from areal.training.services import weight_update_gateway
from tests.e2e.conftest import MODEL, Box
from tests.e2e.rollouts import CHAT, ask
from tests.services.inference.engines.conformance.engines import EngineProcess, start
from tests.services.processes import call, wait_until
from tests.services.weight_update.conftest import logprobs_of, model, probe_of, weights

KEY = "sk-of-the-engine-0123456789"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineProcess]:
    log = tmp_path / "engine.log"
    process = start("sglang-standin", MODEL, log, None, "--api-key", KEY)
    try:
        wait_until(lambda: log.read_text().strip().isdecimal(), what="the engine's port")
        process.port = int(log.read_text())
        yield process
    finally:
        process.stop()


def manifest(box: Box, engine: EngineProcess, key: str) -> str:
    (box.folder / "engine.key").write_text(key)
    text = f"apiVersion: areal.dev/v1alpha1\nkind: InferenceService\nspec: {{gateway: {{port: {box.port}}}}}\n"
    text += "metadata: {name: default}\n---\napiVersion: areal.dev/v1alpha1\nkind: Model\nmetadata: {name: theirs}\n"
    spec = {"backend": "sglang:d1", "path": str(MODEL), "engineUrl": engine.url}
    spec["engineApiKeyFrom"] = {"file": str(box.folder / "engine.key")}  # type: ignore[assignment]
    return box.write(f"{text}spec: {json.dumps(spec)}\n")


@contextlib.contextmanager
def trainer(box: Box, folder: Path) -> Iterator[TrainerPair]:
    key_file = box.home / "credentials" / "default"
    publisher = open_publisher("disk", folder / "weights", config_files(MODEL))
    with (
        weight_update_gateway(folder, key_file, folder / "weight_update.log") as gateway,
        serve_endpoint({"actor": publisher}, load_admin_key(str(key_file))) as endpoint,
    ):
        to = {"inference_gateway_url": box.url, "model": "theirs"}
        pair = TrainerPair("actor", "disk", gateway, endpoint, to, publisher, box.key)
        pair.connect()
        yield pair
        pair.disconnect()


def check_row(box: Box, of: torch.nn.Module, version: int) -> None:
    """A recorded chat is what the model says, token by token, at its own temperature."""
    (session,) = ask(box, "POST", "/rl/start_session", {"task_id": "t"})[1]["sessions"]
    body = {"model": "theirs", "messages": [{"role": "user", "content": "1234"}], "max_tokens": 6, "temperature": 0.7}
    status, reply = ask(box, "POST", CHAT, body, session["session_api_key"])
    assert status == 200, reply
    ask(box, "POST", "/rl/set_reward", {"reward": 1.0}, session["session_api_key"])
    traj = ask(box, "POST", "/export_trajectories", {"session_ids": [session["session_id"]]})[1]["traj"]
    ids, mask = traj["input_ids"][0], torch.tensor(traj["loss_mask"][0]).bool()
    assert 0 < mask.sum() <= 6 and {each for each in traj["versions"][0] if each >= 0} == {version}
    with torch.no_grad():
        logits = of(input_ids=torch.tensor([ids])).logits[0] / 0.7
    plain = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(traj["logprobs"][0])[1:][mask[1:]], plain[mask[1:]], rtol=0, atol=1e-3)


@pytest.mark.slow
def test_attached_engine_is_updated_and_outlives_service(box: Box, engine: EngineProcess, tmp_path: Path) -> None:
    wrong = box.areal("apply", "-f", manifest(box, engine, "sk-wrong-0123456789"), "--timeout", "120s")
    assert wrong.code == 8 and "SGLang does not take the key" in wrong.text and "engineApiKeyFrom" in wrong.text
    box.ok("apply", "-f", manifest(box, engine, KEY))
    box.ok("restart", "model/theirs")  # what a file holds is read when a process starts
    box.ok("wait", "model/theirs", "--for", "ready")

    check_row(box, AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32), version=0)
    asked = [1, 5, 6, 7, 8, 14]
    scored = ask(
        box,
        "POST",
        "/v1/completions",
        {"model": "theirs", "prompt": asked, "max_tokens": 0, "echo": True, "logprobs": 1},
    )
    assert scored[0] == 200, scored
    with trainer(box, tmp_path) as pair:
        pair.publish(3, weights(new := model(5)), probe_of(new))
        check_row(box, new, version=3)
    told = scored[1]["choices"][0]["logprobs"]["token_logprobs"]
    old = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    torch.testing.assert_close(torch.tensor(told[1:]), logprobs_of(old, asked), rtol=0, atol=1e-3)

    shown = [box.ok(*words).text for words in (("get", "model/theirs", "-o", "yaml"), ("describe", "model/theirs"))]
    shown += [
        box.areal(*words).text for words in (("logs", "model/theirs"), ("events",), ("get", "processes", "-o", "json"))
    ]
    assert not any(KEY in each for each in shown)
    for file in (path for path in box.home.rglob("*") if path.is_file()):
        assert KEY not in file.read_text(errors="ignore") or file.stat().st_mode & 0o077 == 0, file

    box.ok("delete", "model/theirs", "inferenceservice/default", "--yes")
    assert engine.popen.poll() is None
    answer = call(engine.port or 0, "GET", "/model_info", key=KEY)
    assert answer.status == 200 and answer.json()["weight_version"] == "3"
