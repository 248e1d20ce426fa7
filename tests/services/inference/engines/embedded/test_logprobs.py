"""Reported logprobs are what a plain forward pass of transformers gives, whatever the family and the form of config."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from areal.services.inference.engines.embedded.decoder import cheapest_spans

from .support import FAMILIES, VOCAB, Harness, gap, make_model, open_runner, plain_logits

Start = Callable[..., Harness]
TOLERANCE = 1e-4


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_of_each_family_match_plain_forward(tmp_path: Path, start: Start, family: str, tied: bool) -> None:
    model = make_model(tmp_path, family, tie_word_embeddings=tied)
    sequences = start(tmp_path).run([5, 6, 7], [11] * 20, [3], max_new_tokens=12)
    assert [sequence.produced for sequence in sequences] == [12, 12, 12]
    assert max(gap(model, sequence) for sequence in sequences) < TOLERANCE


@pytest.mark.parametrize(("call", "spans"), [(0, 4), (40, 2), (2**40, 1)])
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_logits_of_split_rows_match_plain_forward(tmp_path: Path, family: str, call: int, spans: int) -> None:
    model = make_model(tmp_path, family)
    runner = open_runner(tmp_path)
    texts = [[5] * 30, [6, 7] * 15, [8] * 29, [3], [9, 4, 4], [5, 6, 7]]
    runner.reserve(len(texts), 40)
    runner.prefill(texts, [0] * len(texts), 0)
    for token in (11, 12, 13):
        found = cheapest_spans([len(text) + 1 for text in texts], call)
        positions = torch.tensor([len(text) for text in texts])
        logits = runner.decode(torch.full((len(texts),), token), positions, found)
        texts = [[*text, token] for text in texts]
        assert len(found) == spans
        for text, row in zip(texts, logits, strict=True):
            assert float((plain_logits(model, text)[-1] - row).abs().max()) < TOLERANCE


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1, "head_dim": 16},
        {"attention_bias": True, "mlp_bias": True},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ],
    ids=["no-groups", "one-group", "biases", "theta", "linear", "llama3"],
)
def test_logprobs_of_variants_match_plain_forward(tmp_path: Path, start: Start, changes: dict[str, Any]) -> None:
    model = make_model(tmp_path, "Llama", **changes)
    (sequence,) = start(tmp_path).run(range(3, 60), max_new_tokens=20)
    assert gap(model, sequence) < TOLERANCE


def test_logprobs_with_old_config_fields_match_plain_forward(tmp_path: Path, start: Start) -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    model = make_model(tmp_path, "Llama", rope_parameters=rope)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"], config["dtype"]
    old = {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}, "torch_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps({**config, **old}))
    (sequence,) = start(tmp_path).run([5, 6, 7, 8], max_new_tokens=16)
    assert gap(model, sequence) < TOLERANCE


def test_logprobs_of_sharded_folder_match_plain_forward(tmp_path: Path, start: Start) -> None:
    model = make_model(tmp_path, "Qwen3", shard="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    (sequence,) = start(tmp_path).run([5, 6, 7, 8], max_new_tokens=16)
    assert gap(model, sequence) < TOLERANCE


def test_bfloat16_logprobs_approximate_plain_forward(tmp_path: Path, start: Start) -> None:
    model = make_model(tmp_path, "Qwen3").to(torch.bfloat16)
    (sequence,) = start(tmp_path, dtype=torch.bfloat16).run([5, 6, 7, 8], max_new_tokens=16)
    assert gap(model, sequence) < 0.25  # bfloat16 keeps eight bits; a wrong layout is off by whole units


def test_top_logprobs_of_every_token_match_plain_forward(llama: tuple[Path, Any], start: Start) -> None:
    folder, model = llama
    (sequence,) = start(folder).run([5, 6, 7], max_new_tokens=6, top_logprobs=5, temperature=0.5, top_k=3)
    plain = (plain_logits(model, sequence.prompt + sequence.output) / 0.5).log_softmax(-1)
    for step, alternatives in enumerate(sequence.top):
        values, ids = plain[len(sequence.prompt) - 1 + step].topk(5)
        assert [token for token, _ in alternatives] == ids.tolist()
        assert torch.allclose(torch.tensor([value for _, value in alternatives]), values, atol=TOLERANCE)


def test_logprobs_ignore_sampling_filters(llama: tuple[Path, Any], start: Start) -> None:
    folder, model = llama
    shaping = {"temperature": 0.3, "top_p": 0.8, "presence_penalty": 1.5, "logit_bias": {VOCAB - 1: 5.0}}
    (sequence,) = start(folder).run([5, 6, 7], max_new_tokens=16, **shaping)
    assert gap(model, sequence, 0.3) < TOLERANCE
