"""The traffic of an agent service, from the metrics of its gateway and data proxies: rates between two looks.

Data proxies are asked where this home runs them. Of a remote service the gateway's metrics are all that is shown.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from areal.cli.inf.traffic import bars, metrics_page, number, pair_of, quantiles, rate
from areal.cli.output import Column, Row, render_table
from areal.cli.output import field as shown
from areal.cli.remote import GatewayClient
from areal.client.prometheus import Page, buckets, growth, parse

_HISTORY = 40
_FAILED = ("agent", "infra")
Document = dict[str, Any]


@dataclass(frozen=True)
class AgentSample:
    """All pages of one moment; those of data proxies by ``data-proxy/N``."""

    at: float
    gateway: Page
    pairs: Mapping[str, Page]


@dataclass
class AgentTraffic:
    """Looks again and again. The first look has gauges alone, every later one rates since the one before."""

    chosen: GatewayClient
    addresses: Callable[[], Mapping[str, str]]
    before: AgentSample | None = None
    turns_s: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))

    def look(self) -> Document:
        """Raises ArealError when the gateway does not answer."""
        after = self._sample()
        found = compared(self.before or after, after)
        if self.before is not None:
            self.turns_s.append(found["turnsPerSecond"] or 0.0)
        self.before = after
        return {**found, "turnsPerSecondHistory": [round(each, 2) for each in self.turns_s]}

    def _sample(self) -> AgentSample:
        gateway = parse(str(self.chosen.get("/metrics")))
        addresses = self.addresses()
        with ThreadPoolExecutor(max(1, len(addresses)), thread_name_prefix="metrics") as pool:
            pages = list(pool.map(lambda address: metrics_page(address, self.chosen.key), addresses.values()))
        pairs = {name: page for name, page in zip(addresses, pages, strict=True) if page is not None}
        return AgentSample(time.monotonic(), gateway, pairs)


# -- pure from here on


def compared(before: AgentSample, after: AgentSample) -> Document:
    """``before`` is ``after`` at the first look: then rates and quantiles are None."""
    seconds = after.at - before.at
    pairs = [_pair(name, before.pairs.get(name, page), page, seconds) for name, page in after.pairs.items()]
    first, now = before.gateway, after.gateway

    def outcome(*names: str) -> float | None:
        return rate(
            growth(first, now, "areal_agent_turns_total", lambda labels: labels.get("outcome") in names), seconds
        )

    return {
        "seconds": round(seconds, 3),
        "turnsPerSecond": outcome("complete"),
        "failuresPerSecond": outcome(*_FAILED),
        "cancelledPerSecond": outcome("cancelled", "abandoned"),
        "running": now.total("areal_agent_turns_running"),
        "queued": now.total("areal_gateway_queued"),
        "turnSeconds": quantiles(buckets(first, now, "areal_agent_turn_seconds"), seconds),
        "firstEventSeconds": quantiles(buckets(first, now, "areal_agent_first_event_seconds"), seconds),
        "sessions": sum(pair["sessions"] or 0 for pair in pairs) if pairs else None,
        "rewardsPerSecond": _sum(pair["rewardsPerSecond"] for pair in pairs),
        "pairs": pairs,
    }


def _pair(name: str, before: Page, after: Page, seconds: float) -> Document:
    return {
        "pair": name,
        "sessions": after.total("areal_sessions_open"),
        "running": after.total("areal_agent_turns_running"),
        "turnsPerSecond": rate(growth(before, after, "areal_agent_turns_total"), seconds),
        "rewardsPerSecond": rate(growth(before, after, "areal_rewards_total"), seconds),
        "commitSeconds": quantiles(buckets(before, after, "areal_commit_seconds"), seconds),
    }


def _sum(values: Any) -> float | None:
    found = [each for each in values if each is not None]
    return round(sum(found), 3) if found else None


# -- for people


def _figure(title: str, name: str) -> Column:
    return Column(title, lambda row: number(row[name]), right=True)


_PAIRS = (
    shown("PAIR", "pair"),
    _figure("SESSIONS", "sessions"),
    _figure("RUNNING", "running"),
    _figure("TURNS/S", "turnsPerSecond"),
    _figure("REWARDS/S", "rewardsPerSecond"),
    Column("COMMIT", lambda row: pair_of(row, "commitSeconds"), right=True),
)


def page(document: Row) -> str:
    """Pairs of figures are p50 and p99 since the look before."""
    told = [f"{number(document['running'])} run, {number(document['queued'])} wait"]
    for name, word in (("failuresPerSecond", "failed"), ("cancelledPerSecond", "cancelled")):
        told += [f"{number(document[name])}/s {word}"] if document[name] else []
    latency, first = pair_of(document, "turnSeconds"), pair_of(document, "firstEventSeconds")
    lines = [
        f"turns      {number(document['turnsPerSecond'])}/s  {bars(document['turnsPerSecondHistory'])}",
        f"           {', '.join(told)}",
        f"latency    {latency}  (p50 / p99; first event after {first})",
    ]
    if document["pairs"]:
        lines.append(
            f"sessions   {number(document['sessions'])} open, {number(document['rewardsPerSecond'])} rewards/s"
        )
    table = render_table(document["pairs"], _PAIRS) if document["pairs"] else ""
    return "\n".join(lines) + (f"\n\n{table}" if table else "")
