"""Agents of LangChain."""
