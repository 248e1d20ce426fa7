"""A chat template that does not end, grows without measure or fails costs the calls that reach it, no others."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.services.processes import Answer, Process, Processes

_PLAIN = "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
_RANGE = "range(99999)"
BOMBS = {
    "lipsum": "{{ lipsum(n=100000) }}",
    "ranges": f"{{% for a in {_RANGE} %}}{{% for b in {_RANGE} %}}{{% set c = a %}}{{% endfor %}}{{% endfor %}}",
    "width": "{{ '%1000000000d' % 5 }}",
    "repeat": "{{ 'a' * 10**30 }}",
    "zero": "{{ 1 / 0 }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "calls": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "text": f"{{% for a in {_RANGE} %}}{{{{ messages|tojson }}}}{{% endfor %}}",
}
_TEMPLATE = (
    "".join(f"{{% if messages[-1].content == '{name}' %}}{bomb}{{% endif %}}" for name, bomb in BOMBS.items()) + _PLAIN
)


@pytest.fixture(scope="module")
def proxy(module_processes: Processes, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    file = tmp_path_factory.mktemp("template") / "bombs.jinja"
    file.write_text(_TEMPLATE)
    engine = module_processes.engine(tokenizer)
    yield module_processes.data_proxy(engine, tokenizer, "--chat-template", str(file))


def _ask(processes: Processes, proxy: Process, text: str) -> Answer:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
    return proxy.call("POST", "/v1/chat/completions", body, key=processes.key)


@pytest.mark.parametrize("name", BOMBS)
def test_failing_or_endless_template_is_400_in_bounded_memory(
    module_processes: Processes, proxy: Process, name: str
) -> None:
    assert _ask(module_processes, proxy, "hello").status == 200
    before = proxy.rss()
    answer = _ask(module_processes, proxy, name)
    assert answer.status == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == "messages"
    assert "the chat template: " in error["message"]
    assert proxy.rss() < before + 256 * 2**20


def test_endless_template_does_not_block_other_calls(module_processes: Processes, proxy: Process) -> None:
    with ThreadPoolExecutor(6) as pool:
        bombs = [pool.submit(_ask, module_processes, proxy, name) for name in ("calls", "ranges") * 3]
        assert _ask(module_processes, proxy, "hello").status == 200
        assert proxy.call("GET", "/ready").status == 200
        assert not all(bomb.done() for bomb in bombs)
        assert {bomb.result().status for bomb in bombs} == {400}
