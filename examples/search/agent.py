"""An agent that answers questions by searching a corpus: it offers the model a tool, and runs it until it answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
from corpus import Corpus

from areal.api.agent import AgentRequest, AgentResponse, EventEmitter

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Find documents that have the words of a query.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}
NOTHING = "nothing was found"
CONTEXT_FULL = "context_length_exceeded"


class SearchAgent:
    """One turn answers one question. ``corpus``: a file of documents; ``documents``: how many of them a search shows.
    The question is answered after at most ``max_calls`` calls of the model, or not at all, also where the conversation
    fills the model's context. ``instructions``: the system prompt, if any."""

    def __init__(
        self,
        corpus: str,
        documents: int = 3,
        max_calls: int = 4,
        max_tokens: int = 256,
        temperature: float = 1.0,
        instructions: str = "",
    ) -> None:
        self._corpus = Corpus(Path(corpus))
        self._documents, self._max_calls = documents, max_calls
        self._sampling: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
        self._instructions = [{"role": "system", "content": instructions}] if instructions else []
        self._http = openai.DefaultAsyncHttpxClient()

    async def run(self, request: AgentRequest, *, emitter: EventEmitter) -> AgentResponse:
        model = request.metadata["areal_inference"]
        client = openai.AsyncOpenAI(
            base_url=f"{model['base_url']}/v1", api_key=model["api_key"], http_client=self._http
        )
        messages: list[Any] = [*self._instructions, {"role": "user", "content": request.message}]
        searches = 0
        for _ in range(self._max_calls):
            try:
                answer = await client.chat.completions.create(
                    model=model["model"], messages=messages, tools=[SEARCH], **self._sampling
                )
            except openai.BadRequestError as error:
                if error.code != CONTEXT_FULL or messages[-1]["role"] == "user":
                    raise
                return AgentResponse("", {"searches": searches})  # its calls and their results have filled the context
            message = answer.choices[0].message
            if not message.tool_calls:
                return AgentResponse(message.content or "", {"searches": searches})
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                await emitter.emit_tool_call(call.function.name, call.function.arguments, call.id)
                found = self._found(call.function.arguments)
                searches += 1
                await emitter.emit_tool_result(call.function.name, found, call.id)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
        return AgentResponse("", {"searches": searches})

    def _found(self, arguments: str) -> str:
        try:
            query = str(json.loads(arguments)["query"])
        except (ValueError, KeyError, TypeError):
            return 'search takes {"query": "words"}'
        return "\n".join(self._corpus.search(query, self._documents)) or NOTHING

    async def close_all_sessions(self) -> None:
        await self._http.aclose()
