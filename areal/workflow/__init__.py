"""Built-in workflows, under the import paths that drivers and configurations use.

rlvr          one answer with a verifiable reward
multi_turn    further answers until one is correct
environment   an agent in a gymnasium-compatible environment
openai        agents that use OpenAI's client
openai_agent  agents of the OpenAI Agents SDK
langchain     agents of LangChain
anthropic     agents of the Claude Agent SDK
"""
