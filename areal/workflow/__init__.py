"""Workflows that are ready to use, and what turns agents, groups and environments into workflows.

rlvr          one answer, one verifiable reward
multi_turn    an answer that is tried again until it is right
agents        any object with ``async run`` that talks to an OpenAI or Anthropic base URL
environment   an agent in a gymnasium-compatible environment
grouped       several episodes of one prompt
"""
