"""Sessions, rewards and trajectories: what a data proxy keeps of the calls it answered, durable before acknowledged.

``session``       what may happen to one session, as pure functions
``conversation``  which turn a call continues, found by its messages or its tokens
``tree``, ``rows``, ``npz``   turns to training rows: discount, branches, columns
``journal``       one folder of recorded sessions, in SQLite, with group commit and checksums
``vault``         the journals that one process serves: its own, and those of predecessors
``flights``       retries that join or replay instead of sampling again
"""
