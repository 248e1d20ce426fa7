"""What is said over the gate and ack pipes, and how a shim leaves that was never told to go."""

GO = b"G"
ACK = b"A"
NOT_STARTED = 70  # EX_SOFTWARE
