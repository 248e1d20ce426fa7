"""What SGLang's wrapper checks before it starts the engine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from areal.services.inference.engines.sglang_plugin.areal_sglang import missing_layers

CONFIG = {"model_type": "qwen3", "num_hidden_layers": 3}


@pytest.mark.parametrize(
    ("config", "names", "missing"),
    [
        (CONFIG, ["model.layers.0.a.weight", "model.layers.1.a.weight"], True),
        (CONFIG, ["model.layers.0.a.weight", "model.layers.2.a.weight"], False),
        (CONFIG, ["model.layers.0.a.weight", "model.layers.3.mtp.weight"], False),
        (CONFIG, ["transformer.h.1.a.weight"], True),
        ({"text_config": CONFIG}, ["language_model.layers.1.a.weight"], True),
        ({"text_config": CONFIG}, ["language_model.layers.1.a.weight", "vision.blocks.26.a.weight"], False),
        (CONFIG, ["other.weight"], False),
        ({}, ["model.layers.1.a.weight"], False),
        ([], ["model.layers.1.a.weight"], False),
    ],
)
def test_folder_with_fewer_layers_than_its_config_is_refused(
    tmp_path: Path, config: object, names: list[str], missing: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    for number, name in enumerate(names):  # in a file each
        save_file({name: np.zeros(1, np.float32)}, tmp_path / f"model-{number}.safetensors")

    message = missing_layers(tmp_path)

    assert bool(message) is missing
    found = f"error: {tmp_path} has the weights of 2 layers, and its config.json names 3"
    assert message == (f"{found}: save or download the model again" if missing else "")


@pytest.mark.parametrize("content", [b"", b"\xff" * 20, b"\x10\0\0\0\0\0\0\0not JSON"])
def test_unreadable_weights_are_left_to_the_engine(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(content)

    assert missing_layers(tmp_path) == ""
