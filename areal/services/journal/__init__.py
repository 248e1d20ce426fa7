"""Journals: what service processes keep on disk, and how it changes hands when one dies or drains.

``keys`` names journals and the keys that carry those names, ``storage`` is one journal's folder, lock, SQLite file and
group commit, ``store`` the journals that one process serves. What a journal holds is its service's business: recorded
model calls (``areal.services.inference.recorder``), conversations of agents (``areal.services.agent.data_proxy``).
"""
