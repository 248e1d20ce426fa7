"""An MCP server with two tools, a calculator and Python, over stdin and stdout.

`python` runs what a model wrote, with the rights of this process: its limits keep it from taking the machine's time and
memory, and from writing files, not from reading them. Run the service in a container for a model that you do not trust.
The limit that a program meets is that of its processor time, so that a result does not depend on the machine's load.
"""

from __future__ import annotations

import ast
import asyncio
import operator
import resource
import signal
import sys
from collections.abc import Callable

from mcp.server import MCPServer

_OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
}
_LONGEST = 200  # characters of an expression
_CPU_S, _BYTES, _SHOWN = 2, 512 * 1024 * 1024, 2000
_WAIT_S = 60  # for a program that waits, such as one that sleeps
server = MCPServer("tools")


def value_of(node: ast.AST) -> float:
    """Raises ValueError for anything but numbers and arithmetic."""
    match node:
        case ast.Expression(body):
            return value_of(body)
        case ast.Constant(int() | float() as number):
            return number
        case ast.BinOp(left, operation, right) if type(operation) in _OPERATORS:
            return _OPERATORS[type(operation)](value_of(left), value_of(right))
        case ast.UnaryOp(operation, operand) if type(operation) in _OPERATORS:
            return _OPERATORS[type(operation)](value_of(operand))
    raise ValueError("an expression has numbers, + - * / // % and parentheses")


@server.tool()
def calculate(expression: str) -> str:
    """Compute an arithmetic expression, such as 3 * (4 + 5)."""
    if len(expression) > _LONGEST:
        raise ValueError(f"an expression has at most {_LONGEST} characters")
    return f"{value_of(ast.parse(expression.strip(), mode='eval')):.15g}"


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S + 1))  # SIGXCPU, then SIGKILL
    resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


@server.tool()
async def python(code: str) -> str:
    """Run a Python program and return what it prints."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-c", code),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=pipe,
        stderr=asyncio.subprocess.STDOUT,
        env={},
        preexec_fn=_limit,
    )
    try:
        async with asyncio.timeout(_WAIT_S):
            out, _ = await process.communicate()
    except TimeoutError:
        return f"stopped after {_WAIT_S} s"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == -signal.SIGXCPU:
        return f"stopped after {_CPU_S} s of processor time"
    return out.decode("utf-8", "replace")[-_SHOWN:].strip()


if __name__ == "__main__":
    server.run()
