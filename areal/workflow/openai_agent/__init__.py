"""Agents of the OpenAI Agents SDK."""
