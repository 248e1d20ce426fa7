"""The shim: one small process above each component. Standard library only, single-threaded, no daemon.

It is session leader, subreaper and parent of the component; it owns restart and back-off, the log, the liveness
probe and the exit record, and holds the leases' descriptors so that the kernel frees them when it dies. It is
started as ``python -I -S areal/runtime/shim/__main__.py`` and reads nothing but its run folder. All its modules are
imported before it says that it lives, so that upgrading areal under a running shim changes nothing.
"""

# Over the gate and ack pipes, and the exit status of a shim that was never told to go.
GO = b"G"
ACK = b"A"
NO_FOLDER = "there is no working folder "  # how the reason of an exit begins, where the component could not start in it
NOT_STARTED = 70  # EX_SOFTWARE
PARENT_VARIABLE = "AREAL_NODE_PROGRAM"  # the pid of the program of a cluster's job, without which a shim must not live
