"""Asks an engine's routes that areal uses, in one order, and keeps the form of each reply.

    python -m tests.engines.capture sglang http://127.0.0.1:30000 --model DIR --write FOLDER/sglang-0.5.23.json
    python -m tests.engines.capture sglang http://127.0.0.1:30000 --model DIR --against FOLDER/sglang-0.5.23.json

FOLDER is tests/engines/replies. The first command records a real server, the second one says where another version
differs. The default suite asks the stand-ins the same (``conformance/test_replies.py``). The server is left as it was
found: it serves the weights of ``--model``, which it has to be started with. ``--adapter``: a LoRA adapter of that
model, for a vLLM with ``--enable-lora`` and ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=True``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from areal.client.command import free_port

_GREEDY = {"temperature": 0.0, "max_new_tokens": 3, "ignore_eos": True}
_GENERATE = {"input_ids": [5, 6, 7], "sampling_params": _GREEDY, "return_logprob": True, "top_logprobs_num": 2}
_PROMPT = {"prompt": [5, 6, 7], "model": "MODEL", "temperature": 0.0, "max_tokens": 3, "ignore_eos": True}
_WHOLE = {
    "model": "MODEL",
    "token_ids": [5, 6, 7],
    "sampling_params": {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True, "logprobs": 2, "detokenize": False},
    "stream": False,
    "request_id": "whole",
}
_IDS = {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 2}
_UPDATE = {"weight_version": "3", "abort_all_requests": False, "flush_cache": True}
_TENSORS = {"names": [], "dtypes": [], "shapes": [], "group_name": "none", **_UPDATE}
_SCORED = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 1}
_SEEDED = {**_GENERATE, "sampling_params": {**_GREEDY, "seed": 7}, "logprob_start_len": -1, "rid": "seeded"}
_LORA = {"lora_name": "none", "lora_path": "/nowhere"}
_ADAPTER = {"lora_name": "pirate", "lora_path": "ADAPTER"}
_TOO_LONG = [5] * 100_000
_LONG_STREAM = {**_GENERATE, "input_ids": _TOO_LONG, "stream": True, "logprob_start_len": -1}
_NO_TOKEN = [5, 10**7]  # outside of the vocabulary
_GROUP = {"master_address": "127.0.0.1", "master_port": "PORT", "rank_offset": 0, "world_size": 1}  # of its own alone


def _rpc(method: str, **order: Any) -> tuple[str, Any]:
    return "POST /collective_rpc", {"method": f"areal_{method}", "kwargs": order}


# name, method and path, body; in a body MODEL and ADAPTER are the folders, and PORT is a free one
EXCHANGES: dict[str, tuple[tuple[str, str, Any], ...]] = {
    "sglang": (
        ("health", "GET /health", None),
        ("ready", "GET /ready", None),
        ("model", "GET /model_info", None),
        ("server", "GET /server_info", None),
        ("models", "GET /v1/models", None),
        ("loads", "GET /v1/loads", None),
        ("stream", "POST /generate", {**_GENERATE, "stream": True, "logprob_start_len": -1, "rid": "stream"}),
        (
            "score",
            "POST /generate",
            {**_GENERATE, "sampling_params": _SCORED, "stream": False, "logprob_start_len": 0},
        ),
        ("abort of none", "POST /abort_request", {"rid": "none"}),
        ("pause", "POST /pause_generation", {"mode": "retract"}),
        ("ready while paused", "GET /ready", None),
        ("model while paused", "GET /model_info", None),
        ("checksum", "POST /weights_checker", {"action": "checksum"}),
        ("update", "POST /update_weights_from_disk", {"model_path": "MODEL", **_UPDATE}),
        ("update from nowhere", "POST /update_weights_from_disk", {"model_path": "/nowhere", **_UPDATE}),
        ("end of no session", "POST /end_weight_update", {}),
        ("broadcast without session", "POST /update_weights_from_distributed", _TENSORS),
        ("begin", "POST /begin_weight_update", {}),
        ("begin again", "POST /begin_weight_update", {}),
        ("broadcast without group", "POST /update_weights_from_distributed", _TENSORS),
        ("end", "POST /end_weight_update", {}),
        ("leave no group", "POST /destroy_weights_update_group", {"group_name": "none"}),
        ("join", "POST /init_weights_update_group", {**_GROUP, "group_name": "alone", "backend": "gloo"}),
        ("join again", "POST /init_weights_update_group", {**_GROUP, "group_name": "alone", "backend": "gloo"}),
        ("begin of a broadcast", "POST /begin_weight_update", {}),
        ("broadcast", "POST /update_weights_from_distributed", {**_TENSORS, "group_name": "alone"}),
        ("end of a broadcast", "POST /end_weight_update", {}),
        ("leave", "POST /destroy_weights_update_group", {"group_name": "alone"}),
        ("resume", "POST /continue_generation", {}),
        ("version", "POST /update_weight_version", {"new_version": "default", "abort_all_requests": False}),
        ("flush", "POST /flush_cache", {}),
        ("release", "POST /release_memory_occupation", {}),
        ("restore", "POST /resume_memory_occupation", {}),
        ("whole", "POST /generate", {**_GENERATE, "stream": False, "logprob_start_len": -1, "rid": "whole"}),
        ("too long", "POST /generate", {**_LONG_STREAM, "rid": "too long"}),
        ("field that is none", "POST /generate", {**_SEEDED, "stream": False}),
        ("field that is none in a stream", "POST /generate", {**_SEEDED, "stream": True}),
        ("load of no adapter", "POST /load_lora_adapter", _LORA),
        ("unload of no adapter", "POST /unload_lora_adapter", {"lora_name": "none"}),
        ("no route", "GET /no_such_route", None),
    ),
    "vllm": (
        ("health", "GET /health", None),
        ("models", "GET /v1/models", None),
        ("weights", "GET /weight_info", None),
        ("paused", "GET /is_paused", None),
        ("stream", "POST /v1/completions", {**_PROMPT, **_IDS, "stream": True, "request_id": "stream"}),
        ("score", "POST /v1/completions", {**_PROMPT, "max_tokens": 1, "prompt_logprobs": 1}),
        ("greedy choices", "POST /v1/completions", {**_PROMPT, **_IDS, "n": 2, "stream": True, "request_id": "two"}),
        ("too long", "POST /v1/completions", {**_PROMPT, **_IDS, "prompt": _TOO_LONG, "stream": True}),
        ("no token", "POST /v1/completions", {**_PROMPT, **_IDS, "prompt": _NO_TOKEN, "stream": True}),
        ("no model", "POST /v1/completions", {**_PROMPT, **_IDS, "model": "none", "stream": True}),
        ("whole", "POST /inference/v1/generate", _WHOLE),
        ("spans at the end of a stream", "POST /inference/v1/generate", {**_WHOLE, "stream": True}),
        ("too long a whole", "POST /inference/v1/generate", {**_WHOLE, "token_ids": _TOO_LONG}),
        ("no token in a whole", "POST /inference/v1/generate", {**_WHOLE, "token_ids": _NO_TOKEN}),
        ("no model of a whole", "POST /inference/v1/generate", {**_WHOLE, "model": "none"}),
        ("pause", "POST /pause?mode=keep", {}),
        ("pause again", "POST /pause?mode=keep", {}),
        ("paused now", "GET /is_paused", None),
        ("health while paused", "GET /health", None),
        ("forget", *_rpc("forget")),
        ("state", *_rpc("state")),
        ("update", *_rpc("load_weights", path="MODEL")),
        ("update from nowhere", *_rpc("load_weights", path="/nowhere")),
        ("stage from nowhere", *_rpc("stage", version=9, path="/nowhere")),
        ("stage of no group", *_rpc("stage", version=9, group="none", layout=[])),
        ("load of nothing staged", *_rpc("load_staged", version=9)),
        ("stage", *_rpc("stage", version=9, path="MODEL")),
        ("load of what is staged", *_rpc("load_staged", version=9)),
        ("leave no group", *_rpc("forget", group="none")),
        ("no such method", *_rpc("nothing")),
        ("resume", "POST /resume", {}),
        ("resume again", "POST /resume", {}),
        ("version", "POST /update_weight_version", {"new_version": "default"}),
        ("sleep", "POST /sleep?level=1", {}),
        ("wake up", "POST /wake_up", {}),
        ("load of no adapter", "POST /v1/load_lora_adapter", _LORA),
        ("unload of no adapter", "POST /v1/unload_lora_adapter", {"lora_name": "none"}),
        ("adapter", "POST /v1/load_lora_adapter", _ADAPTER),
        ("adapter again", "POST /v1/load_lora_adapter", _ADAPTER),
        ("adapter in its place", "POST /v1/load_lora_adapter", {**_ADAPTER, "load_inplace": True}),
        ("models with an adapter", "GET /v1/models", None),
        ("whole of an adapter", "POST /inference/v1/generate", {**_WHOLE, "model": "pirate"}),
        ("unload of an adapter", "POST /v1/unload_lora_adapter", {"lora_name": "pirate"}),
        ("metrics", "GET /metrics", None),
        ("no route", "GET /no_such_route", None),
    ),
}
_TOKEN = re.compile(r"\d+$")  # names that are token ids
_SAMPLES = ("vllm:generation_tokens_total", "vllm:num_requests_running", "vllm:num_requests_waiting")
_LONG = {"server": ("stream_interval", "version", "context_length")}  # only these fields of a long answer


def replies(engine: str, url: str, model: str, adapter: str) -> dict[str, Any]:
    """Of each exchange by its name: status, content type, the form of the body or of each kind of event, the message of
    a failure."""
    held = {"MODEL": model, "ADAPTER": adapter, "PORT": free_port()}
    found = {}
    for name, route, body in EXCHANGES[engine]:
        found[name] = _reply(name, url, route, body, held)
        while "running" in found[name].get("results", ()):
            time.sleep(0.05)
            found[name] = _reply(name, url, *_rpc("state"), held)
    return found


def _reply(name: str, url: str, route: str, body: Any, held: Mapping[str, Any]) -> dict[str, Any]:
    method, path = route.split(" ")
    text = json.dumps(body)
    for word, value in held.items():
        text = text.replace(f'"{word}"', json.dumps(value))
    data = None if body is None else text.encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            status, kind, text = answer.status, answer.headers.get_content_type(), answer.read().decode()
    except urllib.error.HTTPError as error:
        status, kind, text = error.code, error.headers.get_content_type(), error.read().decode()
    reply: dict[str, Any] = {"status": status}
    if kind == "text/event-stream":
        events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        forms = [form(json.loads(event)) for event in events if event != "[DONE]"]
        first = {"first": forms[0]} if len(forms) > 1 else {}  # the tokens of a short answer may come at once
        failure = {"message": events[0][:300]} if "error" in json.loads(events[0]) else {}
        return reply | {"type": kind, "ends": events[-1], **first, "last": forms[-1], **failure}
    if kind == "application/json":
        value = json.loads(text)
        if name in _LONG:
            value = {field: value[field] for field in _LONG[name] if field in value}
        reply |= {"type": kind, "body": form(value)}
        if path == "/collective_rpc" and status == 200:
            reply["results"] = [str(each).replace(held["MODEL"], "MODEL") for each in value["results"]]
        if status >= 400:
            reply["message"] = text.replace(held["MODEL"], "MODEL")[:300]
    elif path == "/metrics":
        reply["samples"] = sorted(
            name for name in _SAMPLES if re.search(rf"^{name}\{{[^}}]*\}} [0-9.e+]+$", text, re.M)
        )
    elif text:
        reply["text"] = text.replace(held["MODEL"], "MODEL")[:300]
    return reply


def form(value: Any) -> Any:
    """A JSON value with its types in place of its values; a list has those of its first element."""
    if isinstance(value, Mapping):
        return {_TOKEN.sub("TOKEN", str(name)): form(value[name]) for name in sorted(value)}
    if isinstance(value, list):
        return [form(value[0])] if value else []
    return {bool: "bool", int: "number", float: "number", str: "text", type(None): "null"}[type(value)]


def differences(expected: Any, found: Any, path: str, *, whole: bool) -> Iterator[str]:
    """Where ``found`` is not as ``expected``; a null fits all. Unless ``whole``, ``found`` may have less."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        for name in sorted(found.keys() - expected.keys()):
            yield f"{path}.{name}: is new ({found[name]})"
        for name in sorted(expected.keys() - found.keys()) if whole else ():
            yield f"{path}.{name}: is gone"
        for name in sorted(expected.keys() & found.keys()):
            yield from differences(expected[name], found[name], f"{path}.{name}", whole=whole)
    elif isinstance(expected, list) and isinstance(found, list):
        for number, (one, other) in enumerate(zip(expected, found, strict=False)):
            yield from differences(one, other, f"{path}[{number}]", whole=whole)
    elif expected != found and "null" not in (expected, found):
        yield f"{path}: was {expected}, is {found}"


def compare(recorded: Mapping[str, Any], found: Mapping[str, Any], *, whole: bool) -> list[str]:
    """``whole`` false: ``found`` is a stand-in's, which may leave fields out and has messages of its own."""
    lines: list[str] = []
    for name, expected in recorded.items():
        mine = dict(found.get(name, {}))
        if not whole:
            mine.pop("message", None)
            mine.pop("text", None)
        lines += differences(expected, mine, name, whole=whole)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=sorted(EXCHANGES))
    parser.add_argument("url")
    parser.add_argument("--model", required=True, help="the folder that the server was started with")
    parser.add_argument("--adapter", default="/nowhere", help="the folder of a LoRA adapter")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--against", type=Path)
    options = parser.parse_args()
    found = replies(options.engine, options.url.rstrip("/"), options.model, options.adapter)
    if options.write:
        options.write.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    if options.against:
        lines = compare(json.loads(options.against.read_text()), found, whole=True)
        print("\n".join(lines) or "no difference")
        sys.exit(bool(lines))


if __name__ == "__main__":
    main()
