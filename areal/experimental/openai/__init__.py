"""AReaL's import path of OpenAI's client as a workflow's own."""

from areal.workflow.openai.client import ArealOpenAI

__all__ = ["ArealOpenAI"]
