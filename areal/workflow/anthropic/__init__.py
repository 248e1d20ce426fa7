"""Agents that use Anthropic's API."""
