"""The router: which workers serve which model, whether they are healthy, and the routing table that relays follow.

No model call passes through it. Relays share ``picking``.
"""
