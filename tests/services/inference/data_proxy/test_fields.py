"""Fields of a request: sampling, and constraints on an answer in vLLM's, SGLang's and OpenAI's words."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from areal.services.http.errors import ApiError, bad_field
from areal.services.inference.data_proxy.control import api_error
from areal.services.inference.data_proxy.fields import (
    Fields,
    ResponseOptions,
    dialect_field_names,
    read_constraint,
    read_response_options,
    read_sampling,
)
from areal.services.inference.data_proxy.openai import read_completion
from areal.services.inference.data_proxy.tokenizer import TextCodec
from areal.services.inference.engines import sglang, vllm
from areal.services.inference.engines.base import SAMPLING_FIELDS, Capabilities, EngineCall, EngineRefused
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
        ({"structural_tag": {"type": "tag"}}, "structural_tag"),
    ],
)
def test_invalid_constraint_is_400_naming_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_constraint(Fields(body))
    assert (caught.value.status, caught.value.param) == (400, param)


def test_engines_receive_parameters_by_native_names() -> None:
    def call(**wanted: Any) -> EngineCall:
        return EngineCall("c", ((1,),), SamplingParams(), wanted)

    of_sglang: list[tuple[dict[str, Any], str, str]] = [
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


def test_schema_beside_json_object_constrains_answer() -> None:
    fields = Fields({"response_format": {"type": "json_object", "schema": ANSWER_SCHEMA}})
    wanted = read_response_options(fields, None, Capabilities(response_format=True)).response_format
    assert wanted is not None and wanted["type"] == "json_schema" and wanted["json_schema"]["schema"] == ANSWER_SCHEMA


def test_invalid_schema_is_refused() -> None:
    fields = Fields({"response_format": {"type": "json_object", "schema": "mood"}})
    with pytest.raises(ApiError) as refused:
        read_response_options(fields, None, Capabilities(response_format=True))
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "body", [{"response_format": {"type": "json_object"}}, {"guided_regex": "a"}], ids=lambda body: next(iter(body))
)
def test_constraint_without_engine_grammars_is_400_with_reason(body: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="no grammars: none") as refused:
        read_response_options(Fields(body), None, Capabilities(no_response_format="no grammars: none"))
    assert (refused.value.status, refused.value.param) == (400, next(iter(body)))


@pytest.mark.parametrize(
    ("body", "by"),
    [
        ({}, "response_format"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        ({"guided_choice": ["a"]}, "guided_choice"),
    ],
)
def test_engine_that_refuses_a_constraint_names_the_field_of_the_caller(body: dict[str, Any], by: str) -> None:
    refusal = EngineRefused("response_format: the schema cannot be followed: no", None, "response_format")
    options = read_response_options(Fields(body), None, Capabilities(response_format=True))
    with pytest.raises(ApiError) as caught, dialect_field_names({"response_format": options.constrained_by}):
        raise api_error(refusal)
    assert caught.value.param == by and caught.value.message == f"{by}: the schema cannot be followed: no"


# Single fields.


@pytest.mark.parametrize("value", [[100], [-1], [True], ["1"], [1.0], 7, "1", {}])
def test_invalid_token_ids_are_400_naming_field(value: object) -> None:
    with pytest.raises(ApiError, match="stop_token_ids must be a list of token ids below 100") as refused:
        Fields({"stop_token_ids": value}).token_ids("stop_token_ids", 100)
    assert refused.value.param == "stop_token_ids"


def test_token_ids_are_parsed() -> None:
    assert Fields({"ids": [0, 99]}).token_ids("ids", 100) == (0, 99)
    assert Fields({"ids": None}).token_ids("ids", 100) == ()


def test_ignored_fields_are_listed_up_to_fifty() -> None:
    names = [f"f{number:02}" for number in range(52)]
    assert Fields(dict.fromkeys(names[:50], 1)).ignored() == tuple(names[:50])
    assert Fields(dict.fromkeys(names, 1)).ignored() == (*names[:50], "and 2 more")


def dialect_error(error: ApiError, names: dict[str, str], *, foreign: bool = False) -> ApiError:
    with pytest.raises(ApiError) as caught, dialect_field_names(names, foreign=foreign):
        raise error
    return caught.value


def test_field_error_uses_dialect_field_name() -> None:
    names = {"max_tokens": "max_output_tokens"}
    error = bad_field("max_tokens", "must be above 0", code="c")
    error.headers["h"] = "1"
    renamed = dialect_error(error, names)
    assert (renamed.message, renamed.param) == ("max_output_tokens must be above 0", "max_output_tokens")
    assert (renamed.status, renamed.code, renamed.headers) == (400, "c", {"h": "1"})
    assert dialect_error(bad_field("top_p", "must be above 0"), names).message == "top_p must be above 0"
    assert dialect_error(ApiError(400, "max_tokens"), names).message == "max_tokens"


@pytest.mark.parametrize("place", ["messages[1].content[0].type", "messages[1]", "messages"])
def test_nested_field_error_uses_dialect_field_name(place: str) -> None:
    error = dialect_error(bad_field(place, "is of type 'image_url'"), {"messages": "input"})
    assert (error.message, error.param) == ("input is of type 'image_url'", "input")


def test_value_equal_to_field_name_is_not_translated() -> None:
    error = dialect_error(bad_field("messages[0].role", "is 'messages', not user"), {"messages": "input"})
    assert error.message == "input is 'messages', not user"


def test_foreign_message_is_kept_after_dialect_field() -> None:
    error = dialect_error(ApiError(400, "max_tokens too large", param="max_tokens"), {"max_tokens": "m"}, foreign=True)
    assert (error.message, error.param) == ("m: max_tokens too large", "m")


def test_explicit_defaults_give_same_response_options() -> None:
    defaults = {"stop": [], "skip_special_tokens": True, "return_token_ids": False, "stream_options": {}}
    for stream in (False, True):
        unsaid = read_response_options(Fields({"stream": stream}), None, Capabilities())
        assert unsaid == read_response_options(Fields({"stream": stream, **defaults}), None, Capabilities())
        assert unsaid == ResponseOptions(stream, False, False, (), None, True, False, None)


@pytest.fixture
def codec(tokenizer: Path) -> TextCodec:
    loaded = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    return TextCodec(loaded, template=None, end_ids=[2], max_positions=None)


def test_explicit_defaults_give_same_sampling(codec: TextCodec) -> None:
    defaults = {
        "temperature": 1,
        "top_p": 1,
        "top_k": -1,
        "n": 1,
        "min_tokens": 0,
        "ignore_eos": False,
        "logit_bias": {},
    }
    options = read_response_options(Fields({}), None, Capabilities())
    unsaid = read_sampling(Fields({}), codec, options, Capabilities(), 7)
    assert unsaid == read_sampling(Fields(defaults), codec, options, Capabilities(), 7)
    assert unsaid == SamplingParams(7, stop_token_ids=(2,))
    assert read_sampling(Fields({"seed": 1}), codec, options, Capabilities(), 7) == replace(unsaid, seed=1)


@pytest.mark.parametrize(
    ("field", "value", "parameter"),
    [
        ("seed", 1, "seed"),
        ("min_tokens", 2, "min_new_tokens"),
        ("top_k", 3, "top_k"),
        ("temperature", 0.5, "temperature"),
    ],
)
def test_field_that_an_engine_lacks_is_refused_by_the_callers_name(
    codec: TextCodec, field: str, value: float, parameter: str
) -> None:
    options = read_response_options(Fields({}), None, Capabilities())
    lacking = Capabilities(sampling_fields=SAMPLING_FIELDS - {parameter})
    with pytest.raises(ApiError, match="this engine does not have it") as caught:
        read_sampling(Fields({field: value}), codec, options, lacking, 7)
    assert (caught.value.status, caught.value.param) == (400, field)
    others = {"seed": 1, "min_tokens": 2, "top_k": 3, "temperature": 0.5}
    del others[field]
    assert read_sampling(Fields(dict(others)), codec, options, lacking, 7) == read_sampling(
        Fields(dict(others)), codec, options, Capabilities(), 7
    )


def test_absent_fields_have_defaults_of_sampling_params(codec: TextCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = partial(SamplingParams, temperature=0.7, top_k=20, min_new_tokens=2, n=3)
    monkeypatch.setattr("areal.services.inference.data_proxy.fields.SamplingParams", changed)
    options = read_response_options(Fields({}), None, Capabilities())
    for given in ({}, {"top_p": 0.9}):
        sampling = read_sampling(Fields(given), codec, options, Capabilities(), 7)
        assert (sampling.temperature, sampling.top_k, sampling.min_new_tokens, sampling.n) == (0.7, 20, 2, 3)


@pytest.mark.parametrize("more", [{}, {"seed": 1}])
@pytest.mark.parametrize(("asked", "of_the_engine"), [(None, 0), (0, 0), (5, 5)])
def test_engine_receives_requested_top_logprobs(
    codec: TextCodec, more: dict[str, int], asked: int | None, of_the_engine: int
) -> None:
    options = read_response_options(Fields({}), asked, Capabilities())
    assert read_sampling(Fields(more), codec, options, Capabilities(), 7).top_logprobs == of_the_engine


def test_more_top_logprobs_than_the_vocabulary_are_the_whole_vocabulary(tokenizer: Path) -> None:
    loaded = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    small = TextCodec(loaded, template=None, end_ids=[2], max_positions=None, vocab_size=16)
    body = {"prompt": [3], "logprobs": 20, "prompt_logprobs": 17}
    request = read_completion(Fields(body), small, Capabilities(prompt_logprobs=True))
    assert (request.sampling.top_logprobs, request.scored) == (16, 16)


def test_temperature_below_engine_minimum_is_refused(codec: TextCodec) -> None:
    options, engine = read_response_options(Fields({}), None, Capabilities()), Capabilities(lowest_temperature=0.01)

    def read(temperature: float) -> float:
        return read_sampling(Fields({"temperature": temperature}), codec, options, engine, 7).temperature

    assert [read(temperature) for temperature in (0, 1e-9, 0.01, 2)] == [0.0, 0.0, 0.01, 2.0]
    with pytest.raises(ApiError, match=r"samples at 0\.01 at least"):
        read(0.009)


def test_request_may_have_sixteen_stops() -> None:
    assert len(read_response_options(Fields({"stop": ["x"] * 16}), None, Capabilities()).stops) == 16
    with pytest.raises(ApiError, match="may hold at most 16 strings"):
        read_response_options(Fields({"stop": ["x"] * 17}), None, Capabilities())


def test_special_token_in_stop_becomes_stop_token_id(codec: TextCodec) -> None:
    options = read_response_options(Fields({"stop": ["<|im_end|>", "word"]}), None, Capabilities())
    special = codec.special_id("<|im_end|>")
    assert special is not None
    assert read_sampling(Fields({}), codec, options, Capabilities(), 7).stop_token_ids == tuple(
        sorted({special, *codec.end_ids})
    )


@pytest.mark.parametrize("bias", [{"1": 100.1}, {"1": -100.1}, {"x": 1}, {"100000000": 1}, {"-1": 1}])
def test_invalid_logit_bias_is_400_naming_field(codec: TextCodec, bias: dict[str, Any]) -> None:
    options = read_response_options(Fields({}), None, Capabilities())
    with pytest.raises(ApiError) as refused:
        read_sampling(Fields({"logit_bias": bias}), codec, options, Capabilities(), 7)
    assert refused.value.status == 400
    whole = Fields({"logit_bias": {"1": 100, "0": -100}})
    assert read_sampling(whole, codec, options, Capabilities(), 7).logit_bias == {1: 100.0, 0: -100.0}


def test_engine_receives_every_sampling_parameter() -> None:
    plain = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    plain |= {"repetition_penalty": 1.0}
    call = EngineCall("c", ((1,),), SamplingParams())
    assert plain.items() <= vllm.wire_body(call, "m").items()
    assert plain.items() <= sglang.wire_body(call)["sampling_params"].items()
