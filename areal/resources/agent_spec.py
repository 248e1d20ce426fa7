"""The spec of an AgentService."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Self

from pydantic import Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from areal.resources.addresses import UrlError, check_server_url
from areal.resources.fields import (
    Auth,
    LogLevel,
    ModelRef,
    Port,
    PositiveCount,
    PositiveSeconds,
    Replicas,
    Restart,
    RolloutStrategy,
    Schema,
    Seconds,
    SecretFrom,
    SpecModel,
    Text,
    Variable,
    given,
    when,
    without,
    worded,
    written,
)
from areal.resources.scheduling import Scheduler
from areal.resources.tree import FieldPath, UpdateClass

ENTRY_POINT = worded(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$", 'look like "module:Name"')
"""``package.module:Name``."""


_EXAMPLE_AGENT = '''"""An agent that answers with its session's model."""

from areal.client.inference import AsyncInferenceClient


async def agent(message, *, history, emitter, base_url, api_key, model):
    messages = [*history, {"role": "user", "content": message}]
    client = AsyncInferenceClient(base_url, api_key, model=model)
    async with client, client.stream_chat(messages) as chunks:
        async for chunk in chunks:
            for choice in chunk["choices"]:
                await emitter.emit_delta(choice["delta"].get("content") or "")
'''
_TOOL_URL = worded(r"^https?://[^\s/?#@]+[^\s#]*$", 'be the URL of a server, "http://..." or "https://..."')
_COMMAND_GIVEN: Schema = {"required": ["command"], "properties": {"command": {"not": {"enum": [[], None]}}}}


class McpServer(SpecModel):
    """A tool server that speaks the Model Context Protocol."""

    command: Annotated[list[Text], UpdateClass.ROLL] = []
    """A program that speaks MCP on stdin and stdout, with its arguments. Each worker runs one."""
    url: Annotated[str | None, Field(pattern=_TOOL_URL), UpdateClass.ROLL] = None
    """URL of a running MCP server."""

    @classmethod
    def schema_rules(cls) -> list[Schema]:
        both: Schema = {"allOf": [written("command", {"minItems": 1}), written("url")]}
        return [{"anyOf": [_COMMAND_GIVEN, given("url")]}, {"not": both}]

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if bool(self.command) == bool(self.url):
            raise PydanticCustomError("areal_one_of", 'needs exactly one of "command" and "url"')
        return self


class AgentTool(SpecModel):
    """A source of tools."""

    mcp: Annotated[McpServer, UpdateClass.ROLL]
    """An MCP server."""


class SessionSettings(SpecModel):
    """One conversation with the agent."""

    idle_timeout_seconds: Annotated[PositiveSeconds, UpdateClass.HOT] = 1800.0
    """Time without a turn after which a session is closed."""
    turn_timeout_seconds: Annotated[PositiveSeconds, UpdateClass.HOT] = 600.0
    """Time without text, a tool call or a result from the agent after which a turn fails."""
    max_concurrent_per_pair: Annotated[PositiveCount, UpdateClass.HOT] = 64
    """Maximum number of turns that a pair runs at once; further turns wait."""


class AgentGateway(SpecModel):
    """The address that clients of the agent connect to."""

    host: Annotated[Text, UpdateClass.RECREATE] = "127.0.0.1"
    """Address to bind. Other addresses than loopback are reachable from other machines and require the admin key."""
    port: Annotated[Port, UpdateClass.RECREATE] = 8090
    """TCP port. areal never picks it, because clients have it in their configuration."""


class AgentServiceSpec(SpecModel):  # type: ignore[no-redef]  # mypy confuses the field with __init__'s **kwargs
    """Runs `agent` in `pairs` worker processes and keeps each session on its pair."""

    REFERENCES: ClassVar = ((("inference",), "service", "InferenceService"), (("inference",), "model", "Model"))
    FILES: ClassVar = (("auth", "adminKeyFrom", "file"), ("workingDir",), ("envFrom", "*", "file"))
    EXAMPLE: ClassVar = ("my-agent", {"agent": "my_agent:agent", "pairs": 1, "inference": {"service": "default"}})
    EXAMPLE_FILES: ClassVar = {"my_agent.py": _EXAMPLE_AGENT}
    EXAMPLE_NEEDS: ClassVar = ("InferenceService/default",)

    agent: Annotated[str | None, Field(pattern=ENTRY_POINT), UpdateClass.ROLL] = None
    """The agent, as `module:Name`: a class with `async run(request, *, emitter)` (`areal.api.agent`); an object with
    `async run(data, **extra)`, as for workflows; a function of the message; or an `Agent` of the OpenAI Agents SDK."""
    kwargs: Annotated[dict[str, JsonValue], UpdateClass.ROLL] = {}
    """Keyword arguments of the agent's class."""
    command: Annotated[list[Text], UpdateClass.ROLL] = []
    """Instead of `agent`: a program that answers one message, with its arguments."""
    tools: Annotated[list[AgentTool], UpdateClass.ROLL] = []
    """Sources of tools. An agent with a parameter `tools` gets the tools, a command gets the servers in
    `$AREAL_MCP_SERVERS`."""
    pairs: Annotated[Replicas, UpdateClass.HOT] = 1
    """Number of worker and data proxy pairs."""
    inference: Annotated[ModelRef | None, UpdateClass.ROLL] = None
    """The model that the agent calls and that records its sessions. Absent: the agent uses its own model, whose calls
    are not recorded."""
    session: Annotated[SessionSettings, UpdateClass.HOT] = SessionSettings.model_construct()
    """Lifetime and number of sessions."""
    setup_timeout_seconds: Annotated[PositiveSeconds, UpdateClass.META] = 120.0
    """Time after which a process of a pair that is not ready has failed to start."""
    drain_timeout_seconds: Annotated[Seconds, UpdateClass.META] = 600.0
    """Maximum time for the running turns of a stopping pair to finish."""
    health_poll_seconds: Annotated[PositiveSeconds, UpdateClass.HOT] = 5.0
    """Time between two health checks of a pair."""
    env: Annotated[dict[Variable, str], UpdateClass.ROLL] = {}
    """Environment variables of the workers, which run the agent. The gateway, the router and the data proxies have
    those of the command that starts them. Quote numbers, because every value is a string."""
    env_from: Annotated[dict[Variable, SecretFrom], UpdateClass.ROLL] = {}
    """Environment variables of the workers with secret values, which areal does not record: `SEARCH_KEY: {env:
    SEARCH_KEY}`."""
    working_dir: Annotated[Text | None, UpdateClass.ROLL] = None
    """Folder in which the workers start; it is also on their import path. Absent: the folder where the service was
    first applied."""
    gateway: Annotated[AgentGateway, UpdateClass.ROLL] = AgentGateway.model_construct()
    """The address that clients connect to."""
    auth: Annotated[Auth, UpdateClass.RECREATE] = Auth.model_construct()
    """Keys of the service."""
    scheduler: Annotated[Scheduler, UpdateClass.RECREATE] = Scheduler.model_construct()
    """Backend of the processes."""
    strategy: Annotated[RolloutStrategy, UpdateClass.META] = RolloutStrategy.model_construct()
    """Rollout of changes: a pair is a replica."""
    restart: Annotated[Restart, UpdateClass.META] = Restart.model_construct()
    """Restart of a process that exits by itself."""
    log_level: Annotated[LogLevel, UpdateClass.ROLL] = "info"
    """Lowest level that the processes log."""
    suspend: Annotated[bool, UpdateClass.HOT] = False
    """True: no process runs; the object is kept."""

    @classmethod
    def schema_rules(cls) -> list[Schema]:
        by_command = written("command", {"minItems": 1})
        return [{"anyOf": [given("agent"), _COMMAND_GIVEN]}, when(by_command, without("agent", "kwargs"))]

    def problems(self) -> Iterator[tuple[FieldPath, str]]:
        if self.agent is None and not self.command:
            yield (), 'one of "agent" and "command" is needed'
        if self.command:
            for name, value in (("agent", self.agent), ("kwargs", self.kwargs)):
                if value:
                    yield (name,), 'does not go with "command"'
        for number, tool in enumerate(self.tools):
            if tool.mcp.url is not None:
                try:
                    check_server_url(tool.mcp.url)
                except UrlError as error:
                    yield ("tools", number, "mcp", "url"), f'"{tool.mcp.url}" {error}'
