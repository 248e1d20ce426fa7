"""Assembling an external API's streamed completion."""

from __future__ import annotations

from typing import Any

import pytest

from areal.services.inference.data_proxy.external_recording import CompletionAssembler


def chunk(index: int, name: str, arguments: str, end: str | None = None) -> dict[str, Any]:
    call = {"index": index, "function": {"name": name, "arguments": arguments}}
    return {"choices": [{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": end}]}


@pytest.mark.parametrize("first", [-1, 0, 7, 2**62])
def test_calls_are_assembled_in_order_of_any_index(first: int) -> None:
    assembler = CompletionAssembler()
    for event in (chunk(first + 1, "b", "{}"), chunk(first, "a", '{"x"'), chunk(first, "", ": 1}", "tool_calls")):
        assembler.chunk(event)
    completion = assembler.completion()
    assert completion is not None and assembler.completion() == completion
    assert [call["function"] for call in completion["choices"][0]["message"]["tool_calls"]] == [
        {"name": "a", "arguments": '{"x": 1}'},
        {"name": "b", "arguments": "{}"},
    ]
