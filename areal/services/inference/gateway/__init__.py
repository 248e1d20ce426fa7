"""The gateway: one address for all models. Its relay processes follow the router's table and pass bytes on.

For a model call a relay picks the worker by itself. It reads the model's name and the fields that the pick needs
from the request's body, and nothing from the answer's.
"""
