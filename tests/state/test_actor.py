from __future__ import annotations

import os

import pytest

from areal.state.locks import actor, command_line, redact, user_name


def test_actor_is_user_at_host() -> None:
    assert actor() == f"{user_name(os.geteuid())}@{os.uname().nodename}"


def test_user_name_of_an_unknown_uid_is_its_number() -> None:
    assert user_name(987654) == "uid 987654"


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["/usr/bin/areal", "apply", "-f", "a b.yaml"], "areal apply -f 'a b.yaml'"),
        (["areal", "inf", "ps", "--api-key", "hush", "-q"], "areal inf ps --api-key REDACTED -q"),
        (["areal", "inf", "ps", "--api-key=hush"], "areal inf ps --api-key=REDACTED"),
        (["areal", "x", "--password", "-hush"], "areal x --password REDACTED"),
        (["areal", "x", "--api-key-file", "/k", "--provider-api-key-env", "VAR"], None),
        (["areal", "x", "--max-tokens", "5", "--max-tokens=5", "--tokenizer-path", "/t"], None),
        (["areal", "agent", "run", "--env", "API_KEY=hush"], "areal agent run --env API_KEY=REDACTED"),
        (["areal", "agent", "run", "--env=API_KEY=hush"], "areal agent run --env=API_KEY=REDACTED"),
        (["areal", "apply", "--set", "spec.env.HF_TOKEN=hush"], "areal apply --set spec.env.HF_TOKEN=REDACTED"),
        (["areal", "apply", "--set", "spec.apiKey=hush"], "areal apply --set spec.apiKey=REDACTED"),
        (["areal", "x", "--gateway", "http://u:hush@h:1/"], "areal x --gateway http://REDACTED@h:1/"),
        (["areal", "x", "sk-hushhushhush"], "areal x REDACTED"),
        ([], ""),
    ],
)
def test_command_line_shows_all_but_secrets(argv: list[str], shown: str | None) -> None:
    assert command_line(argv) == (" ".join(argv) if shown is None else shown)


@pytest.mark.parametrize(
    "text",
    ['{"api_key": "hush"}', "Authorization: Bearer hush", "token: hush", "secret='hush'", "https://x:hush@host/p"],
)
def test_redact_hides_the_secret_in_free_text(text: str) -> None:
    assert "hush" not in redact(text)
    assert "REDACTED" in redact(text)


@pytest.mark.parametrize("text", ["monkey: banana", "max_tokens=5", "keyboard=us", "path=/keys/x"])
def test_redact_leaves_ordinary_words_alone(text: str) -> None:
    assert redact(text) == text
