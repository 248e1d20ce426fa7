"""What was to be reached, and whether it was."""

from __future__ import annotations

from typing import Any

from benchmarks.reporting import table

_GATEWAY, _WHOLE = "gateway", "gateway + data proxy"


def of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a whole run, or of what there is of it."""
    cost = {(row["system"], row["shape"], row["connections"]): row for row in found["rows"]}

    def cpu(system: str, shape: str, connections: int) -> float | None:
        row = cost.get((system, shape, connections))
        return row["cpu_us"] if row else None

    def ratio(above: float | None, below: float | None) -> float | None:
        return above / below if above is not None and below else None

    def beside_router(shape: str, connections: int) -> float | None:
        return ratio(cpu(_GATEWAY, shape, connections), cpu("sglang-router", shape, connections))

    first = cost.get((_GATEWAY, "plain", 1))
    at_16 = cpu(_WHOLE, "turn", 16)
    at_64, streamed = cpu(_WHOLE, "turn at once", 64), cpu(_WHOLE, "turn stream", 16)
    at_once = {each: ratio(cpu(_WHOLE, "turn at once", each), cpu(_GATEWAY, "plain", each)) for each in (16, 128)}
    litellm = [ratio(cpu("LiteLLM", shape, 16), cpu(_GATEWAY, shape, 16)) for shape in ("plain", "stream")]
    wanted = [
        ("gateway, plain, 16 connections: CPU us", cpu(_GATEWAY, "plain", 16), 100.0, "under"),
        ("gateway, plain, 512: CPU us", cpu(_GATEWAY, "plain", 512), 200.0, "under"),
        ("gateway, 64-event stream, 16: CPU us", cpu(_GATEWAY, "stream", 16), 700.0, "under"),
        ("whole path, turn, 16: CPU us", at_16, 500.0, "under"),
        ("whole path, turn, 512 over 16", ratio(cpu(_WHOLE, "turn", 512), at_16), 1.5, "under"),
        ("whole path, 64-event turn, 16: CPU us", cpu(_WHOLE, "turn stream", 16), 2000.0, "under"),
        ("LiteLLM over gateway, plain, 16", litellm[0], 20.0, "over"),
        ("LiteLLM over gateway, stream, 16", litellm[1], 20.0, "over"),
        *(
            (f"gateway over sglang-router, plain, {count}", beside_router("plain", count), 1.0, "under")
            for count in (1, 16, 128, 512)
        ),
        ("gateway over sglang-router, stream, 1", beside_router("stream", 1), 0.7, "under"),
        ("gateway over sglang-router, stream, 16", beside_router("stream", 16), 0.7, "under"),
        ("turn at once over the plain hop, 16", at_once[16], 4.0, "under"),
        ("turn at once over the plain hop, 128", at_once[128], 4.0, "under"),
        ("turn of 64 ms over one at once, 16", ratio(at_16, cpu(_WHOLE, "turn at once", 16)), 1.2, "under"),
        ("turn stream over nginx's stream, 16", ratio(streamed, cpu("nginx", "stream", 16)), 2.5, "under"),
        ("episode of 4 turns over a turn at once, 64", ratio(cpu(_WHOLE, "episode", 64), at_64), 5.0, "under"),
        ("gateway, plain, 1: p50 minus direct, us", first["added_p50_us"] if first else None, 500.0, "under"),
        *_scale(found.get("scale")),
    ]
    return [
        {
            "what": what,
            "measured": round(value, 2),
            "wanted": f"{how} {limit:g}",
            "met": (value < limit) == (how == "under"),
        }
        for what, value, limit, how in wanted
        if value is not None
    ]


def _scale(found: dict[str, Any] | None) -> list[tuple[str, float, float, str]]:
    if found is None:
        return []
    (one, *_, many), sessions = found["workers"], found["sessions"]
    among = sessions["cpu_us_among_them"] / sessions["cpu_us_alone"]
    single, double = found["relays"]
    ready = found["registered"]
    seconds = float(ready["seconds_until_ready"])
    return [
        (f"a call with {many['workers']} workers over one with 1: CPU", many["cpu_us"] / one["cpu_us"], 1.1, "under"),
        (f"{ready['workers']} workers registered at once: seconds until ready", seconds, 30.0, "under"),
        (f"a turn among {sessions['sessions']} sessions over one alone: CPU", among, 1.1, "under"),
        ("an idle session: bytes of memory", float(sessions["memory_bytes_a_session"]), 2048.0, "under"),
        ("two relays over one: CPU a call", double["cpu_us"] / single["cpu_us"], 1.25, "under"),
    ]


def text(verdicts: list[dict[str, Any]]) -> str:
    rows = [(each["what"], each["wanted"], each["measured"], "yes" if each["met"] else "no") for each in verdicts]
    return table(("what", "wanted", "measured", "met"), rows)


def scale_text(found: dict[str, Any]) -> str:
    workers = ", ".join(f"{row['workers']:,}: {row['cpu_us']:.0f} us" for row in found["workers"])
    relays = ", ".join(
        f"{row['relays']}: {row['calls_a_second']:,} calls a second at {row['cpu_us']:.0f} us of CPU,"
        f" {row['busiest_share']:.0%} of it in the busiest"
        for row in found["relays"]
    )
    sessions, ready = found["sessions"], found["registered"]
    return (
        f"Workers in the table, and a call's CPU: {workers}.\n\n"
        f"{ready['workers']:,} workers registered at once: all ready after {ready['seconds_until_ready']:.1f} s, for"
        f" {ready['router_cpu_seconds']:.1f} s of the router's CPU.\n\n"
        f"Relays on one port: {relays}.\n\n"
        f"{sessions['sessions']:,} sessions that talked once: {sessions['memory_bytes_a_session']} bytes of memory"
        f" each; a turn costs {sessions['cpu_us_alone']:.0f} us without them and"
        f" {sessions['cpu_us_among_them']:.0f} among them."
    )
