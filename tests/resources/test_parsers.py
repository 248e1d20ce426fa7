"""Fields whose value is a name that a process looks up: an unknown name is refused where it is written."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.resources.validation import validate
from areal.wire.parsers import REASONING_PARSERS, TOOL_CALL_PARSERS
from tests.resources.helpers import faults
from tests.resources.test_schema import disagreement, manifest

MODEL = """apiVersion: areal.dev/v1alpha1
kind: Model
metadata: {name: m}
spec:
  backend: vllm
  path: x
"""


@pytest.mark.parametrize(
    ("line", "place", "words"),
    [
        ("toolCallParser: lfm3", "7:19: spec.toolCallParser", 'did you mean "lfm2"'),
        ("toolCallParser: lfm3", "7:19: spec.toolCallParser", "there are: apertus, apertus2509,"),
        ("reasoningParser: deepseek_r2", "7:20: spec.reasoningParser", 'did you mean "deepseek_r1"'),
        ("reasoningParser: gpt-oss\n  toolCallParser: hermes", "7:20: spec.reasoningParser", "does not go with"),
        ("toolCallParser: openai\n  reasoningParser: qwen3", "8:20: spec.reasoningParser", "does not go with"),
        ("proxyArgs: {sesion-ttl: 60}", "7:27: spec.proxyArgs.sesion-ttl", 'did you mean "session-ttl"'),
        ("proxyArgs: {session-ttl: an hour}", "7:28: spec.proxyArgs.session-ttl", "must be a number"),
        ("proxyArgs: {session-ttl: -1}", "7:28: spec.proxyArgs.session-ttl", "must be at least 0"),
        ("proxyArgs: {port: 1}", "7:21: spec.proxyArgs.port", "is set by areal itself"),
        ("proxyArgs: {tool_call_parser: x}", "spec.proxyArgs.tool_call_parser", "from toolCallParser"),
    ],
)
def test_unknown_parser_or_argument_gives_position(line: str, place: str, words: str) -> None:
    (fault,) = faults(f"{MODEL}  {line}\n")
    assert place in fault and words in fault


@pytest.mark.parametrize("device", ["cdua", "cuda:x", "gpu", ""])
def test_unknown_embedded_device_is_refused(device: str) -> None:
    ((path, fault),) = validate("Model", {"backend": "embedded", "path": "x", "engineArgs": {"device": device}})
    assert path == ("engineArgs", "device") and "must match auto|cpu|cuda" in fault


@pytest.mark.parametrize(
    "setting",
    [
        {"toolCallParser": "hermes"},
        {"reasoningParser": "qwen3"},
        {"chatTemplate": "x"},
        {"tokenizerPath": "x"},
        {"engineArgs": {"a": 1}},
        {"env": {"A": "b"}},
        {"envFrom": {"A": {"env": "B"}}},
        {"resources": {"gpus": 1}},
    ],
    ids=str,
)
def test_engine_setting_of_external_model_is_refused(setting: dict[str, Any]) -> None:
    spec = {"external": {"url": "https://a.example/v1"}, **setting}
    ((path, fault),) = validate("Model", spec)
    assert path == (next(iter(setting)),) and 'does not go with "external"' in fault
    assert disagreement(manifest("Model", spec)) is None


_NAMES = st.sampled_from([*TOOL_CALL_PARSERS.spellings, *REASONING_PARSERS.spellings, "lfm3", "x", "qwen_3"])
_SPELLED = st.builds(
    lambda name, upper, dash: (name.upper() if upper else name).replace("_", "-" if dash else "_"),
    _NAMES,
    st.booleans(),
    st.booleans(),
)


@given(st.none() | _SPELLED, st.none() | _SPELLED)
def test_schema_and_loader_agree_on_parser_names(tools: str | None, reasoning: str | None) -> None:
    spec = {"backend": "embedded", "path": "x", "toolCallParser": tools, "reasoningParser": reasoning}
    assert disagreement(manifest("Model", spec)) is None
