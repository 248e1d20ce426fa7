"""Adapters for the forms of an agent. Names are resolved and signatures are checked once, at startup."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from areal.api.agent import AgentRequest, AgentResponse, Tool, ToolError
from areal.dataclasses import dataclass
from areal.errors import ArealError, UsageFault
from areal.files import parse_json
from areal.loading import add_import_folder, load_attr
from areal.reward.functions import is_async
from areal.services.agent.worker.agent_loop import is_own_code
from areal.services.agent.worker.turn import Emitter, ThreadEmitter, WorkerTurn, rewarded, waited
from areal.wire.processes import AgentWorkerConfig

if TYPE_CHECKING:
    import agents

Form = Literal["request", "message", "data"]
_TRACEBACK_LINES = 12
MODEL = "default"  # the model name of a session that has none
_OFFERED = {"request": {"emitter"}, "message": set[str](), "data": {"base_url", "api_key", "model", "http_client"}}


@dataclass(eq=False)
class AgentAdapter:
    """An agent of any form. ``run`` runs a turn and returns the agent's result. ``form`` describes the form in logs."""

    form: str
    run: Callable[[AgentRequest, WorkerTurn], Awaitable[object]]
    _owner: object = None

    @property
    def keeps_sessions(self) -> bool:
        return hasattr(self._owner, "close_session")

    async def close_session(self, key: str) -> None:
        await _call_optional(self._owner, "close_session", key)

    async def close_all_sessions(self) -> None:
        await _call_optional(self._owner, "close_all_sessions")


async def _call_optional(owner: object, name: str, *arguments: str) -> None:
    if (method := getattr(owner, name, None)) is not None and inspect.isawaitable(result := method(*arguments)):
        await result


def check_config(config: AgentWorkerConfig) -> None:
    """Raise UsageFault unless the configuration has exactly one of agent and command."""
    if (config.agent is None) == (not config.command):
        raise UsageFault("set exactly one of agent and command")
    if config.command and config.kwargs:
        raise UsageFault("kwargs are for the class of an agent; write the arguments of a command in command")


def use_import_path(folders: Sequence[str]) -> None:
    """Put the agent's folders on the import path, and on that of the programs that it starts."""
    for folder in reversed(folders):
        add_import_folder(Path(folder))
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if places := dict.fromkeys([*folders, *given]):
        os.environ["PYTHONPATH"] = os.pathsep.join(places)


def import_agent(path: str) -> Any:
    """Import the agent, also from the working folder. Raises ArealError with the last lines of a traceback."""
    add_import_folder(Path.cwd())
    try:
        return load_attr(path, "agent", broken=ArealError)
    except ArealError as error:
        if error.detail is None or error.__cause__ is None:
            raise
        raise ArealError(f"{error.message}\n{_own_lines(error.__cause__)}", hint=error.hint) from error


@dataclass(frozen=True)
class ThreadTool:
    """A tool for an agent that is not async: ``call`` is synchronous. Call it from threads other than the loop's."""

    tool: Tool
    loop: asyncio.AbstractEventLoop

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tool, name)

    def call(self, arguments: Mapping[str, object]) -> str:
        return asyncio.run_coroutine_threadsafe(self.tool.call(arguments), self.loop).result()


def make_agent(path: str, found: Any, kwargs: Mapping[str, object], tools: Sequence[Any] | None) -> AgentAdapter:
    """Return the adapter of ``found``, the object at ``path``. A class is instantiated here, on the loop that will run
    its turns. ``tools`` is None if none are configured. Raises ArealError."""
    if tools is not None and not is_async(getattr(found, "run", found)):
        tools = [ThreadTool(tool, asyncio.get_running_loop()) for tool in tools]
    more: dict[str, object] = {} if tools is None else {"tools": tools}
    untaken = set(more)
    if inspect.isclass(found):
        taken = more if _takes(found, "tools") else {}
        found, kwargs, untaken = _construct(path, found, {**kwargs, **taken}), {}, untaken - set(taken)
    function = getattr(found, "run", found)
    if not callable(function):
        raise UsageFault(f"agent {path!r} is {type(found).__name__}: it has no run, and cannot be called")
    form = _form(path, function, is_method=function is not found)
    if lacking := [name for name in (*untaken, *kwargs) if not _takes(function, name)]:
        raise UsageFault(f"agent {path!r}: {_name(function)} takes no {lacking[0]!r}")
    kind = "function" if function is found else type(found).__qualname__
    described = kind if is_async(function) else f"{kind}, on threads"
    return AgentAdapter(described, _runner(function, form, {**more, **kwargs}), found)


def _construct(path: str, cls: type[Any], kwargs: Mapping[str, object]) -> Any:
    try:
        inspect.signature(cls).bind(**kwargs)
    except TypeError as error:
        raise UsageFault(f"agent {path!r} cannot be made with kwargs {sorted(kwargs)}: {error}") from error
    except ValueError:  # no signature
        pass
    try:
        return cls(**kwargs)
    except BaseException as error:  # the boundary to user code
        what = f"agent {path!r} cannot be made: {type(error).__name__}: {error}"
        raise ArealError(f"{what}\n{_own_lines(error)}") from error


def _own_lines(error: BaseException) -> str:
    """Return the last lines of the error's traceback, without frames of libraries."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_own_code(frame.filename)]
    lines = "".join((*traceback.format_list(frames), *traceback.format_exception_only(error)))
    return "\n".join(lines.rstrip().splitlines()[-_TRACEBACK_LINES:])


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin
        return []


def _takes(function: Callable[..., Any], name: str) -> bool:
    return any(each.name == name or each.kind is each.VAR_KEYWORD for each in _parameters(function))


def _form(path: str, function: Callable[..., Any], *, is_method: bool) -> Form:
    """Return the form of an agent function: the name of its first parameter if that is a form; otherwise ``request`` if
    it takes an emitter or an AgentRequest, ``data`` for a method, and ``message`` for a function."""
    parameters = _parameters(function)
    if not parameters or parameters[0].kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD):
        hint = "async def run(request, *, emitter)"
        raise UsageFault(f"agent {path!r}: {_name(function)} takes no request", hint=hint)
    first, names = parameters[0], {each.name for each in parameters}
    if first.name in ("request", "message", "data"):
        return first.name  # type: ignore[return-value]
    if "emitter" in names or "AgentRequest" in str(first.annotation):
        return "request"
    return "data" if is_method else "message"


def _name(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__qualname__', type(function).__qualname__)}()"


def _runner(
    function: Callable[..., Any], form: Form, settings: Mapping[str, object]
) -> Callable[[AgentRequest, WorkerTurn], Awaitable[object]]:
    on_loop = is_async(function)
    parameters = _parameters(function)
    wanted = {each.name for each in parameters[1:]}
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        wanted |= {*_OFFERED[form], *settings}

    async def run(request: AgentRequest, turn: WorkerTurn) -> object:
        access = request.metadata.get("areal_inference")
        given: dict[str, object] = {
            "emitter": Emitter(turn) if on_loop else ThreadEmitter(turn),
            "history": request.history,
            "session_key": request.session_key,
            "run_id": request.run_id,
            "metadata": request.metadata,
            **({**access, "model": access.get("model") or MODEL} if access else {}),
            **settings,
        }
        if "http_client" in wanted:
            from areal.rollout.workflows import shared_http_client

            given["http_client"] = shared_http_client()
        given = {name: value for name, value in given.items() if name in wanted}
        first: object = request.message if form == "message" else request
        if form == "data":  # of a workflow
            theirs = {name: value for name, value in request.metadata.items() if name != "areal_inference"}
            first = {"messages": [*request.history, {"role": "user", "content": request.message}], **theirs}
        if on_loop:
            result = await function(first, **given)
        else:
            result = await _on_thread(lambda: function(first, **given))
            result = await result if inspect.isawaitable(result) else result
        return rewarded(result) if form == "data" else result

    return run


abandoned_threads: dict[threading.Thread, float] = {}
"""Threads of cancelled turns, and the time of the cancellation (monotonic). Python cannot end a thread."""


async def _on_thread(call: Callable[[], Any]) -> Any:
    """Run ``call`` on a new daemon thread. In a pool, a call that never returns would block turns or the exit."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            future.set_result(context.run(call))
        except BaseException as error:  # noqa: BLE001 - the boundary of the thread: the future carries it
            future.set_exception(error)

    thread = threading.Thread(target=work, name="turn", daemon=True)
    thread.start()
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        abandoned_threads[thread] = time.monotonic()
        raise


# Agents of the OpenAI Agents SDK: ``agent`` names the ``Agent`` instance. If the session has a model, all agents of the
# run, hand-offs included, call it through the Chat Completions API with the session's key. ``max_turns``, the only
# allowed name in ``kwargs``, goes to the runner. The answer is the text of the model's last deltas, else the final
# output, as JSON unless it is text.


def is_openai_agent(found: object) -> bool:
    return any(cls.__module__ == "agents.agent" and cls.__name__ == "Agent" for cls in type(found).__mro__)


def openai_agent(agent: agents.Agent[Any], kwargs: Mapping[str, Any], tools: Sequence[Tool] | None) -> AgentAdapter:
    import openai
    from agents import OpenAIProvider, RunConfig, Runner
    from pydantic_core import to_json

    if unknown := sorted(kwargs.keys() - {"max_turns"}):
        raise UsageFault(f"kwargs: an agent of the OpenAI Agents SDK takes max_turns, and no {unknown[0]!r}")
    if tools:
        agent = agent.clone(tools=[*agent.tools, *map(_function_tool, tools)])
    http = openai.DefaultAsyncHttpxClient()

    async def run(request: AgentRequest, turn: WorkerTurn) -> AgentResponse:
        access, config = request.metadata.get("areal_inference"), RunConfig()
        if access:
            url = access["base_url"].rstrip("/") + "/v1"
            client = openai.AsyncOpenAI(base_url=url, api_key=access["api_key"], http_client=http)
            provider = OpenAIProvider(openai_client=client, use_responses=False)
            model = access.get("model") or MODEL
            config = RunConfig(model=model, model_provider=provider, tracing_disabled=True)
        messages: Any = [*items_of(request.history), {"role": "user", "content": request.message}]
        running = Runner.run_streamed(agent, messages, run_config=config, **kwargs)
        calls = _Calls(turn)
        try:
            async for event in running.stream_events():
                await waited(calls.event(event))
        finally:
            running.cancel()
        output = running.final_output
        # The model's own text, and not the SDK's serialization of it. The output may also be a tool's result.
        text = output if isinstance(output, str) else "" if output is None else to_json(output).decode()
        return AgentResponse(turn.text or text)

    return AgentAdapter(
        type(agent).__qualname__ + " of openai-agents", run, SimpleNamespace(close_all_sessions=http.aclose)
    )


class _Calls:
    """Converts the runner's stream events to events of the turn."""

    def __init__(self, turn: WorkerTurn) -> None:
        self._turn = turn
        self._names: dict[str, str] = {}

    def event(self, event: Any) -> Future[None] | None:
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            return self._turn.delta(event.data.delta)
        item = event.item if event.type == "run_item_stream_event" else None
        if item is None or not hasattr(item, "raw_item"):
            return None
        raw = item.raw_item if isinstance(item.raw_item, Mapping) else vars(item.raw_item)
        if item.type in ("tool_call_item", "handoff_call_item") and raw.get("type") == "function_call":
            self._names[raw["call_id"]] = raw["name"]
            return self._turn.tool_call(raw["name"], raw["arguments"], raw["call_id"])
        if item.type in ("tool_call_output_item", "handoff_output_item") and raw.get("call_id") in self._names:
            return self._turn.tool_result(self._names[raw["call_id"]], raw["output"], raw["call_id"])
        return None


def items_of(history: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, object]]:
    """Return chat messages as input items of the Responses API, which the SDK accepts for any model."""
    for message in history:
        if message["role"] == "tool":
            yield {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}
            continue
        if message.get("content") and message["role"] == "assistant":  # in one message with the calls that follow
            text = {"type": "output_text", "text": message["content"], "annotations": []}
            yield {"type": "message", "id": "", "role": "assistant", "status": "completed", "content": [text]}
        elif message.get("content"):
            yield {"role": message["role"], "content": message["content"]}
        for call in message.get("tool_calls") or ():
            yield {"type": "function_call", "call_id": call["id"], **call["function"]}


def _function_tool(tool: Tool) -> agents.FunctionTool:
    from agents import FunctionTool

    async def invoke(context: object, arguments: str) -> str:
        try:
            if not isinstance(given := parse_json(arguments or "{}"), dict):
                raise ValueError("the arguments must be a JSON object")
            return await tool.call(given)
        except (ToolError, ValueError) as error:  # the model may correct the call
            return f"error: {error}"

    return FunctionTool(tool.name, tool.description, dict(tool.input_schema), invoke, strict_json_schema=False)
