"""The data proxy, one process per engine: it exchanges text with clients and tokens with the engine.

It renders chat templates, tokenizes prompts, decodes the engine's tokens as they arrive, ends the text at stop strings,
and records every response of a session before the client receives its last byte.
"""
