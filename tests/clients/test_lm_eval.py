"""lm-evaluation-harness by its ``local-completions`` and ``local-chat-completions``."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.conftest import MODEL, Served
from tests.clients.known import covers


def model(served: Served, kind: str, path: str, monkeypatch: pytest.MonkeyPatch, **more: Any) -> Any:
    pytest.importorskip("lm_eval")
    from lm_eval.api.registry import get_model

    monkeypatch.setenv("OPENAI_API_KEY", served.key)
    given = {"model": MODEL, "base_url": f"{served.v1}{path}", "max_length": 512, "max_retries": 1, **more}
    return get_model(kind)(**given)


def asked(kind: str, *arguments: Any) -> Any:
    from lm_eval.api.instance import Instance

    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


UNTIL = {"until": ["zzz"], "max_gen_toks": 8}


@covers("lm-eval", "chat")
def test_generate_until(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = model(served, "local-chat-completions", "/chat/completions", monkeypatch)
    from lm_eval.models.api_models import JsonChatStr

    chat = JsonChatStr('[{"role": "user", "content": "Hello there"}]')
    (text,) = ours.generate_until([asked("generate_until", chat, UNTIL)], disable_tqdm=True)
    assert isinstance(text, str)


@covers("lm-eval", "likelihoods")
def test_multiple_choice(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The likelihood of each continuation, by ``echo`` with ``logprobs``."""
    pytest.importorskip("transformers")
    ours = model(served, "local-completions", "/completions", monkeypatch, tokenizer=served.folder)
    pairs = [asked("loglikelihood", "Hello", " there"), asked("loglikelihood", "Hello", " quick brown fox")]
    scores = ours.loglikelihood(pairs, disable_tqdm=True)
    assert all(score < 0 for score, _ in scores) and scores[0][0] != scores[1][0]


@covers("lm-eval", "errors", "retries")
def test_errors_and_retries(served: Served, flaky: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    more = {"tokenizer": served.folder}
    absent = model(served, "local-completions", "/completions", monkeypatch, **{**more, "model": "absent"})
    request = [asked("generate_until", "Hello", UNTIL)]
    with pytest.raises(Exception, match=r"404|absent"):
        absent.generate_until(request, disable_tqdm=True)
    again = model(flaky, "local-completions", "/completions", monkeypatch, **{**more, "max_retries": 3})
    assert again.generate_until(request, disable_tqdm=True)
