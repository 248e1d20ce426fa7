"""The backend string in both spellings, with the column of each fault; arguments of engines and those areal sets."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from areal.resources.backend import (
    ENGINES,
    INFERENCE_ENGINES,
    BackendError,
    Part,
    engine_arg_faults,
    engine_args_schema,
    engine_arguments,
    flag_name,
    own_flags,
    parse_backend,
)
from areal.resources.validation import validate
from areal.wire.processes import EmbeddedEngineConfig


@pytest.mark.parametrize(
    ("text", "canonical", "world"),
    [
        ("embedded", "embedded:d1", 1),
        ("sglang:d4t2", "sglang:d4t2", 8),
        ("vllm:t2", "vllm:d1t2", 2),
        ("sglang:t2d4", "sglang:d4t2", 8),
        ("megatron:d2t4p2", "megatron:d2t4p2", 16),
        ("megatron:d2t2c2e4", "megatron:d2t2c2e4", 8),
        ("megatron:(attn:d4p2t2c2|ffn:d2p2t4e2)", "megatron:(attn:d4t2p2c2|ffn:d2t4p2e2)", 32),
        ("megatron:(attn:d2t2|ffn:t2e2)", "megatron:d2t2e2", 4),
        ("sglang:d16+fsdp:d32", "sglang:d16+fsdp:d32", 48),
        ("sglang.d16p1m1+d32p2m1", "sglang:d16+megatron:d32p2", 80),
        ("sglang.d4p1m2+d8p1m1", "sglang:d4t2+fsdp:d8", 16),
        ("d8p1t1", "fsdp:d8", 8),
        ("d2t2", "megatron:d2t2", 4),
        ("sglang+d2t2", "sglang:d1+megatron:d2t2", 5),
        ("sglang:d01", "sglang:d1", 1),
        ("megatron.d2m2", "megatron:d2t2", 4),
        ("megatron:d3e3p2", "megatron:d3p2e3", 6),
        ("megatron:(attn:d2t2|ffn:d2e2)", "megatron:(attn:d2t2|ffn:d2e2)", 4),
        ("megatron:(attn:d4|ffn:d2t2)", "megatron:(attn:d4|ffn:d2t2)", 4),
        ("sglang:d100000t10", "sglang:d100000t10", 1_000_000),
    ],
)
def test_parse_backend_canonicalises_both_spellings(text: str, canonical: str, world: int) -> None:
    allocation = parse_backend(text)
    assert str(allocation) == canonical
    assert allocation.world_size == world


def test_parse_backend_separates_inference_and_training() -> None:
    allocation = parse_backend("fsdp:d8+vllm:d2t2")
    assert allocation.inference == Part("vllm", data=2, tensor=2)
    assert allocation.training == Part("fsdp", data=8)
    assert allocation.inference.devices_per_replica == 2


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("", 1, "an engine is missing"),
        ("sglan:d2", 1, 'did you mean "sglang"'),
        ("sglang:", 8, "dimensions are missing"),
        ("sglang:d", 9, "needs a number from 1 up"),
        ("sglang:d0", 9, "needs a number from 1 up"),
        ("sglang:d2x2", 10, 'unknown dimension "x"'),
        ("sglang:d2d2", 10, "given twice"),
        ("sglang:d2 t2", 10, 'expected a dimension like d2, found " "'),
        ("sglang;d2", 7, 'expected ":" after sglang'),
        ("sglang:d2+", 11, "an engine is missing"),
        ("sglang:d2+vllm:d2", 11, "both parts are inference engines"),
        ("sglang:d2+fsdp:d2+fsdp:d2", 25, "at most two parts"),
        ("fsdp:d2p2", 1, "fsdp has no pipeline parallelism"),
        ("fsdp:(attn:d2|ffn:d2)", 6, "fsdp has one layout for all layers"),
        ("megatron:(attn:d2)", 10, "is written (attn:d4t2|ffn:d2t1e4)"),
        ("megatron:(attn:d2e2|ffn:d2)", 16, "e is of ffn"),
        ("megatron:d2e3", 1, "experts cannot share the 2 devices of a stage evenly over e3 of t1"),
        ("megatron:d２", 11, "needs a number from 1 up"),
        ("megatron:(attn:d2|ffn:d1c2)", 23, "c is of attn"),
        ("megatron:(attn:d2|ffn:d4)", 10, "attn is on 2 devices and ffn (d*t*p*e) on 4"),
        ("megatron:(attn:d2p2|ffn:d4)", 10, "a layer is on one stage"),
        ("embedded:t2", 1, "only d can be above 1"),
        ("sglang:d999999t999999", 1, "more than anyone has"),
        ("sglang:d100001t10", 1, "1000010 devices are more than anyone has"),
        ("sglang:d1000000", 9, "needs a number from 1 up"),
        ("sglang:d00", 9, "needs a number from 1 up"),
        ("sglang:d2m2", 10, 'unknown dimension "m"'),
        ("sglang.d2t2m2", 12, 'dimension "m" (tensor) is given twice'),
        ("megatron:(attn:d2m2|ffn:d4)", 18, 'unknown dimension "m"'),
        ("megatron:(attn:d4|ffn:d2m2)", 25, 'unknown dimension "m"'),
        ("sglang:d1+fsdp:d1+", 19, "an engine is missing"),
        ("+d2", 1, "an engine is missing"),
        ("fsdp:d2+megatron:d2", 9, "both parts are training engines"),
        ("sglang:d99999999999999999999", 9, "needs a number"),
    ],
)
def test_parse_backend_error_names_column(text: str, column: int, message: str) -> None:
    with pytest.raises(BackendError) as caught:
        parse_backend(text)
    assert caught.value.column == column
    assert message in caught.value.message


def test_parse_backend_of_model_requires_one_inference_engine() -> None:
    with pytest.raises(BackendError, match="one engine only") as caught:
        parse_backend("sglang:d2+fsdp:d2", engines=INFERENCE_ENGINES, single=True)
    assert caught.value.column == 10
    with pytest.raises(BackendError, match='unknown engine "fsdp"'):
        parse_backend("fsdp:d2", engines=INFERENCE_ENGINES, single=True)
    with pytest.raises(BackendError, match="does not begin with an engine, for example sglang:d4t2"):
        parse_backend("d4t2", engines=INFERENCE_ENGINES, single=True)


@given(st.text("sglangvmd:.+0123tpce ", max_size=24) | st.text(max_size=12))
def test_parse_backend_of_any_text_parses_or_names_column(text: str) -> None:
    try:
        allocation = parse_backend(text)
    except BackendError as error:
        assert 1 <= error.column <= len(text) + 1
    else:
        assert parse_backend(str(allocation)) == allocation


@given(*[st.sampled_from([1, 2, 4])] * 4)
def test_parse_backend_of_expert_layout_round_trips(data: int, tensor: int, own: int, e: int) -> None:
    size = data * tensor
    if size % (own * e):
        return
    allocation = parse_backend(f"megatron:(attn:d{data}t{tensor}|ffn:d{size // (own * e)}t{own}e{e})")
    assert parse_backend(str(allocation)) == allocation and allocation.world_size == size
    assert (allocation.parts[0].expert_tensor, allocation.parts[0].expert) == (own, e)


@given(st.sampled_from(ENGINES), st.integers(1, 64))
def test_parse_backend_canonical_form_is_stable(engine: str, size: int) -> None:
    allocation = parse_backend(f"{engine}:d{size}")
    assert str(parse_backend(str(allocation))) == str(allocation)


OURS = {"model-path", "lora", "host", "port", "admin-key-file", "log-level"}


def test_embedded_flags_match_configuration() -> None:
    flags = own_flags("embedded")
    assert set(flags) == {field.name.replace("_", "-") for field in fields(EmbeddedEngineConfig)} - OURS
    assert flags["dtype"].choices == ("auto", "float32", "bfloat16", "float16")
    assert (flags["device"].type, flags["max-model-len"].type, flags["drain-timeout"].type) == (str, int, float)


def test_areal_flags_exist_in_engine() -> None:
    for name in OURS:
        ((argument, fault),) = engine_arg_faults("embedded", {name: "x"})
        assert argument == name and "set by areal" in fault


def fits_schema(engine: str, arguments: dict[str, Any]) -> bool:
    """Editors check a manifest by the schema: it must say what the command line says."""
    return Draft202012Validator(engine_args_schema(engine)).is_valid(arguments)


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"maxBatchSiz": 8}, 'no such argument (did you mean "max-batch-size"?)'),
        ({"tensor_parallel_size": 8}, "no such argument"),
        ({"max-batch-size": "8"}, "must be a whole number, not '8'"),
        ({"max-batch-size": 1.5}, "must be a whole number"),
        ({"max-batch-size": True}, "must be a whole number"),
        ({"max-batch-size": 0}, "must be above 0"),
        ({"kvMemoryGib": "much"}, "must be a number"),
        ({"kvMemoryGib": 0}, "must be above 0"),
        ({"dtype": "bfloat"}, 'did you mean "bfloat16"'),
        ({"device": 0}, "must be a text"),
        ({"modelPath": "x"}, "from path"),
    ],
)
def test_fault_names_argument_and_suggestion(arguments: dict[str, Any], fault: str) -> None:
    ((name, message),) = engine_arg_faults("embedded", arguments)
    assert name in arguments and fault in message
    assert not fits_schema("embedded", arguments)


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"hitlTurns": 1}, ""),
        ({"hitlTurns": 0}, "must be at least 1, not 0"),
        ({"hitlTurns": True}, "must be a whole number, not True"),
        ({"hitlTurns": None}, ""),
        ({"sessionTtl": 0}, ""),
        ({"sessionTtl": 0.5}, ""),
        ({"sessionTtl": -0.5}, "must be at least 0, not -0.5"),
        ({"sessionTtl": "5"}, "must be a number, not '5'"),
        ({"sessionTtl": True}, "must be a number, not True"),
        ({"requestTimeout": 0}, "must be above 0, not 0"),
        ({"stateDir": "/x"}, ""),
        ({"stateDir": 5}, "must be a text, not 5"),
        ({"state.dir": "/x"}, "the data proxy has no such argument"),
        ({"engineUrl": "http://x"}, "is set by areal itself, from engineUrl"),
        ({"port": 1}, "is set by areal itself"),
    ],
)
def test_data_proxy_arguments_are_checked_by_type_and_range(arguments: dict[str, Any], fault: str) -> None:
    found = [message for _, message in engine_arg_faults("data proxy", arguments)]
    assert len(found) == bool(fault) and all(fault in message for message in found)
    assert fits_schema("data proxy", arguments) is not bool(fault)


@pytest.mark.parametrize(("device", "fits"), [("cpu", True), ("cuda:12", True), ("cuda:", False), ("xcpu", False)])
def test_text_argument_must_match_its_pattern(device: str, fits: bool) -> None:
    faults = list(engine_arg_faults("embedded", {"device": device}))
    assert (not faults) == fits == fits_schema("embedded", {"device": device})
    assert all("must match" in fault for _, fault in faults)


def test_good_arguments_have_no_fault() -> None:
    good = {"maxBatchSize": 8, "kv_memory_gib": 1, "dtype": "auto", "device": "cuda:1", "threads": None}
    assert list(engine_arg_faults("embedded", good)) == [] and fits_schema("embedded", good)
    assert list(engine_arg_faults("vllm", {"anything": 1})) == []  # no engine was asked
    assert list(engine_arg_faults("vllm", {"compilationConfig.mode": 0}, {"compilation-config"})) == []


@pytest.mark.parametrize(
    "name", ["model", "modelPath", "tensor_parallel_size", "tp", "pipeline-parallel-size", "api-key"]
)
def test_other_names_of_flags_set_by_areal_are_refused(name: str) -> None:
    ((argument, fault),) = engine_arg_faults("sglang", {name: 2}, {"model", "tensor-parallel-size"})
    assert argument == name and "set by areal" in fault


@pytest.mark.parametrize("name", ["stream-interval", "streamInterval", "stream_interval"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_stream_interval_above_one_is_refused(engine: str, name: str) -> None:
    value: object
    for value in (2, "8", 0, 1.5, True):
        for known in (None, {"stream-interval"}):
            ((argument, fault),) = engine_arg_faults(engine, {name: value}, known)
            assert argument == name and "version" in fault
    for value in (1, "1", None):
        assert list(engine_arg_faults(engine, {name: value})) == []


def test_names_are_read_in_every_spelling() -> None:
    assert {flag_name(name) for name in ("maxBatchSize", "max_batch_size", "max-batch-size")} == {"max-batch-size"}


def test_manifest_fault_gives_argument_position() -> None:
    spec = {"backend": "embedded", "path": "x", "engineArgs": {"maxBatchSiz": 8}}
    ((path, message),) = validate("Model", spec)
    assert path == ("engineArgs", "maxBatchSiz") and "did you mean" in message
    spec = {"backend": "vllm:t2", "path": "x", "engineArgs": {"tensorParallelSize": 4}}
    ((path, message),) = validate("Model", spec)
    assert path == ("engineArgs", "tensorParallelSize") and "from backend" in message


def test_job_arguments_omit_derived_and_empty_values() -> None:
    section = {"model": "x", "tensor_parallel_size": 2, "max_model_len": 10, "seed": None, "dtype": "", "extra": {}}
    assert engine_arguments("vllm", section, "bfloat16") == {"max_model_len": 10}
    assert engine_arguments("embedded", {"threads": 2}, "bfloat16") == {"dtype": "bfloat16", "threads": 2}
    assert engine_arguments("embedded", {"dtype": "float32"}, "bfloat16") == {"dtype": "float32"}
    assert engine_arguments("embedded", {"dtype": None}, "bfloat16") == {"dtype": "bfloat16"}
