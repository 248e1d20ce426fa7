"""Tools of real MCP servers, over stdio and over HTTP."""

from __future__ import annotations

import asyncio
import json
import sys
import textwrap
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("mcp")

from areal.api.agent import ToolError
from areal.client.command import free_port
from areal.services.agent.worker.tools import mcp_tools
from tests.services.agent.worker.conftest import answer, start_agent
from tests.services.processes import Process, Processes, wait_until

SERVER = """
    import os, sys
    from mcp.server import MCPServer
    from mcp.types import CallToolResult, ResourceLink

    server = MCPServer("adder")

    @server.tool()
    def add(a: int, b: int) -> int:
        "Add two numbers."
        return a + b

    @server.tool()
    def fail() -> str:
        raise ValueError("no luck")

    @server.tool()
    def die() -> str:
        os._exit(1)

    @server.tool()
    def environment() -> str:
        return os.environ.get("OF_THE_WORKER", "none")

    @server.tool()
    def structured() -> CallToolResult:
        return CallToolResult(content=[], structured_content={"sum": 3})

    @server.tool()
    def linked() -> list:
        return [ResourceLink(type="resource_link", uri="file:///a", name="a", mime_type="text/plain")]

    server.run(*sys.argv[1:2], **({"port": int(sys.argv[2])} if sys.argv[2:] else {}))
"""
AGENT = """
    import json
    from areal.api.agent import ToolError

    class Agent:
        def __init__(self, tools):
            self.tools = {tool.name: tool for tool in tools}

        async def run(self, request, *, emitter):
            name, _, arguments = request.message.partition(" ")
            if name == "list":
                return {tool.name: [tool.description, tool.input_schema["required"]] for tool in self.tools.values()
                        if tool.name == "add"}
            try:
                return await self.tools[name].call(json.loads(arguments or "{}"))
            except ToolError as error:
                return f"failed: {error}"

    def thread(message, tools):
        return next(tool for tool in tools if tool.name == "add").call({"a": 1, "b": int(message)})

    async def toolless(message): ...
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("server") / "server.py"
    file.write_text(textwrap.dedent(SERVER))
    return file


def stdio(server: Path) -> str:
    return json.dumps([{"mcp": {"command": [sys.executable, str(server)]}}])


@pytest.fixture(scope="module")
def worker(module_processes: Processes, tmp_path_factory: pytest.TempPathFactory, server: Path) -> Process:
    flags, env = ("--tools", stdio(server)), {"OF_THE_WORKER": "yes"}
    return start_agent(module_processes, tmp_path_factory.mktemp("agent"), AGENT, *flags, env=env)


def test_tools_are_described_and_called(worker: Process) -> None:
    assert answer(worker, "list")["metadata"] == {"add": ["Add two numbers.", ["a", "b"]]}
    assert answer(worker, 'add {"a": 1, "b": 2}')["summary"] == "3"
    assert answer(worker, "environment")["summary"] == "yes"


def test_failing_tool_reports_error(worker: Process) -> None:
    assert answer(worker, "fail")["summary"].startswith("failed: Error executing tool fail")
    assert answer(worker, 'add {"a": "x"}')["summary"].startswith("failed: ")


@pytest.mark.parametrize("value", ['"\\ud800"', "NaN"])
def test_arguments_that_are_not_json_keep_connection_open(worker: Process, value: str) -> None:
    refused = answer(worker, f'add {{"a": 1, "b": {value}}}')["summary"]
    assert refused.startswith("failed: the arguments of add cannot be written as JSON: ")
    assert answer(worker, 'add {"a": 1, "b": 2}')["summary"] == "3"


def test_result_without_text_is_json(worker: Process) -> None:
    assert json.loads(answer(worker, "structured")["summary"]) == {"sum": 3}
    link = {"type": "resource_link", "uri": "file:///a", "name": "a", "mimeType": "text/plain"}
    assert json.loads(answer(worker, "linked")["summary"]) == link


@pytest.mark.extended
def test_dead_tool_server_is_reconnected(worker: Process) -> None:
    assert "did not answer die" in answer(worker, "die")["summary"]
    assert answer(worker, 'add {"a": 1, "b": 2}')["summary"] == "3"
    [child] = psutil.Process(worker.popen.pid).children()
    child.kill()  # while no call runs
    wait_until(lambda: sum("has ended its connection" in line for line in worker.log) == 2)
    assert answer(worker, 'add {"a": 1, "b": 2}')["summary"] == "3"


def test_threaded_function_calls_tools(processes: Processes, tmp_path: Path, server: Path) -> None:
    worker = start_agent(processes, tmp_path, AGENT + "\n    Agent = thread\n", "--tools", stdio(server))
    assert answer(worker, "2")["summary"] == "3"
    children = psutil.Process(worker.popen.pid).children()
    worker.signal(15)
    assert worker.wait() == 0
    _, alive = psutil.wait_procs(children, 10)
    assert children and not alive


@pytest.mark.extended
def test_http_tool_server_is_reconnected(processes: Processes, tmp_path: Path, server: Path) -> None:
    def start(port: int) -> Process:
        process = processes.spawn(str(server), "streamable-http", str(port))
        process.wait_log("Uvicorn running")
        return process

    served = start(free := free_port())
    tools = json.dumps([{"mcp": {"url": f"http://127.0.0.1:{free}/mcp"}}])
    worker = start_agent(processes, tmp_path, AGENT, "--tools", tools)
    assert answer(worker, 'add {"a": 1, "b": 2}')["summary"] == "3"
    served.kill()
    assert answer(worker, 'add {"a": 1, "b": 2}')["summary"].startswith("failed: the MCP server http://")
    start(free)
    wait_until(lambda: answer(worker, 'add {"a": 1, "b": 2}')["summary"] == "3")


@pytest.mark.extended
@pytest.mark.parametrize(
    ("servers", "name", "error"),
    [
        ([["no-such-program"]], "Agent", "the MCP server no-such-program is away: FileNotFoundError"),
        ([["false"]], "Agent", "the MCP server false is away: "),
        (["http://169.254.169.254/mcp"], "Agent", "169.254.169.254 leads to 169.254.169.254, a link-local or metadata"),
        ([["SERVER"], ["SERVER", "stdio"]], "Agent", "two tools are named 'add'; the second is of "),
        ([["SERVER"]], "toolless", "toolless() takes no 'tools'"),
    ],
)
def test_unavailable_tools_exit_worker(
    processes: Processes, tmp_path: Path, server: Path, servers: list[str | list[str]], name: str, error: str
) -> None:
    (tmp_path / "agent.py").write_text(textwrap.dedent(AGENT))
    own = {"SERVER": [sys.executable, str(server)]}
    tools = [
        {"mcp": {"url": each} if isinstance(each, str) else {"command": [p for w in each for p in own.get(w, [w])]}}
        for each in servers
    ]
    flags = ("--agent", f"{tmp_path / 'agent.py'}:{name}", "--tools", json.dumps(tools))
    process = processes.spawn("-m", "areal.services.agent.worker", "--port", "0", *flags)
    assert process.wait(60) != 0
    wait_until(lambda: error in "".join(process.log), what=str(process.log))


ENDLESS = """
    import json, sys

    for line in sys.stdin:
        asked = json.loads(line)
        if "id" not in asked:
            continue
        if asked["method"] == "initialize":
            about = {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {}}}
            result = {**about, "serverInfo": {"name": "endless", "version": "1"}}
        elif asked["method"] != "tools/list":
            error = {"code": -32601, "message": "no"}
            print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "error": error}), flush=True)
            continue
        elif sys.argv[1] == "silent":
            continue
        else:
            result = {"tools": [], "nextCursor": str(asked["id"])}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("silent", "is away: it did not end the list of its tools within 2 s"),
        pytest.param("pages", "is away: its list of tools has more than 1000 pages", marks=pytest.mark.extended),
    ],
)
def test_endless_tool_list_names_its_server(processes: Processes, tmp_path: Path, how: str, error: str) -> None:
    (tmp_path / "agent.py").write_text(textwrap.dedent(AGENT))
    (tmp_path / "server.py").write_text(textwrap.dedent(ENDLESS))
    tools = json.dumps([{"mcp": {"command": [sys.executable, str(tmp_path / "server.py"), how]}}])
    timeout = "2" if how == "silent" else "60"
    flags = ("--agent", f"{tmp_path / 'agent.py'}:Agent", "--tools", tools, "--connect-timeout", timeout)
    process = processes.spawn("-m", "areal.services.agent.worker", "--port", "0", *flags)
    assert process.wait(60) != 0
    wait_until(lambda: error in "".join(process.log), what=str(process.log))


def test_command_receives_servers_as_json(processes: Processes, tmp_path: Path) -> None:
    servers: list[dict[str, Any]] = [{"command": ["a", "b"]}, {"url": "http://x/mcp"}]
    command = ["sh", "-c", "echo $AREAL_MCP_SERVERS"]
    config = {"command": command, "tools": [{"mcp": server} for server in servers]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    worker = processes.service("agent.worker", "--config", str(tmp_path / "config.json"), keyed=False)
    assert json.loads(answer(worker)["summary"]) == servers


LATIN = """
    import json, sys

    for line in sys.stdin:
        asked = json.loads(line)
        if asked["method"] == "initialize":
            about = {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {}}}
            result = {**about, "serverInfo": {"name": "latin", "version": "1"}}
        elif asked["method"] == "tools/list":
            result = {"tools": [{"name": "drink", "inputSchema": {"type": "object"}}]}
        elif asked["method"] == "tools/call":
            result = {"content": [{"type": "text", "text": "caf\\u00e9"}]}
        else:
            continue
        answer = json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}, ensure_ascii=False)
        sys.stdout.buffer.write(answer.encode("latin-1") + b"\\n")
        sys.stdout.buffer.flush()
"""


def test_answer_that_is_not_utf8_ends_its_call(processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(textwrap.dedent(LATIN))
    worker = start_agent(processes, tmp_path, AGENT, "--tools", stdio(tmp_path / "server.py"))
    assert answer(worker, "drink")["summary"] == "caf\ufffd"


class _HttpTools(BaseHTTPRequestHandler):
    """An MCP server with the tool ``drop``, whose first call ends its HTTP connection without an answer."""

    protocol_version = "HTTP/1.1"
    dropped = False

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["method"] == "tools/call" and not _HttpTools.dropped:
            _HttpTools.dropped = self.close_connection = True
            return
        results: dict[str, Any] = {
            "tools/list": {"tools": [{"name": "drop", "inputSchema": {"type": "object"}}]},
            "tools/call": {"content": [{"type": "text", "text": "fine"}]},
        }
        found = results.get(asked["method"], {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}})
        named = {"serverInfo": {"name": "x", "version": "1"}, **found} if "capabilities" in found else found
        body = json.dumps({"jsonrpc": "2.0", "id": asked.get("id"), "result": named}).encode()
        self.send_response(200 if "id" in asked else 202)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return None


async def test_call_after_a_lost_http_connection_waits_for_the_next() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _HttpTools) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        configured = [{"mcp": {"url": f"http://127.0.0.1:{server.server_port}/mcp"}}]
        async with asyncio.timeout(20), mcp_tools(configured, 5) as (tool,):
            with pytest.raises(ToolError, match="did not answer drop"):
                await tool.call({})
            assert await tool.call({}) == "fine"
        server.shutdown()
