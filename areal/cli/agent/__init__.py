"""``areal agent``: agent services, their sessions, conversations and rewards."""
