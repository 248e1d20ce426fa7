"""The gateway: one address for every model. Relay processes that follow the router's table and pass bytes on.

A relay makes no other call per request. It reads the model's name and the fields that the pick needs from a request's
body, and nothing from an answer's.
"""
