"""Trace context through a process that exports no spans."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from areal.http import tracing
from areal.http.client import HttpClient
from areal.services.http.auth import Access
from areal.services.http.messages import AnyResponse, Request
from areal.services.http.serve import serve_in_thread
from areal.services.http.service import Service, json_response

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
GIVEN = f"00-{TRACE}-00f067aa0ba902b7-01"


async def show(request: Request) -> AnyResponse:
    return json_response({name: request.headers[name] for name in request.headers if name.startswith("trace")})


@pytest.fixture(scope="module")
def chain() -> Iterator[str]:
    """The address of a service that asks a second one for the trace headers that it gets. The body of a request is a
    JSON object of further headers for that call."""
    inner, outer = (Service(name, key=None, loopback=True) for name in ("inner", "outer"))
    inner.route("POST", "/show", show, Access.INFERENCE)
    with serve_in_thread(inner, "127.0.0.1") as url:

        async def forward(request: Request) -> AnyResponse:
            own = orjson.loads(await request.read(1000))
            async with HttpClient() as http:
                return json_response((await http.fetch("POST", url, "/show", timeout_s=10, headers=own)).json())

        outer.route("POST", "/forward", forward, Access.INFERENCE)
        with serve_in_thread(outer, "127.0.0.1") as address:
            yield address


async def passed_on(chain: str, headers: dict[str, str], own: dict[str, str] | None = None) -> Any:
    async with HttpClient() as http:
        body = orjson.dumps(own or {})
        return (await http.fetch("POST", chain, "/forward", timeout_s=10, headers=headers, body=body)).json()


@pytest.mark.parametrize(
    ("sent", "arrived"),
    [
        ({"traceparent": GIVEN}, {"traceparent": GIVEN}),
        ({"traceparent": GIVEN, "tracestate": "a=1,b=2"}, {"traceparent": GIVEN, "tracestate": "a=1,b=2"}),
        ({"traceparent": "01" + GIVEN[2:] + "-more"}, {"traceparent": "01" + GIVEN[2:] + "-more"}),
        ({"traceparent": GIVEN + "-more"}, {}),  # version 00 has four fields
        ({"traceparent": "ff" + GIVEN[2:]}, {}),
        ({"traceparent": f"00-{'0' * 32}-00f067aa0ba902b7-01"}, {}),
        ({"traceparent": f"00-{TRACE}-{'0' * 16}-01"}, {}),
        ({"traceparent": GIVEN.upper()}, {}),
        ({"traceparent": "é"}, {}),
        ({"traceparent": GIVEN[:-1]}, {}),
        ({"traceparent": f"{GIVEN}, {GIVEN}"}, {}),  # as two headers arrive
        ({"traceparent": "01" + GIVEN[2:] + "-" + "x" * 60_000}, {}),
        ({"traceparent": "01" + GIVEN[2:] + "-\u2028"}, {}),
        ({"traceparent": GIVEN, "tracestate": "a=1 , b=2,\t,c=3"}, {"traceparent": GIVEN, "tracestate": "a=1,b=2,c=3"}),
        ({"traceparent": GIVEN, "tracestate": "a=1\u2028b=2"}, {"traceparent": GIVEN}),
        ({"traceparent": GIVEN, "tracestate": "a=" + "b" * 511}, {"traceparent": GIVEN}),
        ({"traceparent": GIVEN, "tracestate": "a=1," + "," * 60_000}, {"traceparent": GIVEN, "tracestate": "a=1"}),
        (
            {"traceparent": GIVEN, "tracestate": ",".join(f"k{number}={'v' * 97}" for number in range(10, 500))},
            {"traceparent": GIVEN, "tracestate": ",".join(f"k{number}={'v' * 97}" for number in range(10, 15))},
        ),
        ({"tracestate": "a=1"}, {}),
        ({}, {}),
    ],
)
async def test_trace_context_is_propagated_to_calls(chain: str, sent: dict[str, str], arrived: dict[str, str]) -> None:
    assert await passed_on(chain, sent) == arrived


async def test_explicit_trace_context_of_call_is_kept(chain: str) -> None:
    own = {"traceparent": f"00-{TRACE}-{'1' * 16}-00"}
    assert await passed_on(chain, {"traceparent": GIVEN}, own) == own


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "mine"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://localhost:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "console"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}, False),
        ({"OTEL_SDK_DISABLED": "True", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}, False),
    ],
)
def test_spans_are_exported_only_if_configured(environ: dict[str, str], wanted: bool) -> None:
    assert tracing.is_wanted(environ) is wanted


STARTED = """
import sys, logging; logging.basicConfig(format="%(message)s")
from areal.http import tracing
if sys.argv[1] == "without": sys.modules["opentelemetry"] = None
tracing.start("gateway")
print(tracing.is_on(), sorted(name for name in sys.modules if name.startswith("opentelemetry.")))
"""


@pytest.mark.parametrize(
    ("environ", "packages", "printed", "warning"),
    [
        ({}, "with", "False []", ""),
        (
            {"OTEL_TRACES_EXPORTER": "console"},
            "without",
            "False []",
            "no spans are exported: opentelemetry is not installed; the extra otel has it\n",
        ),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318", "OTEL_TRACES_EXPORTER": "zipkin"},
            "with",
            "False [",
            "OTEL_TRACES_EXPORTER is zipkin, and only otlp, console and none are supported",
        ),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "with",
            "False [",
            "OTEL_EXPORTER_OTLP_PROTOCOL is grpc, and only http/protobuf is supported",
        ),
    ],
)
def test_tracing_that_fails_to_start_only_warns(
    environ: dict[str, str], packages: str, printed: str, warning: str
) -> None:
    pytest.importorskip("opentelemetry.sdk")
    ran = subprocess.run(
        [sys.executable, "-c", STARTED, packages], env=environ, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(printed)
    assert warning in ran.stderr


ENDED = """
from areal.http import tracing
tracing.start("gateway")
with tracing.span("one"):
    print(tracing.headers()["traceparent"])
"""


def test_unreachable_collector_does_not_delay_exit() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    environ = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_TIMEOUT": "40"}
    # Without a limit, the exporter would retry for 40 s.
    ran = subprocess.run([sys.executable, "-c", ENDED], env=environ, capture_output=True, text=True, timeout=25)
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.strip()) == 55


SERVED = """
import os; os.environ["OTEL_TRACES_EXPORTER"] = "console"
from areal.http import tracing
from areal.http.headers import Headers
tracing.start("gateway")
for name in (b"traceparent", b"tracestate", b"baggage"):
    given = {b"traceparent": b"GIVEN", name: b"a=\\xff\\xe2\\x80\\xa8"}
    with tracing.serving("POST", "/x", Headers(given)):
        assert set(tracing.headers()) == {"traceparent"}
long = b",".join(b"k%d=v" % number for number in range(40))
with tracing.serving("POST", "/x", Headers({b"traceparent": b"GIVEN", b"tracestate": long})):
    assert tracing.headers()["tracestate"] == ",".join(f"k{number}=v" for number in range(32))
assert tracing.is_on()
"""


def test_odd_trace_headers_fail_no_request() -> None:
    pytest.importorskip("opentelemetry.sdk")
    code = SERVED.replace("GIVEN", GIVEN)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr


RECORDED = """
import contextlib, json, os, sys
from areal.http import tracing
from areal.http.headers import Headers
tracing.start("gateway", own_code=sys.argv[1] == "sdk")
class Refused(Exception):
    status = int(sys.argv[2])
given = {name: value.encode() for name, value in zip((b"traceparent", b"tracestate", b"baggage"), sys.argv[3:])}
with contextlib.suppress(Refused), tracing.serving("POST", "/x", Headers(given)) as span:
    passed = tracing.headers()
    with tracing.span("chat", {"gen_ai.request.model": "m", "absent": None}, "client") as inner:
        inner.set({"gen_ai.response.finish_reasons": ("stop",), "tokens": 3})
    with contextlib.suppress(KeyError), tracing.span("call"):
        raise KeyError("x" * 600)
    with tracing.span("update", root=True):
        assert tracing.headers()["traceparent"][3:35] != passed["traceparent"][3:35]
    span.set({"more": True})
    if Refused.status:
        raise Refused("no")
print(json.dumps(passed), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("status", "given", "sampler"),
    [
        (0, (), {}),
        (0, (GIVEN,), {}),
        (0, (GIVEN, "a=1,b=2"), {}),
        (0, (GIVEN, "a=1", "user=4"), {}),
        (404, (GIVEN[:-2] + "03",), {}),
        (503, ("01" + GIVEN[2:] + "-more",), {}),
        (0, (GIVEN[:-1] + "0",), {}),
        (0, ("no trace",), {}),
        (0, (GIVEN,), {"OTEL_TRACES_SAMPLER": "always_off"}),
        (0, (GIVEN[:-1] + "0",), {"OTEL_TRACES_SAMPLER": "always_on"}),
        (0, (), {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.0"}),
    ],
)
def test_spans_of_services_are_those_of_the_sdk(status: int, given: tuple[str, ...], sampler: dict[str, str]) -> None:
    pytest.importorskip("opentelemetry.sdk")
    environ = {**os.environ, **sampler, "OTEL_TRACES_EXPORTER": "console"}
    found = []
    for recorder in ("sdk", "service"):
        argv = [sys.executable, "-c", RECORDED, recorder, str(status), *given]
        ran = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0, ran.stderr
        found.append((described(ran.stdout), json.loads(ran.stderr)))
    (by_sdk, passed), (by_service, passed_by_service) = found
    assert by_service == by_sdk and len(by_sdk) in (0, 1, 4)
    assert passed_by_service.keys() == passed.keys()
    assert passed_by_service.get("tracestate") == passed.get("tracestate")
    if given and given[0] != "no trace":
        assert passed_by_service["traceparent"][:36] == passed["traceparent"][:36]
        assert passed_by_service["traceparent"][-2:] == passed["traceparent"][-2:]


def described(text: str) -> list[dict[str, Any]]:
    """Spans that the console exporter printed, with the names of spans instead of random ids."""
    decoder, spans = json.JSONDecoder(), list[dict[str, Any]]()
    while text.strip():
        span, end = decoder.raw_decode(text.lstrip())
        spans.append(span)
        text = text.lstrip()[end:]
    names = {span["context"]["span_id"]: span["name"] for span in spans}
    known = {f"0x{TRACE}"} | {span["context"]["trace_id"] for span in spans if span["name"] == "POST /x"}
    for span in spans:
        context = span["context"]
        context["trace_id"], context["span_id"] = context["trace_id"] in known, ""
        span["parent_id"] = names.get(span["parent_id"], span["parent_id"])
        span["resource"]["attributes"] |= {"process.pid": 0, "service.instance.id": ""}
        span["start_time"] = span["end_time"] = ""
    return sorted(spans, key=lambda span: str(span["name"]))
