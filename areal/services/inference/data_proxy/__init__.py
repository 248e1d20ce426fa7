"""The data proxy, one beside each engine: text in and out, tokens to and from the engine.

It templates and tokenises off the event loop, follows the engine's tokens as they come, cuts at stop strings,
and hands every finished interaction on as one value (``interaction``).
"""
