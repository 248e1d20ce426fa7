"""Metrics of an agent service: each process exposes what docs/metrics.md lists, and turns are counted once in each."""

from __future__ import annotations

import pytest

from tests.services.agent.gateway.conftest import AgentService
from tests.services.processes import Process
from tests.services.test_metrics import AGENT_PARTS, check_documented, page_of, scraped


@pytest.fixture
def processes_of(service: AgentService) -> dict[str, Process]:
    service.respond("tools")
    parts = (service.gateway, service.proxies[0], service.workers[0])
    return {**dict(zip(AGENT_PARTS, parts, strict=True)), "router": service.router}


@pytest.mark.parametrize("component", [*AGENT_PARTS, "router"])
def test_metrics_match_documentation(processes_of: dict[str, Process], component: str) -> None:
    check_documented(page_of(processes_of[component]), component)


def test_turns_are_counted_by_their_outcome(own: AgentService) -> None:
    for message in ("hello", "fail"):
        own.respond(message)
    assert scraped(own.gateway).total("areal_agent_first_event_seconds_count") == 0  # no caller waits for their events
    list(own.stream("lose", "streamed").events())
    own.respond(None)
    for process in (own.gateway, own.proxies[0], own.workers[0]):
        reported = scraped(process)
        counted = {
            dict(labels)["outcome"]: count for labels, count in reported.samples["areal_agent_turns_total"].items()
        }
        assert (counted["complete"], counted["agent"]) == (1, 1)
        assert reported.total("areal_agent_turn_seconds_count") == 3
    reported = scraped(own.gateway)
    assert reported.total("areal_agent_first_event_seconds_count") == 1
    assert reported.total("areal_agent_turns_running") == 0
