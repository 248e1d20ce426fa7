"""Agents that call the model with OpenAI's client."""
