"""The gateway: one address for every model. Relay processes that follow the router's table and pass bytes on.

A relay asks nobody per request. It reads of a body only the model's name and what the pick needs, and of an answer
nothing at all.
"""
