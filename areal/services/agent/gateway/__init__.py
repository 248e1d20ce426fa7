"""The agent gateway: conversations by OpenAI's Responses and Chat Completions and by WebSocket, and their sessions.

A session is found by its key: the router says which data proxy has it. A turn's events come from there.
"""
