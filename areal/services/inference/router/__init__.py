"""The router: which workers serve which model, whether they are healthy, and the table that the relays follow.

It answers *where* and never carries a model's bytes. ``table`` and ``picking`` are the part that relays share.
"""
