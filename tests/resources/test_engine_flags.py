"""Arguments of engines: named as the engine has them, and not what areal sets itself."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from areal.resources.engine_flags import EMBEDDED, engine_arg_faults, flag_name
from areal.resources.registry import validate
from areal.services.inference.engines.embedded.settings import add_arguments
from areal.services.web.options import add_serve_arguments

OURS = {"model-path", "lora", "host", "port", "admin-key-file", "log-level"}


def embedded_actions() -> dict[str, argparse.Action]:
    parser = argparse.ArgumentParser(add_help=False)
    add_serve_arguments(parser, port=1)
    add_arguments(parser)
    return {action.option_strings[0].removeprefix("--"): action for action in parser._actions}


def test_embedded_flags_are_those_of_its_own_parser() -> None:
    actions = embedded_actions()
    assert set(EMBEDDED) == set(actions) - OURS
    for name, flag in EMBEDDED.items():
        assert flag.type is (actions[name].type or str), name
        assert flag.choices == tuple(actions[name].choices or ()), name


def test_flags_of_ours_are_known_to_be_the_engines() -> None:
    for name in OURS:
        ((argument, fault),) = engine_arg_faults("embedded", {name: "x"})
        assert argument == name and "set by areal" in fault
    assert set(embedded_actions()) >= OURS


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
        ({"dtype": "bfloat"}, 'did you mean "bfloat16"'),
        ({"device": 0}, "must be a text"),
        ({"modelPath": "x"}, "from path"),
    ],
)
def test_fault_names_the_argument_and_what_was_meant(arguments: dict[str, Any], fault: str) -> None:
    ((name, message),) = engine_arg_faults("embedded", arguments)
    assert name in arguments and fault in message


def test_good_arguments_have_no_fault() -> None:
    good = {"maxBatchSize": 8, "kv_memory_gib": 1, "dtype": "auto", "device": "cuda:1", "threads": None}
    assert list(engine_arg_faults("embedded", good)) == []
    assert list(engine_arg_faults("vllm", {"anything": 1})) == []  # nobody was asked
    assert list(engine_arg_faults("vllm", {"compilationConfig.mode": 0}, {"compilation-config"})) == []


@pytest.mark.parametrize("name", ["stream-interval", "streamInterval", "stream_interval"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_stream_interval_above_one_is_refused_since_versions_of_tokens_would_be_wrong(engine: str, name: str) -> None:
    for value in (2, "8", 0, 1.5, True):
        for known in (None, {"stream-interval"}):
            ((argument, fault),) = engine_arg_faults(engine, {name: value}, known)
            assert argument == name and "version" in fault
    for value in (1, "1", None):
        assert list(engine_arg_faults(engine, {name: value})) == []


def test_names_are_read_in_every_spelling() -> None:
    assert {flag_name(name) for name in ("maxBatchSize", "max_batch_size", "max-batch-size")} == {"max-batch-size"}


def test_manifest_says_where_the_argument_is() -> None:
    spec = {"backend": "embedded", "path": "x", "engineArgs": {"maxBatchSiz": 8}}
    ((path, message),) = validate("Model", spec)
    assert path == ("engineArgs", "maxBatchSiz") and "did you mean" in message
    spec = {"backend": "vllm:t2", "path": "x", "engineArgs": {"tensorParallelSize": 4}}
    ((path, message),) = validate("Model", spec)
    assert path == ("engineArgs", "tensorParallelSize") and "from backend" in message
