"""The shim: a small process that supervises a component. Standard library only, single-threaded, no daemon.

It is session leader, subreaper and parent of the component. It handles restarts and back-off, the log, the liveness
probe and the exit record, and holds the leases' descriptors so that the kernel frees them when it dies. It is started
as ``python -I -S areal/runtime/shim/__main__.py`` and reads nothing but its run folder. All its modules are imported
before it reports that it lives, so that upgrading areal does not affect a running shim.
"""

# Sent over the gate and ack pipes, and the exit status of a shim that never received GO.
GO = b"G"
ACK = b"A"
NO_FOLDER = "there is no working folder "  # how the reason of an exit begins, where the component could not start in it
NOT_STARTED = 70  # EX_SOFTWARE
PARENT_VARIABLE = "AREAL_NODE_PROGRAM"  # the pid of the program of a cluster's job, without which a shim must not live
