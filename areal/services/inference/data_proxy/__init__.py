"""The data proxy, one beside each engine: text in and out, tokens to and from the engine.

It templates and tokenises, follows the engine's tokens as they come, cuts at stop strings, and records every answer of
a session before its caller has the last byte of it.
"""
