"""Sessions, rewards and trajectories: what a data proxy stores of the calls it answered, durable before acknowledged.

``session``    session and trajectory state, their transitions as pure functions, and identifiers
``records``    recorded calls: values, conversation digests, stored bytes
``rows``       turns to training rows: discount, branches, columns
``journal``    one folder of recorded sessions: ``storage`` (lock, SQLite, group commit), ``tables``, ``cache``,
               ``changes``, ``exporting``
``store``      the journals that one process serves, its own and adopted ones, and the leases of online mode
``retries``    retries that join or replay a call instead of sampling again
"""
