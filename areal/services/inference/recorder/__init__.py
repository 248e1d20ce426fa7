"""Sessions, rewards and trajectories: what a data proxy stores of the calls it answered, durable before acknowledged.

``session``    session and trajectory state, their transitions as pure functions, and identifiers
``records``    recorded calls: values, conversation digests, stored bytes, and retries that join a call in flight
``rows``       turns to training rows: discount, branches, columns
``journal``    one folder of recorded sessions: ``storage`` (lock, SQLite, group commit), ``tables``, ``changes`` (and
               the sessions in memory), ``exporting``
``store``      the journals that one process serves, its own and adopted ones, and the leases of online mode
"""
