"""The agent gateway: turns over OpenAI's Responses and Chat Completions APIs and over WebSocket, and session routes.

The router maps a session's key to the data proxy that holds the session, which runs the turn and sends its events.
"""
