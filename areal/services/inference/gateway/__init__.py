"""The gateway: one address for all models. Its relay processes follow the router's table and relay model calls.

A relay picks the worker for a model call by itself. It parses only the model's name and the fields that the pick needs
from the request's body, and does not parse the answer's body.
"""
