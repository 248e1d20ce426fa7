"""Other people's proxies before the same mock, each None where it is not installed.

nginx is looked for on the path. LiteLLM's proxy and sglang-router live in environments of their own, whose ``bin``
folders are named by ``AREAL_BENCH_LITELLM`` and ``AREAL_BENCH_SGLANG_ROUTER``; so do the HTTP servers uvicorn and
granian, by ``AREAL_BENCH_HTTP_SERVERS``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from areal.client.command import free_port
from benchmarks.relaying.floor import KEY, MODEL, PARTS, Floor, System, answers, children, listens, until

_START_S = 180.0  # LiteLLM imports for half a minute on a busy machine

NGINX = """
worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_max_body_size 32m; client_body_temp_path {folder}/a; proxy_temp_path {folder}/b;
  fastcgi_temp_path {folder}/c; uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e; keepalive_requests 100000000;
  upstream mock {{ server 127.0.0.1:{mock}; keepalive 1024; keepalive_requests 100000000; }}
  server {{ listen 127.0.0.1:{port} backlog=4096; location / {{
    proxy_pass http://mock; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    proxy_buffer_size 16k; proxy_buffers 8 16k; client_body_buffer_size 64k; }} }}
}}
"""

LITELLM = """
model_list:
  - model_name: {model}
    litellm_params: {{model: openai/{model}, api_base: "http://127.0.0.1:{mock}/v1", api_key: none}}
general_settings: {{master_key: {key}}}
"""


def nginx(floor: Floor, mock: int) -> System | None:
    program = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin")
    if program is None:
        return None
    port = free_port()
    config = floor.folder / "nginx.conf"
    config.write_text(NGINX.format(folder=floor.folder, mock=mock, port=port))
    master, _ = floor.start(program, "-c", str(config), says=r"")
    return System("nginx", port, {"worker": until(lambda: next(iter(children(master)), None), "nginx's worker")})


def litellm(floor: Floor, mock: int) -> System | None:
    folder = _bin("AREAL_BENCH_LITELLM")
    if folder is None:
        return None
    port = free_port()
    config = floor.folder / "litellm.yaml"
    config.write_text(LITELLM.format(model=MODEL, mock=mock, key=KEY))
    program = (str(folder / "litellm"), "--config", str(config), "--host", "127.0.0.1", "--port", str(port))
    pid, _ = floor.start(*program, says=r"", LITELLM_LOCAL_MODEL_COST_MAP="True", LITELLM_LOG="ERROR")
    until(lambda: answers(port, "/health/liveliness") or None, "LiteLLM to serve", _START_S)
    return System("LiteLLM", port, {"proxy": pid}, slow=True)


def sglang_router(floor: Floor, mock: int) -> System | None:
    folder = _bin("AREAL_BENCH_SGLANG_ROUTER")
    if folder is None:
        return None
    port = free_port()
    flags = ("--worker-urls", f"http://127.0.0.1:{mock}", "--host", "127.0.0.1", "--port", str(port))
    more = ("--policy", "round_robin", "--log-level", "error", "--prometheus-port", str(free_port()))
    pid, _ = floor.start(str(folder / "python"), "-m", "sglang_router.launch_router", *flags, *more, says=r"")
    until(lambda: answers(port, "/health") or None, "sglang-router to serve", _START_S)
    return System("sglang-router", port, {"router": pid})


def http_servers(floor: Floor) -> list[System]:
    """uvicorn and granian with the handler of ``handler.py``; none where they are not installed."""
    folder = _bin("AREAL_BENCH_HTTP_SERVERS")
    if folder is None:
        return []
    quiet = ("--host", "127.0.0.1", "--log-level", "warning", "--loop", "uvloop", "--port")
    uvicorn = ("uvicorn", "--http", "httptools", "--ws", "none", "--lifespan", "off", "--no-access-log", *quiet)
    granian = ("granian", "--http", "1", "--no-ws", *quiet)
    found = []
    for name, (program, *flags), more in (
        ("uvicorn", uvicorn, ("benchmarks.relaying.handler:asgi",)),
        ("granian, ASGI", granian, ("--interface", "asginl", "benchmarks.relaying.handler:asgi")),
        ("granian, RSGI", granian, ("--interface", "rsgi", "benchmarks.relaying.handler:rsgi")),
    ):
        port = free_port()
        pid, _ = floor.start(str(folder / program), *flags, str(port), *more, says=r"")
        until(lambda port=port: listens(port) or None, f"{name} to listen")  # type: ignore[misc]
        workers = children(pid)  # granian's supervisor serves nothing
        found.append(System(name, port, {"server": workers[0] if workers else pid}))
    return found


def hosted_gateways(floor: Floor, router: int) -> list[System]:
    """The gateway under uvicorn and granian: ``hosted_gateway.py``."""
    folder = _bin("AREAL_BENCH_HTTP_SERVERS")
    if folder is None:
        return []
    found = []
    for server in ("uvicorn", "granian"):
        command = (str(folder / "python"), str(PARTS / "hosted_gateway.py"), server)
        pid, port = floor.serving(*floor.keyed(*command, "--router-url", f"http://127.0.0.1:{router}"))
        found.append(System(f"gateway on {server}", port, {"gateway": pid}))
    return found


def http_server_versions() -> dict[str, str]:
    folder = _bin("AREAL_BENCH_HTTP_SERVERS")
    names = ("uvicorn", "granian", "httptools", "uvloop")
    return {} if folder is None else {name: _version(folder, name) for name in names}


def _version(folder: Path, name: str) -> str:
    code = f"from importlib.metadata import version; print(version({name!r}))"
    return subprocess.check_output([str(folder / "python"), "-c", code], text=True).strip()


def _bin(variable: str) -> Path | None:
    text = os.environ.get(variable)
    return Path(text) if text and Path(text).is_dir() else None


def versions() -> dict[str, str]:
    """Of the peers that are here."""
    found = {}
    for name, variable in (("litellm", "AREAL_BENCH_LITELLM"), ("sglang-router", "AREAL_BENCH_SGLANG_ROUTER")):
        if (folder := _bin(variable)) is not None:
            found[name] = _version(folder, name)
    program = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin")
    if program is not None:
        said = subprocess.run([program, "-v"], stderr=subprocess.PIPE, text=True, check=True).stderr
        found["nginx"] = said.rpartition("/")[2].strip()
    return found
