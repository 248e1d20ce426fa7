"""A collection through a whole service, while processes of either are killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Box, make_box, tear_down
from tests.services.processes import wait_until

PROMPTS = 24
SAMPLES = 4


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    """The quickstart's model on two replicas, and a data set of its own."""
    made = make_box(tmp_path_factory.mktemp("collect"))
    made.ok("apply", "-f", made.manifest(model="replicas: 2"))
    numbers = [f"{1000 + 37 * place}" for place in range(PROMPTS)]
    lines = [json.dumps({"prompt": each, "answer": each[::-1]}) for each in numbers]
    (made.folder / "data.jsonl").write_text("\n".join(lines))
    yield made
    tear_down(made)


def collecting(name: str) -> tuple[str, ...]:
    words = ("inf", "collect", "--dataset", "data.jsonl", "--reward", "exact", "--n-samples", str(SAMPLES))
    return (*words, "--temperature", "1", "--concurrency", "4", "--retries", "3", "--output", name, "-o", "json")


def lines(box: Box, name: str) -> list[dict[str, Any]]:
    path = box.folder / name / "trajectories.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def begun(box: Box, name: str, least: int = 5) -> None:
    path: Path = box.folder / name / "trajectories.jsonl"
    wait_until(lambda: path.exists() and path.read_bytes().count(b"\n") >= least, what="the collection has begun")


def assert_exact(box: Box, name: str) -> None:
    found = lines(box, name)
    assert sorted(line["episode"] for line in found) == sorted(
        f"{prompt}-{sample}" for prompt in range(PROMPTS) for sample in range(SAMPLES)
    )
    turns = [row["interaction_id"] for line in found for row in line["interactions"]]
    assert len(set(turns)) == len(turns) == PROMPTS * SAMPLES
    for line in found:
        (row,) = line["interactions"]
        if line["answer"] is not None:  # else it was taken over from a collector that was killed
            assert line["reward"] == float(line["answer"].strip() == line["example"]["answer"])
        assert row["loss_mask"].count(1) == sum(version == 0 for version in row["versions"]) > 0
        assert all(logprob <= 0 for logprob in row["logprobs"])


@pytest.mark.slow
def test_collection_survives_killed_data_proxy(pair: Box) -> None:
    process = pair.start(*collecting("lost-proxy"))
    begun(pair, "lost-proxy")
    os.kill(pair.pids()["data-proxy/0"], signal.SIGKILL)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert json.loads(out)["failed"] == 0
    assert_exact(pair, "lost-proxy")


@pytest.mark.extended
def test_killed_collector_resumes(pair: Box) -> None:
    for least in (1, 20, 50):
        process = pair.start(*collecting("lost-collector"), "--resume")
        begun(pair, "lost-collector", least)
        process.kill()
        process.communicate()
    ended = pair.ok(*collecting("lost-collector"), "--resume")
    assert json.loads(ended.out)["done_before"] >= 50
    assert_exact(pair, "lost-collector")
    run_id = json.loads((pair.folder / "lost-collector" / "run.json").read_text())["run_id"]
    left = json.loads(pair.ok("inf", "sessions", "list", "--task", f"collect-{run_id}", "--ready", "-o", "json").out)[
        "items"
    ]
    assert left == [], "what was not taken over was released"


@pytest.mark.extended
def test_collected_tokens_are_shown_with_model_tokenizer(pair: Box) -> None:
    pair.ok(*collecting("shown"), "--limit", "1")
    shown = pair.ok("inf", "trajectories", "show", "shown", "--limit", "1").out
    assert "prompt:\n    <bos>1000=\n  answer:\n    " in shown
