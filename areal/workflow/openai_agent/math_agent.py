"""A math agent of the OpenAI Agents SDK."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal.errors import UsageFault
from areal.installation import install_command
from areal.workflow.calculator import INSTRUCTIONS, TOOLS

if TYPE_CHECKING:
    from agents import Agent


def build_math_agent(name: str = "math", instructions: str = INSTRUCTIONS, **options: Any) -> Agent[Any]:
    """Return an agent with a calculator. ``options``: further arguments of ``agents.Agent``. Raises UsageFault where
    the SDK is not installed."""
    try:
        import agents
    except ImportError as error:
        raise UsageFault("build_math_agent needs the OpenAI Agents SDK", hint=install_command("agents")) from error
    tools = [agents.function_tool(function) for function in TOOLS]
    return agents.Agent(name=name, instructions=instructions, **{"tools": tools, **options})
