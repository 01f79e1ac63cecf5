"""Taking connections, many at a time.

uvloop takes one new connection in each turn of its loop, so when hundreds come at once, as after a
restart, and turns are long, the last ones wait for seconds in the kernel's queue.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

LOGGER = logging.getLogger("twinkeel.http")
BACKLOG = 4096
AT_ONCE = 64
"""Connections taken in one turn: the open ones must go on, too."""
PAUSE_S = 0.1
"""When there are no file descriptors left."""
FULL = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Acceptor:
    """Listens, and hands each connection to a protocol of its own.

    Raises:
        OSError: the address cannot be had.
    """

    def __init__(
        self, protocol: Callable[[], asyncio.BaseProtocol | None], host: str, port: int
    ) -> None:
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=BACKLOG)
        self._socket.setblocking(False)
        self._tasks: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self.port: int = self._socket.getsockname()[1]
        self._go_on()

    def stop(self) -> None:
        """Take no more. Connections that were taken go on; stopping twice is harmless."""
        if self._pause is not None:
            self._pause.cancel()
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()

    def _go_on(self) -> None:
        self._pause = None
        self._loop.add_reader(self._socket.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                connection, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in FULL:
                    raise
                LOGGER.warning("no connection can be taken now: %s", error.strerror)
                self._loop.remove_reader(self._socket.fileno())
                self._pause = self._loop.call_later(PAUSE_S, self._go_on)
                return
            connection.setblocking(False)
            task = self._loop.create_task(self._take(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _take(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(self._protocol, connection)  # type: ignore[type-var]
        except OSError:  # it is gone already
            connection.close()
