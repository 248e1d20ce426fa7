"""The first thing a shim does: wait to be told that its record is safe.

The caller writes ``G`` after it has made the intent durable and noted our pid. Anything else, and above all end of
file (the caller died), means that nobody knows about us: leave, having started nothing.
"""

from __future__ import annotations

import os
from contextlib import suppress

from areal.runtime.shim import ACK, GO, NOT_STARTED
from areal.runtime.shim.supervisor import RunSupervisor


def main(argv: list[str]) -> int:
    run_dir = argv[0]
    gate, ack, *held = (int(text) for text in argv[1:])
    for fd in (gate, ack, *held):
        os.set_inheritable(fd, False)  # the component must not keep a lease alive
    if os.read(gate, 1) != GO:
        return NOT_STARTED
    os.close(gate)
    supervisor = RunSupervisor(run_dir, held)
    supervisor.begin()
    with suppress(BrokenPipeError):  # the caller died after the "go": the record is complete, carry on
        os.write(ack, ACK)
    os.close(ack)
    return supervisor.run()
