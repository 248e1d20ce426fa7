"""The domains that episodes are played in: those of tau2-bench, or one of your own with the same interface.

A conversation is a list of OpenAI chat messages. The user may call tools too: a message of role ``user`` then has
``tool_calls``. An environment has no state besides the conversation: it is made again from it, by replaying its tool
calls. So every episode has its own, wherever its next turn runs, and what is scored is what was done.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from areal.errors import NotFound, UsageFault
from areal.loading import load_attr

RELEASE = "v0.2.0"
INSTALL = (
    f"git clone -b {RELEASE} https://github.com/sierra-research/tau2-bench && "
    "pip install 'litellm<1.82.7' -e ./tau2-bench, and TAU2_DATA_DIR=$PWD/tau2-bench/data in the environment"
)

Message = dict[str, Any]
Who = Literal["assistant", "user"]
Ended = Literal["user_stop", "max_steps"]


@dataclass(frozen=True)
class Task:
    """``opening``: the conversation before; its last message is the agent's. ``user_prompt``: of the user's model."""

    id: str
    opening: Sequence[Message]
    user_prompt: str


class Environment(Protocol):
    def call(self, who: Who, name: str, arguments: Mapping[str, Any]) -> str:
        """The result of a tool, or its error, as text."""
        ...


class Domain(Protocol):
    """Its methods may block: they are called on threads."""

    @property
    def agent_prompt(self) -> str: ...

    def tasks(self) -> Mapping[str, Task]: ...

    def tools(self, who: Who) -> list[dict[str, Any]]:
        """As OpenAI function tools."""
        ...

    def replay(self, task: str, conversation: Sequence[Message]) -> Environment: ...

    def score(self, task: str, conversation: Sequence[Message], ended: Ended) -> float: ...


@functools.cache
def load_domain(name: str) -> Domain:
    """A domain of tau2-bench by its name, or ``module:Class``. Raises NotFound, UsageFault."""
    if ":" in name:
        domain: Domain = load_attr(name, "domain")()
        return domain
    return Tau2Domain(name)


class Tau2Domain:
    """A domain of tau2-bench."""

    def __init__(self, name: str) -> None:
        self._registry = _registry()
        if name not in self._registry.get_domains():
            raise UsageFault(f"tau2-bench has no domain {name!r}", hint=", ".join(self._registry.get_domains()))
        self._name = name
        self._make_environment = self._registry.get_env_constructor(name)
        self._given = {task.id: task for task in self._registry.get_tasks_loader(name)()}
        self._environment = self._make_environment()
        self._tasks = {task.id: task for task in self._read_tasks()}

    @functools.cached_property
    def agent_prompt(self) -> str:
        from tau2.agent.llm_agent import LLMAgent

        return str(LLMAgent(tools=[], domain_policy=self._environment.get_policy()).system_prompt)

    def tasks(self) -> Mapping[str, Task]:
        """Those that are scored without a judge, and whose opening ends with the agent."""
        return self._tasks

    def _read_tasks(self) -> Iterator[Task]:
        from tau2.orchestrator.orchestrator import DEFAULT_FIRST_AGENT_MESSAGE as GREETING
        from tau2.user.user_simulator import UserSimulator

        tools = self._user_tools()
        for id, task in self._given.items():
            state = task.initial_state
            opening = _chat_messages((state.message_history if state else None) or [GREETING])
            if not _is_judged(task) and opening[-1]["role"] == "assistant" and "tool_calls" not in opening[-1]:
                prompt = UserSimulator(tools=tools or None, instructions=str(task.user_scenario)).system_prompt
                yield Task(id, opening, prompt)

    def _user_tools(self) -> list[Any]:
        return list(self._environment.get_user_tools()) if self._environment.user_tools is not None else []

    def tools(self, who: Who) -> list[dict[str, Any]]:
        tools = self._environment.get_tools() if who == "assistant" else self._user_tools()
        return [tool.openai_schema for tool in tools]

    def replay(self, task: str, conversation: Sequence[Message]) -> Environment:
        """Raises ValueError where a tool now gives another result than the conversation has."""
        state, environment = self._given[task].initial_state, self._make_environment()
        environment.set_state(
            initialization_data=state.initialization_data if state else None,
            initialization_actions=state.initialization_actions if state else None,
            message_history=list(_tau2_messages(conversation)),
        )
        return _Tau2Environment(environment)

    def score(self, task: str, conversation: Sequence[Message], ended: Ended) -> float:
        from tau2.data_model.simulation import SimulationRun, TerminationReason
        from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation
        from tau2.utils.utils import get_now

        run = SimulationRun(
            id=task,
            task_id=task,
            start_time=get_now(),
            end_time=get_now(),
            duration=0.0,
            termination_reason=TerminationReason(ended),
            messages=list(_tau2_messages(conversation)),
        )
        how = {"evaluation_type": EvaluationType.ALL, "solo_mode": False, "domain": self._name}
        return float(evaluate_simulation(run, self._given[task], **how).reward)


class _Tau2Environment:
    def __init__(self, environment: Any) -> None:
        self._environment = environment

    def call(self, who: Who, name: str, arguments: Mapping[str, Any]) -> str:
        from tau2.data_model.message import ToolCall

        call = ToolCall(id="", name=name, arguments=dict(arguments), requestor=who)
        return str(self._environment.get_response(call).content)


def _registry() -> Any:
    try:
        from loguru import logger

        logger.disable("tau2")
        from tau2.registry import registry
        from tau2.utils.utils import DATA_DIR
    except ImportError as error:
        message = (
            f"this example needs tau2-bench {RELEASE}, which is not on PyPI (tau2 there is another package): {error}"
        )
        raise NotFound(message, hint=INSTALL) from error
    if not (DATA_DIR / "tau2" / "domains").is_dir():
        raise NotFound(f"tau2-bench has no data in {DATA_DIR}", hint="TAU2_DATA_DIR=/path/to/tau2-bench/data")
    return registry


def _is_judged(task: Any) -> bool:
    from tau2.data_model.tasks import RewardType

    return task.evaluation_criteria is not None and RewardType.NL_ASSERTION in task.evaluation_criteria.reward_basis


def _tau2_messages(conversation: Sequence[Message]) -> Iterator[Any]:
    from tau2.data_model.message import AssistantMessage, ToolCall, ToolMessage, UserMessage

    caller: Who = "assistant"
    for message in conversation:
        content = message["content"]
        if message["role"] == "tool":
            error = content.startswith("Error:")
            about = {"id": message["tool_call_id"], "requestor": caller, "error": error}
            yield ToolMessage(role="tool", content=content, **about)
            continue
        caller = message["role"]
        calls = [
            ToolCall(
                id=call["id"],
                name=call["function"]["name"],
                arguments=json.loads(call["function"]["arguments"]),
                requestor=caller,
            )
            for call in message.get("tool_calls", ())
        ]
        kind = AssistantMessage if caller == "assistant" else UserMessage
        yield kind(role=caller, content=None if calls else content, tool_calls=calls or None)  # one of them


def _chat_messages(messages: Sequence[Any]) -> list[Message]:
    found: list[Message] = []
    for message in messages:
        chat: Message = {"role": message.role, "content": message.content}
        if message.role == "tool":
            chat["tool_call_id"] = message.id
        elif message.tool_calls:
            chat["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for call in message.tool_calls
            ]
        found.append(chat)
    return found
