"""Ports for servers that come later, or come back: nobody else's in between."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

LEAST = 10_000
TRIES = 200


def lasting_port(host: str = "") -> int:
    """A port that is free, and that the kernel gives to nobody by itself.

    One that was got by binding port 0 is any other process's again as soon as it is let go: as its
    own free port, or as the near end of a connection, even of one that is made to that very port.

    Args:
        host: an address; empty: all of this machine's.
    """
    text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
    first = int(text.split()[0])  # from here on they are the kernel's to give
    assert first > LEAST, f"no port under {first} is left to choose from"
    for _ in range(TRIES):
        port = LEAST + secrets.randbelow(first - LEAST)
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"none of {TRIES} ports from {LEAST} to {first} is free")
