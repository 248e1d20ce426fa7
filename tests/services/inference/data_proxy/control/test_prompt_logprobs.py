"""``echo`` with ``logprobs``, and ``prompt_logprobs``: how lm-eval's ``local-completions`` scores the choices of a
question, against a plain forward pass."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from tests.services.inference.data_proxy.control.embedded_service import (
    COMPLETIONS,
    EXAMPLE,
    MODEL,
    EmbeddedService,
    build_embedded_service,
)
from tests.services.inference.engines.embedded.support import plain_logits
from tests.services.processes import Processes, wait_until

ASKED = [1, 5, 6, 7, 8, 14]
CHOICES = [[8, 7, 6, 5, 2], [5, 6, 7, 8, 2], [9, 9], [4]]
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(EXAMPLE)


@pytest.fixture(scope="module")
def service(module_processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedService]:
    service = build_embedded_service(module_processes, "--state-dir", str(tmp_path_factory.mktemp("state")))
    wait_until(lambda: service.ask("GET", "/rl/sessions").json().get("sessions"), what="the journal is known")
    yield service


def plain(model: Any, tokens: list[int]) -> torch.Tensor:
    """[len(tokens) - 1, vocab]"""
    return plain_logits(model, tokens).log_softmax(-1)[:-1]


def ask(service: EmbeddedService, **body: Any) -> Any:
    answer = service.ask("POST", COMPLETIONS, {"model": MODEL, "temperature": 0, **body})
    assert answer.status == 200, answer.body
    return answer.json()


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_choice_scores_match_forward_pass(service: EmbeddedService, model: Any, max_tokens: int) -> None:
    prompts = [ASKED + choice for choice in CHOICES]
    reported = ask(service, prompt=prompts, max_tokens=max_tokens, logprobs=1, echo=True, seed=1234)
    for prompt, choice, one in zip(prompts, CHOICES, reported["choices"], strict=True):
        logprobs = one["logprobs"]
        length = len(prompt) + max_tokens
        assert {len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {length}
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        end = len(prompt)
        expected = plain(model, prompt)[len(ASKED) - 1 :]
        of_choice = expected.gather(1, torch.tensor(choice)[:, None])[:, 0]
        assert sum(logprobs["token_logprobs"][len(ASKED) : end]) == pytest.approx(float(of_choice.sum()), abs=TOLERANCE)
        # As lm-eval finds out whether a choice is the greedy answer.
        tops = zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
        is_greedy = all(value == max(top.values()) for value, top in list(tops)[len(ASKED) : end])
        assert is_greedy == (expected.argmax(-1).tolist() == choice)
    assert reported["usage"]["completion_tokens"] == max_tokens * len(CHOICES)


def test_long_prompt_scored_in_chunks_matches_whole(service: EmbeddedService, model: Any) -> None:
    prompt = [1, *(4 + number * 7 % 10 for number in range(110))]
    (one,) = ask(service, prompt=prompt, max_tokens=0, logprobs=0, echo=True)["choices"]
    expected = plain(model, prompt).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert one["logprobs"]["token_logprobs"][1:] == pytest.approx(expected.tolist(), abs=TOLERANCE)
    assert one["finish_reason"] == "length"


def test_prompt_logprobs_are_keyed_by_token_like_vllm(service: EmbeddedService, model: Any) -> None:
    (one,) = ask(service, prompt=ASKED, max_tokens=1, prompt_logprobs=2)["choices"]
    reported, expected = one["prompt_logprobs"], plain(model, ASKED)
    assert reported[0] is None and len(reported) == len(ASKED)
    for token, row, entry in zip(ASKED[1:], expected, reported[1:], strict=True):
        assert {str(token), *map(str, row.topk(2).indices.tolist())} == set(entry)
        for each, about in entry.items():
            assert about["logprob"] == pytest.approx(float(row[int(each)]), abs=TOLERANCE)


def test_prompt_logprobs_are_returned_beside_echo_logprobs(service: EmbeddedService) -> None:
    for prompt in (ASKED, ASKED[:1]):
        (one,) = ask(service, prompt=prompt, max_tokens=1, prompt_logprobs=0, logprobs=2, echo=True)["choices"]
        assert [entry and list(entry) for entry in one["prompt_logprobs"]] == [None, *([str(t)] for t in prompt[1:])]
        (plainly,) = ask(service, prompt=prompt, max_tokens=1, logprobs=2, echo=True)["choices"]
        assert plainly["logprobs"] == one["logprobs"] and "prompt_logprobs" not in plainly


@pytest.mark.parametrize("body", [{"logprobs": 1, "echo": True}, {"prompt_logprobs": 2}])
def test_retry_returns_prompt_logprobs(service: EmbeddedService, body: dict[str, Any]) -> None:
    started = service.ask("POST", "/rl/start_session", {"task_id": "scored"}).json()
    key, headers = started["sessions"][0]["session_api_key"], {"Idempotency-Key": "one"}
    body = {"model": MODEL, "prompt": [ASKED, ASKED[:3]], "max_tokens": 1, "n": 2, **body}
    first, again = (service.gateway.call("POST", COMPLETIONS, body, key=key, headers=headers) for _ in range(2))
    assert (first.status, again.status) == (200, 200)
    assert first.body == again.body


@pytest.mark.parametrize("prompt", ["12<eos>34=", "1\N{SNOWMAN}2="])
def test_echo_returns_prompt_as_sent(service: EmbeddedService, prompt: str) -> None:
    (one,) = ask(service, prompt=prompt, max_tokens=0, echo=True)["choices"]
    assert one["text"] == prompt


def test_echo_of_token_ids_returns_their_text(service: EmbeddedService) -> None:
    (one,) = ask(service, prompt=ASKED, max_tokens=0, logprobs=0, echo=True)["choices"]
    tokens, offsets = one["logprobs"]["tokens"], one["logprobs"]["text_offset"]
    assert one["text"] == "".join(tokens)
    assert all(one["text"].startswith(token, offset) for token, offset in zip(tokens, offsets, strict=True))
    assert one["logprobs"]["top_logprobs"] is None


def test_text_prompt_echo_includes_tokens(service: EmbeddedService) -> None:
    (one,) = ask(service, prompt="1234=", max_tokens=2, logprobs=1, echo=True)["choices"]
    assert one["text"].startswith("1234=")
    assert len(one["logprobs"]["token_logprobs"]) == len(one["logprobs"]["tokens"])


def test_stream_starts_with_echo_and_logprobs(service: EmbeddedService, model: Any) -> None:
    body = {"model": MODEL, "temperature": 0, "prompt": ASKED, "max_tokens": 3, "logprobs": 1, "echo": True}
    answer = service.ask("POST", COMPLETIONS, {**body, "stream": True})
    events = [json.loads(line[6:]) for line in answer.body.decode().splitlines() if line.startswith("data: {")]
    reported = [value for each in events for value in (each["choices"][0]["logprobs"] or {}).get("token_logprobs", [])]
    (whole,) = ask(service, **{**body, "ignore_eos": False})["choices"]
    assert reported == whole["logprobs"]["token_logprobs"]


def test_chat_with_prompt_logprobs_is_400_naming_field(service: EmbeddedService) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "12"}], "prompt_logprobs": 1}
    answer = service.ask("POST", "/v1/chat/completions", body)
    assert (answer.status, answer.json()["error"]["param"]) == (400, "prompt_logprobs")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "n": 2}, "max_tokens"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt": [5] * 200, "echo": True, "logprobs": 1}, "prompt"),
        ({"prompt": "1" * 200_000}, "prompt"),
    ],
)
def test_unscorable_request_is_400_naming_field(service: EmbeddedService, body: dict[str, Any], param: str) -> None:
    answer = service.ask("POST", COMPLETIONS, {"model": MODEL, "prompt": ASKED, **body})
    assert (answer.status, answer.json()["error"]["param"]) == (400, param)
