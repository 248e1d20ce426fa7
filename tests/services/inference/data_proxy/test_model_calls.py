"""LoRA adapters as callers see them: listed beside their model, and chosen by the name in a call."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from areal.services.http.errors import ApiError
from areal.services.inference.data_proxy.model_calls import adapter_of
from tests.services.inference.data_proxy.control.embedded_service import (
    COMPLETIONS,
    EXAMPLE,
    MODEL,
    EmbeddedService,
    build_embedded_service,
)
from tests.services.inference.engines.embedded.support import make_adapter, plain_logits
from tests.services.processes import Processes, wait_until

PROMPT = [1, 5, 6, 7, 8, 14]


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """An adapter of the example's model, the model, and the two as one."""
    folder = tmp_path_factory.mktemp("adapter")
    model = transformers.AutoModelForCausalLM.from_pretrained(EXAMPLE)
    return folder, model, make_adapter(folder, model, seed=4)


@pytest.fixture(scope="module")
def service(module_processes: Processes, merged: tuple[Path, Any, Any]) -> Iterator[EmbeddedService]:
    service = build_embedded_service(module_processes, engine_flags=("--lora", f"scrambled={merged[0]}"))
    names = [MODEL, f"{MODEL}:scrambled"]
    wait_until(lambda: service.ask("GET", "/v1/models").json()["models"] == names, what="the adapter is listed")
    yield service


def first_logprob(service: EmbeddedService, model: str) -> tuple[str, float]:
    """The model of the answer, and the log-probability of its first token."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}
    answer = service.ask("POST", COMPLETIONS, body)
    assert answer.status == 200, answer.body
    reply = answer.json()
    return reply["model"], reply["choices"][0]["logprobs"]["token_logprobs"][0]


@pytest.mark.parametrize("name", ["scrambled", f"{MODEL}:scrambled", MODEL])
def test_call_is_answered_by_named_adapter(service: EmbeddedService, merged: tuple[Path, Any, Any], name: str) -> None:
    answered_by, logprob = first_logprob(service, name)
    adapted = name != MODEL
    assert answered_by == (f"{MODEL}:scrambled" if adapted else MODEL)
    plain = plain_logits(merged[2] if adapted else merged[1], PROMPT)[-1].log_softmax(-1)
    assert abs(logprob - float(plain.max())) < 1e-3


def test_adapter_is_listed_with_parent_model(service: EmbeddedService) -> None:
    listed = service.ask("GET", f"/v1/models/{MODEL}:scrambled").json()
    assert (listed["parent"], listed["max_model_len"]) == (MODEL, 128)


@pytest.mark.parametrize("name", [f"{MODEL}:other", "other", "other:scrambled", f"{MODEL}:"])
def test_unserved_adapter_is_404(service: EmbeddedService, name: str) -> None:
    answer = service.ask("POST", COMPLETIONS, {"model": name, "prompt": PROMPT, "max_tokens": 1})
    assert (answer.status, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_model_name_selects_model_or_adapter() -> None:
    assert adapter_of(None, "m", ()) is None and adapter_of("m", "m", ("a",)) is None
    assert adapter_of("default", "m", ("a",)) is None and adapter_of("default", "m", ("default",)) == "default"
    assert adapter_of("a", "m", ("a",)) == adapter_of("m:a", "m", ("a",)) == "a"
    with pytest.raises(ApiError, match="its adapters are a"):
        adapter_of("n:a", "m", ("a",))
