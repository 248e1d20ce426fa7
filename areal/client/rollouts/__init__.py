"""Episodes run against an inference service, as many and as stale as a trainer allows.

admission   how many episodes may start: pure
ledger      what becomes of every episode, and the counts that admission needs: no I/O
episodes    one episode: attempts, their deadline, whose fault a failure is
executor    tasks on one event loop
engine      what a workflow samples from
controller  the blocking face of it all, for a trainer
"""
