"""The main job: a manifest becomes a model that answers, and stays what it is until somebody changes it."""

from __future__ import annotations

import json
import os
import statistics
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ROOT, Box
from tests.services.processes import wait_until
from tests.test_documentation import lines_of_areal


def applied(box: Box, *overrides: str, wait: bool = True) -> str:
    """The quickstart as it is shipped, from the root of the repository, on this box's port."""
    return box.ok(
        *("apply", "-f", "manifests/quickstart.yaml"),
        *("--set", f"inferenceservice/default:spec.gateway.port={box.port}"),
        *("--set", f"trainjob/learn:spec.overrides={json.dumps(overrides)}"),
        *(() if wait else ("--no-wait",)),
    ).out


def test_quickstart_applies_trains_and_is_deleted(box: Box) -> None:
    box = replace(box, folder=ROOT)
    apply, chat, wait, again = lines_of_areal(ROOT / "README.md", "tests/e2e/test_quickstart.py")
    assert apply == ["apply", "-f", "manifests/quickstart.yaml"]
    out = applied(box, "total_train_steps=3", "saver.freq_steps=3")
    assert f"inferenceservice/default created: Ready at {box.url}" in out
    assert "model/reverse created: Ready" in out
    assert "trainjob/learn created: Running" in out
    assert box.ok(*chat).out.strip() == "4312"
    box.ok(*wait, "--timeout", "200s")
    assert box.ok(*again).out.strip().isdigit()
    status = json.loads(box.ok("train", "status", "learn", "-o", "json").out)
    assert (status["phase"], status["step"]) == ("Succeeded", 3)
    assert_says_whose_weights_it_serves(box)
    shown = box.ok("inf", "trajectories", "show", str(box.home / "jobs" / "learn" / "trajectories"), "-o", "json").out
    assert shown.count('"episode"') == 10
    assert (
        "=" in box.ok("inf", "trajectories", "show", str(box.home / "jobs" / "learn" / "trajectories")).out
    )  # as text
    assert "trainjob/learn unchanged" in applied(box, "total_train_steps=3", "saver.freq_steps=3")
    assert_saved_weights_are_evaluated_beside_those_before(box)
    box.ok("delete", "inferenceservice/default", "--cascade", "--yes")
    assert box.living() == []
    assert box.ok("get", "-o", "name").out == ""


def assert_saved_weights_are_evaluated_beside_those_before(box: Box) -> None:
    """The evaluation serves them by a service of its own, and leaves nothing of it."""
    data, reward = "examples/reverse_digits/test.jsonl", "examples.reverse_digits.reward:reversed_digits"
    words = ("--dataset", data, "--reward", reward, "--limit", "20", "--max-tokens", "8", "-o", "json")
    pids = box.pids()
    result = json.loads(box.ok("eval", "trainjob/learn@3", *words, "--baseline", "trainjob/learn@0").out)
    assert (result["done"], result["comparison"]["reward"]["prompts"]) == (20, 20)
    assert result["output"] == str(box.home / "evaluations" / "learn-3")
    assert box.areal("eval", "trainjob/learn@2", *words).code == 4
    again = box.areal("eval", "trainjob/learn@3", *words)
    assert again.code == 5 and "already contains a run" in again.err
    mine = box.home.parent / "mine.yaml"
    mine.write_text(
        "{apiVersion: areal.dev/v1alpha1, kind: InferenceService, metadata: {name: eval-mine}, spec: {suspend: true}}"
    )
    box.ok("apply", "-f", str(mine))
    taken = box.areal("eval", "trainjob/learn@3", *words, "--name", "mine")
    assert taken.code == 5 and "InferenceService/eval-mine exists" in taken.err
    box.ok("delete", "inferenceservice/eval-mine", "--yes")
    killed = box.start("eval", "trainjob/learn@3", *words, "--name", "killed")
    wait_until(lambda: "model/eval-killed" in box.ok("get", "-o", "name").out, 60, "its service is recorded")
    killed.kill()
    killed.communicate()
    resumed = box.ok("eval", "trainjob/learn@3", *words, "--name", "killed", "--resume")
    assert json.loads(resumed.out)["done"] == 20
    assert box.pids() == pids and "eval-" not in box.ok("get", "-o", "name").out


def assert_says_whose_weights_it_serves(box: Box) -> None:
    """Three steps of TrainJob/learn were published; it has ended, and leaves them in its folder."""
    weights = json.loads(box.ok("get", "model/reverse", "-o", "json").out)["status"]["weights"]
    assert (weights["version"], weights["writer"]) == (3, "TrainJob/learn")
    assert Path(weights["path"]).is_relative_to(box.home / "jobs" / "learn")
    assert [row["weights"] for row in json.loads(box.ok("inf", "models", "-o", "json").out)["items"]] == [weights]
    for words in (("describe", "model/reverse"), ("get", "-o", "wide"), ("inf", "status"), ("inf", "models")):
        assert "version 3 of TrainJob/learn" in box.ok(*words).out, words
    events = json.loads(box.ok("events", "model/reverse", "-o", "json").out)["items"]
    assert [(each["message"], each["count"]) for each in events if each["reason"] == "Serves"] == [
        ("serves version 3 of TrainJob/learn", 4)  # from version 0 on: folded into the newest
    ]


@pytest.mark.extended
def test_quickstart_trains_on_engine_from_plugin_package(box: Box, tmp_path: Path) -> None:
    package = tmp_path / "packages" / "areal_plain-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: areal-plain\nVersion: 1.0\n")
    factory = "tests.training.engines.plain:PlainEngine"
    (package / "entry_points.txt").write_text(f"[areal.train_engines]\nplain = {factory}\n")
    box = replace(box, folder=ROOT, env={**box.env, "PYTHONPATH": f"{package.parent}{os.pathsep}{ROOT}"})
    before = applied(box, "total_train_steps=3", "actor.backend=plain:d1") and box.chat("1234")
    box.ok("wait", "trainjob/learn", "--for", "completed", "--timeout", "200s")
    steps = [json.loads(line) for line in (box.home / "jobs" / "learn" / "metrics.jsonl").read_text().splitlines()]
    assert [step["version"] for step in steps if step["step"]] == [1, 2, 3]
    assert all(step["grad_norm"] > 0 for step in steps if step["step"])
    assert before.isdigit() and box.chat("1234").isdigit()  # of the published weights
    assert (box.home / "jobs" / "learn" / "checkpoints" / "step_3" / "actor" / "engine.pt").is_file()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_quickstart_learns_to_answer_question(box: Box, seed: int) -> None:
    box = replace(box, folder=ROOT)
    applied(box, f"seed={seed}")
    before = box.chat("1234")
    box.ok("wait", "trainjob/learn", "--for", "completed", "--timeout", "500s")
    steps = [json.loads(line) for line in (box.home / "jobs" / "learn" / "metrics.jsonl").read_text().splitlines()]
    rewards = [step["reward/mean"] for step in steps if step["step"]]  # step 0 is an evaluation
    assert len(rewards) == 350
    assert statistics.mean(rewards[:5]) < 0.3
    assert statistics.mean(rewards[-20:]) >= 0.95
    assert (before, box.chat("1234")) == ("4312", "4321")


def test_second_apply_prints_unchanged_and_writes_nothing(served: Box) -> None:
    before, pids = served.files(), served.pids()
    result = served.ok("apply", "-f", served.manifest())
    assert result.out.split("\n")[:2] == ["inferenceservice/default unchanged", "model/reverse unchanged"]
    assert served.files() == before
    assert served.pids() == pids


@pytest.mark.extended
def test_diff_exits_0_then_1_with_op_cause_and_field(served: Box) -> None:
    assert served.areal("diff", "-f", served.manifest()).code == 0
    edited = served.manifest(model="engineArgs: {maxBatchSize: 4}", name="edited.yaml")
    result = served.areal("diff", "-f", edited)
    assert result.code == 1
    assert "~ Model/reverse configure (rolling update), decided by spec.engineArgs.maxBatchSize" in result.out
    assert "start Model/" in result.out
    assert "drain" in result.out


def test_reading_commands_write_nothing(served: Box) -> None:
    before = served.files()
    for command in (
        ("get",),
        ("get", "processes"),
        ("get", "models", "-o", "wide"),
        ("describe", "model/reverse"),
        ("diff", "--drift"),
        ("events",),
        ("history", "model/reverse"),
        ("logs", "model/reverse", "-n", "5"),
        ("top",),
        ("inf", "status"),
        ("inf", "ps"),
        ("inf", "models"),
        ("doctor",),
    ):
        result = served.areal(*command)
        assert result.code == 0, f"{command}: {result.text}"
        assert served.files() == before, command


def test_gateway_call_without_key_is_401(served: Box) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"{served.url}/v1/models", timeout=10)
    assert caught.value.code == 401
    assert json.load(caught.value)["error"]["type"] == "authentication_error"


def pieces(client: Any) -> list[str]:
    """The texts of a stream of 100 tokens, without the empty ones."""
    endless = {"ignore_eos": True}
    with client.completions.create(
        model="reverse", prompt="1", max_tokens=100, stream=True, extra_body=endless
    ) as stream:
        return [chunk.choices[0].text for chunk in stream if chunk.choices and chunk.choices[0].text]


def test_openai_sdk_streamed_and_whole_answers_agree(served: Box) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key=served.key, max_retries=0, timeout=30)
    messages = [{"role": "user", "content": "5678"}]
    whole = client.chat.completions.create(model="reverse", messages=messages, temperature=0)
    with client.chat.completions.create(model="reverse", messages=messages, temperature=0, stream=True) as stream:
        parts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(parts) == whole.choices[0].message.content
    assert any(len(pieces(client)) > 1 for _ in range(20))  # a busy machine may put an answer into one piece
    assert [model.id for model in client.models.list()] == ["reverse"]


def test_inf_chat_one_shot_prints_the_answer(served: Box) -> None:
    assert served.ok("inf", "chat", "-m", "1234", "--temperature", "0").out.strip() == served.chat("1234")
    for temperature in ("nan", "3"):  # refused here, and by the gateway
        refused = served.areal("inf", "chat", "-m", "1234", "--temperature", temperature)
        assert refused.code == 2 and "temperature" in refused.err


def test_healthy_home_has_no_exposed_files(served: Box) -> None:
    assert served.areal("doctor", "--security").text.strip() == "nothing found"


def test_reapplied_manifest_of_get_is_unchanged(served: Box) -> None:
    manifest = served.ok("get", "-o", "manifest").out
    result = served.ok("apply", "-f", served.write(manifest, "again.yaml"))
    assert "unchanged" in result.out
    assert "configured" not in result.out


def test_events_record_lifecycle(served: Box) -> None:
    text = served.ok("events").out
    assert "Created" in text
    assert "Ready" in text
