"""Traffic of a service, from the metrics of its gateway and data proxies: rates between two samples.

Metrics of replicas are read at their addresses in the router; those of the data proxies of agents, if this home runs
them. If they cannot be reached (a remote service, or loopback addresses of another machine), only data of the router or
metrics of the gateway are shown.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from areal.cli.curves import sparkline
from areal.cli.output import Column, Row, render_table, text_of
from areal.cli.output import field as shown
from areal.client.gateway import GatewayClient, NoResponse, ServiceClient
from areal.client.prometheus import Page, buckets, increase, parse, quantile, sum_buckets
from areal.dataclasses import dataclass, field
from areal.numbers import duration

_TIMEOUT_S = 1.0
_AT_ONCE = 16
_HISTORY = 40
_CALLS = frozenset(
    f"{prefix}/{call}"
    for prefix in ("/v1", "")
    for call in ("chat/completions", "completions", "responses", "messages")
)  # routes of model calls; other routes are not counted

_FAILED_TURNS = ("agent", "infra")


@dataclass(frozen=True)
class TrafficSample:
    """Metrics at one time: of the gateway, and of the data proxies that respond, by name. ``workers``: the workers that
    the router lists."""

    at: float
    gateway: Page
    replicas: Mapping[str, Page]
    workers: Sequence[Row] = ()


@dataclass
class ServiceTraffic:
    """Samples traffic repeatedly. The first document has only gauges; later ones have rates since the previous sample.
    ``compare`` builds the document from two samples; ``rate``: the figure of the document that gets a history."""

    sample: Callable[[], TrafficSample]
    compare: Callable[[TrafficSample, TrafficSample], Row]
    rate: str
    before: TrafficSample | None = None
    history: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))

    def look(self) -> Row:
        """Take a sample and return the document. Raises ArealError if the gateway does not respond."""
        after = self.sample()
        found = self.compare(self.before or after, after)
        if self.before is not None:
            self.history.append(found[self.rate] or 0.0)
        self.before = after
        return {**found, f"{self.rate}History": [round(each, 2) for each in self.history]}


def inference_traffic(chosen: GatewayClient) -> ServiceTraffic:
    def sample() -> TrafficSample:
        workers = chosen.get("/workers").get("workers", [])
        return sampled(chosen, {str(each["worker_addr"]): str(each["worker_addr"]) for each in workers}, workers)

    return ServiceTraffic(sample, inference_figures, "tokensPerSecond")


def agent_traffic(chosen: GatewayClient, addresses: Callable[[], Mapping[str, str]]) -> ServiceTraffic:
    """``addresses`` returns the addresses of data proxies by ``data-proxy/N``."""
    return ServiceTraffic(lambda: sampled(chosen, addresses()), agent_figures, "turnsPerSecond")


def sampled(
    chosen: GatewayClient, addresses: Mapping[str, str], workers: Sequence[Mapping[str, object]] = ()
) -> TrafficSample:
    """Take a sample. ``addresses``: of data proxies, by name. Raises ArealError if the gateway does not respond."""
    gateway = parse(str(chosen.get("/metrics")))
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="metrics") as pool:
        pages = pool.map(lambda address: _metrics_page(address, chosen.key), addresses.values())
        found = {name: page for name, page in zip(addresses, pages, strict=True) if page is not None}
    return TrafficSample(time.monotonic(), gateway, found, workers)


def _metrics_page(url: str, key: str | None) -> Page | None:
    try:
        status, text = ServiceClient(url, key, timeout_s=_TIMEOUT_S).ask("GET", "/metrics")
    except NoResponse:
        return None
    return parse(text) if status == 200 and isinstance(text, str) else None


# Pure from here on; in the first document ``before`` is ``after``, and rates and quantiles are None.


def inference_figures(before: TrafficSample, after: TrafficSample) -> Row:
    seconds = after.at - before.at
    replicas = [_replica(before, after, worker, seconds) for worker in after.workers]
    first, pace = (
        sum_buckets(
            buckets(before.replicas.get(address, Page()), page, name) for address, page in after.replicas.items()
        )
        for name in ("areal_time_to_first_token_seconds", "areal_time_per_output_token_seconds")
    )
    return {
        "seconds": round(seconds, 3),
        "tokensPerSecond": _sum(each["tokensPerSecond"] for each in replicas),
        "firstTokenSeconds": quantiles(first, seconds),
        "perTokenSeconds": quantiles(pace, seconds),
        "gateway": _gateway(before.gateway, after.gateway, seconds),
        "replicas": replicas,
    }


def _gateway(before: Page, after: Page, seconds: float) -> dict[str, object]:
    def calls(labels: Mapping[str, str]) -> bool:
        return labels.get("route") in _CALLS

    def failed(labels: Mapping[str, str]) -> bool:
        return calls(labels) and labels.get("status", "").startswith("5")

    return {
        "requestsPerSecond": rate(increase(before, after, "areal_http_requests_total", calls), seconds),
        "failuresPerSecond": rate(increase(before, after, "areal_http_requests_total", failed), seconds),
        "retriesPerSecond": rate(increase(before, after, "areal_gateway_retries_total"), seconds),
        "requestSeconds": quantiles(buckets(before, after, "areal_http_request_seconds", calls), seconds),
        "overheadSeconds": quantiles(buckets(before, after, "areal_overhead_seconds"), seconds),
        "inFlight": after.total("areal_http_in_flight"),
        "queued": after.total("areal_gateway_queued"),
    }


def _replica(
    before: TrafficSample, after: TrafficSample, worker: Mapping[str, Any], seconds: float
) -> dict[str, object]:
    row = {
        "worker": worker["worker_id"],
        "model": worker.get("model"),
        "state": worker.get("state"),
        "address": worker["worker_addr"],
        "version": worker.get("version"),
        "inFlight": worker.get("in_flight"),
        "inFlightTokens": worker.get("in_flight_tokens"),
    }
    page = after.replicas.get(worker["worker_addr"])
    if page is None:
        none = dict.fromkeys(("tokensPerSecond", "promptTokensPerSecond", "sessions", "ready", "exportsPerSecond"))
        return {**row, **none, "firstTokenSeconds": None, "commitSeconds": None}
    since = before.replicas.get(worker["worker_addr"], page)  # a new replica has no previous sample
    return {
        **row,
        "inFlight": page.total("areal_http_in_flight"),
        "inFlightTokens": page.total("areal_tokens_in_flight"),
        "tokensPerSecond": rate(increase(since, page, "areal_generated_tokens_total"), seconds),
        "promptTokensPerSecond": rate(increase(since, page, "areal_prompt_tokens_total"), seconds),
        "sessions": page.total("areal_sessions_open"),
        "ready": page.total("areal_trajectories_ready"),
        "exportsPerSecond": rate(increase(since, page, "areal_exports_total"), seconds),
        "firstTokenSeconds": quantiles(buckets(since, page, "areal_time_to_first_token_seconds"), seconds),
        "commitSeconds": quantiles(buckets(since, page, "areal_commit_seconds"), seconds),
    }


def agent_figures(before: TrafficSample, after: TrafficSample) -> Row:
    seconds = after.at - before.at
    pairs: list[Row] = [
        _pair(name, before.replicas.get(name, page), page, seconds) for name, page in after.replicas.items()
    ]
    first, now = before.gateway, after.gateway

    def outcome(*names: str) -> float | None:
        return rate(
            increase(first, now, "areal_agent_turns_total", lambda labels: labels.get("outcome") in names), seconds
        )

    return {
        "seconds": round(seconds, 3),
        "turnsPerSecond": outcome("complete"),
        "failuresPerSecond": outcome(*_FAILED_TURNS),
        "cancelledPerSecond": outcome("cancelled", "abandoned"),
        "running": now.total("areal_agent_turns_running"),
        "queued": now.total("areal_gateway_queued"),
        "turnSeconds": quantiles(buckets(first, now, "areal_agent_turn_seconds"), seconds),
        "firstEventSeconds": quantiles(buckets(first, now, "areal_agent_first_event_seconds"), seconds),
        "sessions": sum(pair["sessions"] or 0 for pair in pairs) if pairs else None,
        "rewardsPerSecond": _sum(pair["rewardsPerSecond"] for pair in pairs),
        "pairs": pairs,
    }


def _pair(name: str, before: Page, after: Page, seconds: float) -> dict[str, object]:
    return {
        "pair": name,
        "sessions": after.total("areal_sessions_open"),
        "running": after.total("areal_agent_turns_running"),
        "turnsPerSecond": rate(increase(before, after, "areal_agent_turns_total"), seconds),
        "rewardsPerSecond": rate(increase(before, after, "areal_rewards_total"), seconds),
        "commitSeconds": quantiles(buckets(before, after, "areal_commit_seconds"), seconds),
    }


def _sum(values: Any) -> float | None:
    found = [each for each in values if each is not None]
    return round(sum(found), 3) if found else None


def rate(count: float, seconds: float) -> float | None:
    return round(count / seconds, 3) if seconds > 0 else None


def quantiles(cumulative: Mapping[float, float], seconds: float) -> dict[str, object] | None:
    """Return p50 and p99; None for the first sample, and without requests since the previous sample."""
    middle, far = quantile(cumulative, 0.5), quantile(cumulative, 0.99)
    if seconds <= 0 or middle is None or far is None:
        return None
    return {"p50": round(middle, 6), "p99": round(far, 6)}


def pair_of(row: Row, name: str) -> str:
    found = row[name]
    return "-" if found is None else f"{duration(found['p50'])} / {duration(found['p99'])}"


_REPLICAS = (
    shown("REPLICA", "worker"),
    shown("MODEL", "model", wide=True),
    shown("STATE", "state", state=True),
    shown("VERSION", "version", right=True),
    shown("IN-FLIGHT", "inFlight", right=True),
    shown("TOKENS HELD", "inFlightTokens", wide=True, right=True),
    shown("TOK/S", "tokensPerSecond", right=True),
    shown("PROMPT/S", "promptTokensPerSecond", wide=True, right=True),
    Column("FIRST TOKEN", lambda row: pair_of(row, "firstTokenSeconds"), right=True),
    Column("COMMIT", lambda row: pair_of(row, "commitSeconds"), right=True, wide=True),
    shown("SESSIONS", "sessions", right=True),
    shown("READY", "ready", right=True),
    shown("EXPORTS/S", "exportsPerSecond", wide=True, right=True),
)


def inference_page(document: Row, *, wide: bool) -> str:
    """Render inference traffic. Pairs of figures are p50 and p99 since the previous sample."""
    gateway = document["gateway"]
    failed = f", {text_of(gateway['failuresPerSecond'])}/s failed" if gateway["failuresPerSecond"] else ""
    load = f"{text_of(gateway['inFlight'])} in flight, {text_of(gateway['queued'])} waiting"
    ours, first = pair_of(gateway, "overheadSeconds"), pair_of(document, "firstTokenSeconds")
    lines = [
        f"requests   {text_of(gateway['requestsPerSecond'])}/s{failed}, {load}",
        f"latency    {pair_of(gateway, 'requestSeconds')}  (p50 / p99; the gateway's own part {ours})",
        f"tokens     {text_of(document['tokensPerSecond'])}/s  {bars(document['tokensPerSecondHistory'])}",
        f"           first after {first}, then one every {pair_of(document, 'perTokenSeconds')}",
    ]
    return "\n".join(lines) + "\n\n" + render_table(document["replicas"], _REPLICAS, wide=wide)


_PAIRS = (
    shown("PAIR", "pair"),
    shown("SESSIONS", "sessions", right=True),
    shown("RUNNING", "running", right=True),
    shown("TURNS/S", "turnsPerSecond", right=True),
    shown("REWARDS/S", "rewardsPerSecond", right=True),
    Column("COMMIT", lambda row: pair_of(row, "commitSeconds"), right=True),
)


def agent_page(document: Row) -> str:
    """Render agent traffic. Pairs of figures are p50 and p99 since the previous sample."""
    parts = [f"{text_of(document['running'])} run, {text_of(document['queued'])} wait"]
    for name, word in (("failuresPerSecond", "failed"), ("cancelledPerSecond", "cancelled")):
        parts += [f"{text_of(document[name])}/s {word}"] if document[name] else []
    latency, first = pair_of(document, "turnSeconds"), pair_of(document, "firstEventSeconds")
    lines = [
        f"turns      {text_of(document['turnsPerSecond'])}/s  {bars(document['turnsPerSecondHistory'])}",
        f"           {', '.join(parts)}",
        f"latency    {latency}  (p50 / p99; first event after {first})",
    ]
    if document["pairs"]:
        lines.append(
            f"sessions   {text_of(document['sessions'])} open, {text_of(document['rewardsPerSecond'])} rewards/s"
        )
    table = render_table(document["pairs"], _PAIRS) if document["pairs"] else ""
    return "\n".join(lines) + (f"\n\n{table}" if table else "")


def bars(values: Sequence[float]) -> str:
    """Draws values as bars, relative to the highest value."""
    return sparkline(list(enumerate(values)), (0, len(values) - 1), (0.0, max(values, default=0.0)))
