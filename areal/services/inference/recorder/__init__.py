"""Sessions, rewards and trajectories: a data proxy's durable record of its model calls, written before each response.

``session``    session and trajectory state, their transitions as pure functions, and identifiers
``records``    recorded calls: values, conversation digests, stored bytes, and retries that join a call in flight
``rows``       training rows from turns: discount, branches, columns
``journal``    one folder of recorded sessions; uses ``storage`` (SQLite tables), ``tables``, ``changes`` (with the
               cache of sessions) and ``exporting``
``store``      the journals that one process serves, its own and adopted ones, and the leases of online mode
"""
