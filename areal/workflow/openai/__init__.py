"""Agents that talk to the model with OpenAI's client."""
