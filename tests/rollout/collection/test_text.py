"""A collection of an external model: messages instead of tokens, through the same files and views."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rollout.collection.conftest import Bench, Collecting
from tests.services.processes import wait_ready


def test_external_models_messages_are_collected_and_shown(bench: Bench, collecting: Collecting, tmp_path: Path) -> None:
    argv = ("--model", "friend", "--engine", "external", "--engine-url", bench.proxy.url, "--provider-model", "tiny")
    state = ("--state-dir", str(tmp_path / "state"))
    friend = bench.processes.service("data_proxy", *argv, *state, env={"AREAL_PROVIDER_API_KEY": bench.key})
    wait_ready(friend)
    data = collecting.data({"prompt": "hi", "answer": "Hello there, friend!"})
    words = ("--reward", "exact", "--gateway", friend.url)
    said = collecting(data, *words)
    assert said.code == 0, said.err
    (line,) = collecting.lines()
    (row,) = line["interactions"]
    assert (row["messages"], row["response"]["content"]) == (
        [{"role": "user", "content": "hi"}],
        "Hello there, friend!",
    )
    assert (line["reward"], said.json["generated_tokens"]) == (1.0, 0)
    shown = collecting.areal("inf", "trajectories", "show", str(collecting.output))
    assert "user: hi\n  assistant: Hello there, friend!" in shown.out
    assert shown.err == "", "no tokenizer is missed where there are no tokens"
    pytest.importorskip("pyarrow")
    (collecting.output / "trajectories.jsonl").rename(tmp_path / "t.jsonl")
    (collecting.output / "run.json").unlink()
    assert collecting(data, *words, "--parquet").code == 0
    assert "assistant: Hello there" in collecting.areal("inf", "trajectories", "show", str(collecting.output)).out
