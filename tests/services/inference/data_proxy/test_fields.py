"""Constraints on an answer, in vLLM's, SGLang's and OpenAI's fields."""

from __future__ import annotations

from typing import Any

import pytest

from areal.services.http.errors import ApiError
from areal.services.inference.data_proxy.fields import Fields, read_constraint, read_response_options
from areal.services.inference.engines import sglang, vllm
from areal.services.inference.engines.base import Capabilities, EngineCall
from areal.wire.sampling import SamplingParams

SCHEMA = {"type": "object"}
JSON = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({}, None),
        ({"guided_json": SCHEMA}, JSON),
        ({"guided_json": '{"type": "object"}'}, JSON),
        ({"json_schema": '{"type": "object"}'}, JSON),
        ({"structured_outputs": {"json": SCHEMA}}, JSON),
        ({"structured_outputs": {"json_object": True}}, {"type": "json_object"}),
        ({"structured_outputs": {"json_object": False}}, None),
        ({"guided_regex": "a+"}, {"type": "regex", "regex": "a+"}),
        ({"regex": "a+"}, {"type": "regex", "regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"type": "choice", "choice": ["a", "b"]}),
        ({"guided_grammar": "g"}, {"type": "grammar", "grammar": "g"}),
        ({"ebnf": "g"}, {"type": "grammar", "grammar": "g"}),
    ],
)
def test_constraint_is_read(body: dict[str, Any], wanted: dict[str, Any] | None) -> None:
    fields = Fields(body)
    found = read_constraint(fields)
    assert (found[1] if found else None) == wanted
    assert fields.is_empty


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice"),
        ({"regex": ""}, "regex"),
        ({"regex": 7}, "regex"),
        ({"guided_regex": "a", "guided_json": SCHEMA}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "json": SCHEMA}}, "structured_outputs.regex"),
        ({"structured_outputs": {"poem": 1}}, "structured_outputs.poem"),
        ({"structured_outputs": 7}, "structured_outputs"),
        ({"structural_tag": {}}, "structural_tag"),
    ],
)
def test_constraint_that_cannot_be_followed_is_400_and_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_constraint(Fields(body))
    assert (caught.value.status, caught.value.param) == (400, param)


def test_engines_are_told_in_their_own_words() -> None:
    def call(**wanted: Any) -> EngineCall:
        return EngineCall("c", ((1,),), SamplingParams(), wanted)

    of_sglang = [
        ({"type": "regex", "regex": "a+"}, "regex", "a+"),
        ({"type": "choice", "choice": ["a.b", "c"]}, "regex", r"(a\.b)|(c)"),
        ({"type": "grammar", "grammar": "g"}, "ebnf", "g"),
        (JSON, "json_schema", '{"type":"object"}'),
    ]
    for wanted, name, value in of_sglang:
        assert sglang.wire_body(call(**wanted))["sampling_params"][name] == value
    assert vllm.wire_body(call(type="choice", choice=["a"]), "m")["structured_outputs"] == {"choice": ["a"]}
    assert vllm.wire_body(call(**JSON), "m")["response_format"] == JSON


# Schemas in ``response_format``.

ANSWER_SCHEMA = {"type": "object", "properties": {"mood": {"enum": ["good", "bad"]}}}


def test_schema_beside_json_object_is_one_that_the_answer_is_held_to() -> None:
    fields = Fields({"response_format": {"type": "json_object", "schema": ANSWER_SCHEMA}})
    wanted = read_response_options(fields, None, Capabilities(response_format=True)).response_format
    assert wanted is not None and wanted["type"] == "json_schema" and wanted["json_schema"]["schema"] == ANSWER_SCHEMA


def test_schema_that_is_none_is_refused() -> None:
    fields = Fields({"response_format": {"type": "json_object", "schema": "mood"}})
    with pytest.raises(ApiError) as refused:
        read_response_options(fields, None, Capabilities(response_format=True))
    assert refused.value.status == 400
