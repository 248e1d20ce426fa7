from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.services.http.errors import ApiError
from areal.services.inference.gateway.relay import prompt_prefix, read_envelope

SYSTEM = {"role": "system", "content": "You are brief."}
USER = {"role": "user", "content": "Hello"}


def prefix(**data: Any) -> bytes | None:
    return prompt_prefix(data)


def test_model_and_size_are_read() -> None:
    body = json.dumps({"model": "m", "max_tokens": 100, "messages": [USER]}).encode()
    model, key = read_envelope(body, with_prefix=False)
    assert model == "m" and key.prefix is None
    assert key.tokens == len(body) / 4 + 100


@pytest.mark.parametrize("asked", [None, "many", -5, True])
def test_unknown_answer_size_is_estimated(asked: object) -> None:
    body = json.dumps({"max_tokens": asked}).encode()
    _, key = read_envelope(body, with_prefix=False)
    assert key.tokens > 100


@pytest.mark.parametrize("body", [b"", b"[]", b'{"model": 7}', b"\xff"])
def test_unroutable_body_is_400(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        read_envelope(body, with_prefix=True)
    assert caught.value.status == 400


def test_later_turns_share_first_turn_prefix() -> None:
    turns = [SYSTEM, USER, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "More"}]
    assert prefix(messages=turns[:2]) == prefix(messages=turns) != prefix(messages=[USER])


def test_different_first_messages_have_different_prefixes() -> None:
    other = {"role": "user", "content": "Bye"}
    assert prefix(messages=[SYSTEM, USER]) != prefix(messages=[SYSTEM, other])


def test_other_fields_keep_prefix() -> None:
    assert prefix(messages=[USER], user="a", temperature=1) == prefix(messages=[USER], user="b")


def test_token_id_prompts_hash_differently() -> None:
    assert prefix(prompt=[1, 2, 3]) != prefix(prompt=[1, 2, 4])
    assert prefix(prompt=list(range(600))) == prefix(prompt=[*range(512), 7, 7])
    assert prefix(prompt=[1, 23]) != prefix(prompt=[12, 3])


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_malformed_prefix_does_not_fail(value: Any) -> None:
    prompt_prefix({"messages": value})
    prompt_prefix({"prompt": value})
