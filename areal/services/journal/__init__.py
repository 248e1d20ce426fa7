"""Journals: the durable state of service processes, and its adoption by other processes when one dies or drains.

``keys``: tags of journals, and session keys that contain a tag. ``storage``: one journal's folder, lock, SQLite file
and group commit. ``store``: the journals that one process serves. The service defines the contents of its journals:
recorded model calls (``areal.services.inference.recorder``), conversations of agents
(``areal.services.agent.data_proxy``).
"""
