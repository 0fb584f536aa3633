"""Ports for the processes, reserved from the moment they are chosen until the processes are gone."""

from __future__ import annotations

import socket

import psutil

from forebay_operator.local.errors import LocalError

_TRIES = 2000


class Ports:
    """Holds a bound socket on each port it gave out.

    On Linux a process that binds with SO_REUSEADDR may still listen on such a port, as long as the holder does not
    listen itself; everyone who looks for a free port, the kernel included, finds it taken. So two `up`s that start at
    once never get the same port, and a worker finds its own again after a restart.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._held: list[socket.socket] = []

    def take(self, port: int, remedy: str) -> int:
        """This very port. Raises LocalError when something listens on it; `remedy` ends the message."""
        listener = _socket(self._host)
        try:
            # Connections of an earlier run that linger in TIME_WAIT do not count: the process can bind all the same.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self._host, port))
            listener.listen(1)
        except OSError as error:
            raise LocalError(f"port {port} on {self._host} can't be used{_owner(port, error)}; {remedy}") from None
        finally:
            listener.close()
        holder = _socket(self._host)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((self._host, port))
        self._held.append(holder)
        return port

    def find(self, start: int, count: int) -> list[int]:
        """`count` free ports from `start` up. Raises LocalError when there are not so many in the next 2000."""
        found: list[int] = []
        for port in range(start, min(start + _TRIES, 65536)):
            if len(found) == count:
                break
            holder = _socket(self._host)
            try:
                holder.bind((self._host, port))
            except OSError:
                holder.close()
                continue
            # Set after bind: bind itself had to fail for a port that another reserved.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._held.append(holder)
            found.append(port)
        if len(found) < count:
            raise LocalError(
                f"only {len(found)} of {count} ports are free from {start} up; choose another --worker-port"
            )
        return found

    def close(self) -> None:
        for holder in self._held:
            holder.close()
        self._held.clear()


def _socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)


def _owner(port: int, error: OSError) -> str:
    """Who listens on the port, where that may be seen."""
    try:
        for connection in psutil.net_connections(kind="tcp"):
            listens_on = tuple(connection.laddr)[1:2] if connection.status == psutil.CONN_LISTEN else ()
            if listens_on == (port,) and connection.pid:
                return f": process {connection.pid} ({psutil.Process(connection.pid).name()}) listens on it"
    except (psutil.Error, OSError):
        pass
    return f": {error.strerror}"
