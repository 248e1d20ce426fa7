"""The traffic of an agent service, from the metrics of its gateway and data proxies: rates between two looks.

Data proxies are asked where this home runs them. Of a remote service the gateway's metrics are all that is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from areal.cli.inf.traffic import (
    Document,
    ServiceTraffic,
    TrafficSample,
    bars,
    number,
    pair_of,
    quantiles,
    rate,
    sampled,
)
from areal.cli.output import Column, Row, render_table
from areal.cli.output import field as shown
from areal.cli.remote import GatewayClient
from areal.client.prometheus import Page, buckets, growth

_FAILED = ("agent", "infra")


def agent_traffic(chosen: GatewayClient, addresses: Callable[[], Mapping[str, str]]) -> ServiceTraffic:
    """``addresses`` of data proxies, by ``data-proxy/N``."""
    return ServiceTraffic(lambda: sampled(chosen, addresses()), compared, "turnsPerSecond")


# -- pure from here on


def compared(before: TrafficSample, after: TrafficSample) -> Document:
    """``before`` is ``after`` at the first look: then rates and quantiles are None."""
    seconds = after.at - before.at
    pairs = [_pair(name, before.replicas.get(name, page), page, seconds) for name, page in after.replicas.items()]
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
