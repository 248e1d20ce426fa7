"""The argv of components, from specs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areal.reconcilers.launch import Launch, Slot, data_proxy
from areal.resources.inference_service import InferenceServiceSpec
from areal.resources.registry import effective
from tests.reconcilers.worlds import model


def proxy_argv(folder: Path, **spec: Any) -> tuple[str, ...]:
    item = model({"service": "home", "backend": "embedded", "path": str(folder), **spec})
    slot = Slot(uid="u", ref=str(item.ref), component="data-proxy", replica=0, port=20000)
    launch = Launch(item, slot, "/keys/home", "/home/data/qwen", {"engineUrl": "http://127.0.0.1:20001"})
    return data_proxy(launch, effective("Model", item.spec), InferenceServiceSpec()).argv


@pytest.mark.parametrize(
    ("spec", "flags"),
    [
        ({"toolCallParser": "qwen"}, ("--tool-call-parser", "qwen")),
        ({"reasoningParser": "qwen3"}, ("--reasoning-parser", "qwen3")),
    ],
)
def test_data_proxy_is_started_with_the_models_parsers(tmp_path: Path, spec: Any, flags: tuple[str, ...]) -> None:
    argv = proxy_argv(tmp_path, **spec)
    at = argv.index(flags[0])
    assert argv[at : at + 2] == flags


def test_data_proxy_without_parsers_has_no_flags_for_them(tmp_path: Path) -> None:
    assert not {"--tool-call-parser", "--reasoning-parser"} & set(proxy_argv(tmp_path))
