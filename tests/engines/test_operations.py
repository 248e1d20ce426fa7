"""What an operator and a caller do with a Model on a real engine: constraints, calls, adapters, replicas, updates.

AREAL_VLLM_PYTHON=/path/to/python pytest -m vllm tests/engines --timeout=1500
AREAL_SGLANG_PYTHON=/path/to/python pytest -m sglang tests/engines --timeout=1500

On a CPU SGLang has no adapters, since its kernels for them are Triton's, and neither frees memory; those are left out.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import load as load_module
from tests.e2e.conftest import Box, make_box, tear_down
from tests.e2e.load import Load
from tests.e2e.rollouts import ask
from tests.e2e.test_engines import engine_of
from tests.hub_standin import fill_cache
from tests.services.inference.engines.conformance.engines import ON_GPU, REAL
from tests.services.inference.engines.conformance.models import TOLERANCE, Models, gap, make_models
from tests.services.inference.engines.embedded.support import make_model
from tests.services.tokenizer_folder import write_tokenizer

pytestmark = pytest.mark.timeout(1500)
ENGINES = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in REAL]
NAME = "areal/of-a-test"  # an id of Hugging Face, in a cache of the test's
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


@dataclass
class Deployed:
    box: Box
    engine: str
    models: Models

    def manifest(self, *, replicas: int = 2, arguments: dict[str, Any] | None = None, path: str = NAME) -> str:
        """Of two replicas that are replaced one by one."""
        about = engine_of(self.engine, self.box.folder)
        about["engineArgs"] |= {"maxModelLen" if self.engine == "vllm" else "context-length": 512, **(arguments or {})}
        has_lora = self.has_adapters and path == NAME
        lora = {name: str(folder) for name, folder in self.models.adapters.items()} if has_lora else {}
        spec = {"replicas": replicas, "backend": f"{self.engine}:d1", "path": path, "resources": {"gpus": 0}, **about}
        spec |= {"toolCallParser": "hermes", "lora": lora, "strategy": {"drainTimeoutSeconds": 60}}
        model = {"apiVersion": "areal.dev/v1alpha1", "kind": "Model", "metadata": {"name": "reverse"}, "spec": spec}
        service = {**model, "kind": "InferenceService", "metadata": {"name": "default"}}
        service["spec"] = {"gateway": {"port": self.box.port}}
        return self.box.write("\n---\n".join(map(json.dumps, (service, model))))

    @property
    def has_adapters(self) -> bool:
        return self.engine == "vllm" or ON_GPU

    def chat(self, **body: Any) -> Any:
        """Not recorded: under a grammar the log-probabilities are the grammar's."""
        messages = [{"role": "user", "content": "Hello"}]
        given = {"model": "reverse", "messages": messages, "max_tokens": 100, "store": False, **body}
        status, answer = ask(self.box, "POST", "/v1/chat/completions", given)
        assert status == 200, answer
        return answer["choices"][0]


def deploy(name: str, folder: Path) -> Deployed:
    if REAL[name] not in os.environ:
        pytest.skip(f"{REAL[name]} names no Python that has {name}")
    box = make_box(folder)
    deployed = Deployed(box, name, make_models(folder / "models", tied=True))
    fill_cache(folder / "hf" / "hub", NAME, deployed.models.folders[0])
    box.env |= {"HF_HOME": str(folder / "hf"), "HF_ENDPOINT": "http://127.0.0.1:9"}
    return deployed


@pytest.fixture(scope="module", params=ENGINES)
def deployed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """Two replicas of a Hugging Face id, from a filled cache."""
    found = deploy(request.param, tmp_path_factory.mktemp(request.param))
    try:
        applied = found.box.areal("apply", "-f", found.manifest(), "--timeout", "900s", timeout=960)
        assert applied.code == 0, applied.text
        yield found
    finally:
        tear_down(found.box)


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"structured_outputs": {"regex": "[a-c]{3}[0-9]"}}, "[a-c]{3}[0-9]"),
        ({"structured_outputs": {"choice": ["north", "south"]}}, "north|south"),
        ({"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}}, "yes|no"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA},
                }
            },
            r'\{\s*"city"\s*:\s*"(Oslo|Rome)"\s*\}',
        ),
    ],
    ids=["regex", "choice", "grammar", "json-schema"],
)
def test_answer_has_requested_form(deployed: Deployed, wanted: dict[str, Any], pattern: str) -> None:
    # An untrained model may write blanks, which JSON allows, up to the limit of tokens.
    choices = (deployed.chat(**wanted) for _ in range(8))
    choice = next(each for each in choices if each["finish_reason"] == "stop")
    assert re.fullmatch(pattern, choice["message"]["content"].strip()), choice


def test_forced_tool_call_follows_schema(deployed: Deployed) -> None:
    choice = deployed.chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "weather"}})
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome")


def test_recorded_call_with_grammar_is_refused_by_field(deployed: Deployed) -> None:
    body = {"model": "reverse", "messages": [{"role": "user", "content": "x"}], "logprobs": True}
    body["structured_outputs"] = {"regex": "[ab]"}
    status, answer = ask(deployed.box, "POST", "/v1/chat/completions", body)
    assert status == 400 and answer["error"]["param"] == "structured_outputs.regex", answer


def test_adapter_answers_by_name_with_its_logprobs(deployed: Deployed) -> None:
    if not deployed.has_adapters:
        pytest.skip("SGLang has no adapters on a CPU")
    prompt = [5, 6, 7, 8]
    of_model = {"reverse": deployed.models.versions[0]}
    of_model |= {f"reverse:{name}": model for name, model in deployed.models.adapted.items()}
    for name, model in of_model.items():  # one after the other: see the conformance suite on batches with adapters
        body = {"model": name, "prompt": prompt, "max_tokens": 8, "logprobs": 0, "return_token_ids": True}
        status, answer = ask(deployed.box, "POST", "/v1/completions", {**body, "ignore_eos": True})
        assert status == 200, answer
        choice = answer["choices"][0]
        assert gap(model, prompt, choice["token_ids"], choice["logprobs"]["token_logprobs"]) < TOLERANCE, name


def changed(before: dict[str, int], after: dict[str, int]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def test_killed_engine_under_load_breaks_only_begun_streams(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session stays with its replica: its calls wait for an engine that takes minutes to start."""
    monkeypatch.setattr(load_module, "_DEADLINE_S", 900.0)
    before = deployed.box.pids()
    with Load(deployed.box, sessions=3, strangers=1) as load:
        load.wait_for_all(1)
        load.kills = True
        os.kill(before["engine/0"], signal.SIGKILL)
        done = deployed.box.areal("reconcile", "--timeout", "600s", timeout=660)
        load.wait_for_all(2)
    assert done.code == 0, done.text
    assert load.broken == [] and load.forgiven <= 4
    assert changed(before, deployed.box.pids()) == {"engine/0"}


def test_rolling_update_and_drain_under_load_lose_nothing(deployed: Deployed) -> None:
    argument = {"vllm": {"maxNumSeqs": 16}, "sglang": {"max-running-requests": 16}}[deployed.engine]
    before = deployed.box.pids()
    with Load(deployed.box, sessions=3, strangers=1) as load:
        load.wait_for_all(1)
        path = deployed.manifest(arguments=argument)
        rolled = deployed.box.areal("apply", "-f", path, "--timeout", "900s", timeout=960)
        load.wait_for_all(1)
        after = deployed.box.pids()
        scaled = deployed.box.areal("scale", "model/reverse", "--replicas", "1", timeout=270)
        load.wait_for_all(1)
    assert rolled.code == 0, rolled.text
    assert {"engine/0", "engine/1"} <= changed(before, after)
    assert scaled.code == 0, scaled.text
    assert load.broken == []
    assert [name for name in deployed.box.pids() if name.startswith("engine")] == ["engine/0"]


def failed_apply(name: str, folder: Path, model: Path, arguments: dict[str, Any]) -> tuple[str, list[str]]:
    """What `apply` prints, and what `describe` and `events` print after it, of a Model that cannot run."""
    found = deploy(name, folder)
    try:
        path = found.manifest(replicas=1, arguments=arguments, path=str(model))
        applied = found.box.areal("apply", "-f", path, "--timeout", "600s", timeout=660)
        assert applied.code != 0, applied.text
        later = [found.box.areal(*words).text for words in (("describe", "model/reverse"), ("events", "model/reverse"))]
        return applied.text, later
    finally:
        tear_down(found.box)


@pytest.mark.parametrize("name", ENGINES)
def test_model_exceeding_memory_fails_apply_with_engine_error(name: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    positions = 2**20 if name == "vllm" else 2**23  # SGLang's 2 GB of rotations: more than others free meanwhile
    make_model(model, "Qwen3", vocab_size=320, hidden_size=128, num_attention_heads=2, num_key_value_heads=2,
               head_dim=64, num_hidden_layers=2, max_position_embeddings=positions)  # fmt: skip
    write_tokenizer(model)
    arguments = (
        {"maxModelLen": positions} if name == "vllm" else {"mem-fraction-static": "0.000001", "max-total-tokens": None}
    )
    reason = r"KV cache" if name == "vllm" else r"[Mm]emory"
    applied, later = failed_apply(name, tmp_path, model, arguments)
    for text in (applied, *later):
        assert re.search(reason, "\n".join(text.splitlines()[-40:])), text


@pytest.mark.vllm
def test_model_dying_at_first_token_fails_apply(tmp_path: Path) -> None:
    """vLLM's CPU backend has no heads of 16, and answers /health before it knows."""
    if ON_GPU:
        pytest.skip("a GPU has heads of 16")
    model = tmp_path / "model"
    make_model(model, "Qwen3", vocab_size=320, hidden_size=64, num_attention_heads=4, num_key_value_heads=4,
               head_dim=16, num_hidden_layers=2, max_position_embeddings=512)  # fmt: skip
    write_tokenizer(model)
    applied, later = failed_apply("vllm", tmp_path, model, {})
    for text in (applied, *later):
        assert "Unsupported CPU attention configuration" in text, text
    assert any("Unsupported CPU attention" in line for line in applied.splitlines()[:40]), "within the first screen"
