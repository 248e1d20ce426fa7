"""An agent that plays the guessing game: it asks the model for a guess, and tells it what the game says."""

from __future__ import annotations

import json
from typing import Any

import openai

from areal.api.agent import AgentRequest, AgentResponse, EventEmitter
from examples.agents.guess_number.game import GuessNumber


class Player:
    """One turn is one game. Its metadata may say the ``number``; the reward is the agent's own."""

    def __init__(self, temperature: float = 1.0) -> None:
        self.temperature = temperature
        self._http = openai.DefaultAsyncHttpxClient()

    async def run(self, request: AgentRequest, *, emitter: EventEmitter) -> AgentResponse:
        model = request.metadata["areal_inference"]
        client = openai.AsyncOpenAI(
            base_url=f"{model['base_url']}/v1", api_key=model["api_key"], http_client=self._http
        )
        game = GuessNumber()
        observation, _ = game.reset(options=request.metadata)
        messages: list[Any] = []
        reward, over = 0.0, False
        while not over:
            messages.append({"role": "user", "content": observation})
            answer = await client.chat.completions.create(
                model=model["model"], messages=messages, max_tokens=2, temperature=self.temperature
            )
            guess = answer.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": guess})
            await emitter.emit_tool_call("guess", json.dumps({"number": guess}))
            observation, reward, terminated, truncated, _ = game.step(guess)
            await emitter.emit_tool_result("guess", observation)
            over = terminated or truncated
        guesses = ", ".join(each["content"] for each in messages if each["role"] == "assistant")
        return AgentResponse(f"{guesses}: {'found' if reward else 'not found'}", {"reward": reward})

    async def close_all_sessions(self) -> None:
        await self._http.aclose()
