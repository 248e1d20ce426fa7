"""Workflows that are ready to use, by the names that drivers and configurations say.

rlvr          one answer, one verifiable reward
multi_turn    an answer that is tried again until it is right
environment   an agent in a gymnasium-compatible environment
openai        agents with OpenAI's client
"""
