"""What ``inf status --watch`` makes of two looks at the metrics of a service."""

from __future__ import annotations

from areal.cli.traffic import TrafficSample, bars, inference_figures, inference_page
from areal.client.prometheus import Page, parse

WORKERS = [
    {"worker_id": "w0", "worker_addr": "http://a", "state": "ready", "model": "m", "in_flight": 1, "version": 4},
    {"worker_id": "w1", "worker_addr": "http://b", "state": "dead", "model": "m", "in_flight": 9, "version": 3},
]


def gateway(calls: int, failed: int, slow: int) -> Page:
    fast = calls + failed - slow
    return parse(
        f'areal_http_requests_total{{route="/v1/chat/completions",status="200"}} {calls}\n'
        f'areal_http_requests_total{{route="/v1/chat/completions",status="503"}} {failed}\n'
        'areal_http_requests_total{route="/rl/set_reward",status="200"} 1000\n'
        f'areal_http_request_seconds_bucket{{route="/v1/chat/completions",le="1.0"}} {fast}\n'
        f'areal_http_request_seconds_bucket{{route="/v1/chat/completions",le="10.0"}} {fast + slow}\n'
        f'areal_http_request_seconds_bucket{{route="/v1/chat/completions",le="+Inf"}} {fast + slow}\n'
        'areal_http_request_seconds_bucket{route="/rl/set_reward",le="+Inf"} 1000\n'
        "areal_http_in_flight 3\nareal_gateway_queued 0\n"
    )


def replica(tokens: int) -> Page:
    return parse(
        f"areal_generated_tokens_total {tokens}\nareal_prompt_tokens_total 10\nareal_http_in_flight 2\n"
        f'areal_sessions_open 7\nareal_time_to_first_token_seconds_bucket{{le="0.1"}} {tokens}\n'
        f'areal_time_to_first_token_seconds_bucket{{le="+Inf"}} {tokens}\n'
    )


def test_rates_and_quantiles_cover_interval_between_looks() -> None:
    before = TrafficSample(100.0, gateway(10, 0, 0), {"http://a": replica(50)}, WORKERS)
    after = TrafficSample(102.0, gateway(110, 2, 51), {"http://a": replica(250)}, WORKERS)
    found = inference_figures(before, after)
    assert found["tokensPerSecond"] == 100.0
    assert found["gateway"]["requestsPerSecond"] == 51.0
    assert found["gateway"]["failuresPerSecond"] == 1.0
    assert found["gateway"]["requestSeconds"] == {"p50": 1.0, "p99": 9.82}
    assert found["firstTokenSeconds"] == {"p50": 0.05, "p99": 0.099}
    first, second = found["replicas"]
    assert (first["inFlight"], first["sessions"], first["tokensPerSecond"]) == (2, 7, 100.0)
    assert (second["inFlight"], second["version"], second["tokensPerSecond"]) == (9, 3, None)


def test_first_look_has_loads_and_no_rates() -> None:
    look = TrafficSample(1.0, gateway(10, 1, 1), {"http://a": replica(50)}, WORKERS)
    found = inference_figures(look, look)
    assert found["tokensPerSecond"] is None
    assert found["gateway"]["requestsPerSecond"] is None
    assert found["gateway"]["requestSeconds"] is None
    assert found["gateway"]["inFlight"] == 3
    text = inference_page({**found, "tokensPerSecondHistory": []}, wide=True)
    assert "requests   -/s, 3 in flight, 0 waiting" in text


def test_new_replica_has_no_lifetime_rate() -> None:
    before = TrafficSample(1.0, gateway(0, 0, 0), {}, [])
    after = TrafficSample(2.0, gateway(0, 0, 0), {"http://a": replica(1000)}, WORKERS[:1])
    assert inference_figures(before, after)["replicas"][0]["tokensPerSecond"] == 0.0


def test_page_uses_readable_units() -> None:
    before = TrafficSample(0.0, gateway(0, 0, 0), {"http://a": replica(0)}, WORKERS)
    after = TrafficSample(1.0, gateway(100, 1, 0), {"http://a": replica(123456)}, WORKERS)
    text = inference_page({**inference_figures(before, after), "tokensPerSecondHistory": [0.0, 1.0, 2.0]}, wide=False)
    assert "requests   101/s, 1/s failed, 3 in flight, 0 waiting" in text
    assert "tokens     123456/s  ▁▅█" in text
    assert [line.split()[:2] for line in text.splitlines()[-2:]] == [["w0", "ready"], ["w1", "dead"]]


def test_bars_without_a_greatest_are_low() -> None:
    assert bars([0.0, 0.0]) == "▁▁" and bars([]) == ""
