"""Ports for processes that a test starts."""

import random
import socket

#: Below those that the kernel gives to whoever asks for any port: nobody takes one of these between
#: our look and the bind of the process that it is for.
_RANGE = range(10_000, 30_000)


def free_port() -> int:
    """Draw a port at which nobody listens."""
    while True:
        port = random.SystemRandom().choice(_RANGE)
        with socket.socket() as tried:
            try:
                tried.bind(("", port))
            except OSError:
                continue
        return port
