"""``AgentController``: what its configuration stands for, and episodes in a service that it has started."""

from __future__ import annotations

from typing import Any

import pytest

from areal.api.cli_args import AgentConfig, AgentServiceConfig
from areal.client import AgentController
from areal.client.controller import run_flags
from areal.errors import UsageFault


def test_configuration_is_the_flags_of_the_command() -> None:
    config = AgentServiceConfig(
        agent_cls_path="my.agents.MyAgent",
        num_pairs=3,
        inference="default",
        model="tiny",
        setup_timeout=9.0,
        health_poll_interval=2.0,
        drain_timeout=0.0,
        session_timeout=60.0,
        log_level="debug",
        env={"A": "1", "B": "x=y"},
    )
    words = run_flags(config, "/key")
    flags = list(zip(words[::2], words[1::2], strict=True))
    assert dict(flags[:-2]) == {
        "--agent": "my.agents:MyAgent",
        "--pairs": "3",
        "--inf": "default",
        "--model": "tiny",
        "--setup-timeout": "9.0s",
        "--health-poll-interval": "2.0s",
        "--drain-timeout": "0.0s",
        "--session-timeout": "60.0s",
        "--log-level": "debug",
        "--admin-api-key-file": "/key",
    }
    assert flags[-2:] == [("--env", "A=1"), ("--env", "B=x=y")]


def test_environment_is_empty_unless_it_is_given() -> None:
    assert AgentServiceConfig().env == {} and AgentConfig().env == {}


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("num_pairs", 0),
        ("setup_timeout", 0),
        ("drain_timeout", -1),
        ("health_poll_interval", 0),
        ("request_timeout", 0),
    ],
)
def test_setting_that_cannot_be_meant_is_refused(setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=setting):
        AgentServiceConfig(**{setting: value})


def test_controller_without_an_agent_says_what_is_missing() -> None:
    controller = AgentController(AgentServiceConfig())
    with pytest.raises(UsageFault, match="which agent"):
        controller.initialize()
    controller.destroy()


async def test_call_before_initialize_says_so() -> None:
    with pytest.raises(RuntimeError, match="not initialized"):
        await AgentController(AgentServiceConfig(agent_cls_path="a:B")).step("hello", "nobody")
