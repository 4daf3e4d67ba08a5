"""The connections that MLX's ring has opened, and whether one of them is closed.

MLX reports a lost rank where something waits for it. While a forward is being sent off it may not:
the rank then waits for room in a queue that nobody empties any more.
"""

import errno
import os
import socket
import stat
from contextlib import suppress
from typing import Any


def connections() -> dict[int, Any]:
    """This process's connections: file numbers, and the addresses at the other end."""
    found: dict[int, Any] = {}
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # no socket, or not a connected one
            found[int(name)] = address(int(name))
    return found


def address(number: int) -> Any:
    with opened(number) as one:
        return one.getpeername()


def opened(number: int) -> socket.socket:
    """A socket of its own for a file number; OSError if that is no socket, of which `fromfd` would
    leave a copy open."""
    if not stat.S_ISSOCK(os.fstat(number).st_mode):
        raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))
    return socket.fromfd(number, socket.AF_INET, socket.SOCK_STREAM)


class Connections:
    """Some connections, looked at from outside: nothing is read from them."""

    def __init__(self, made: dict[int, Any]):
        self.made = dict(made)

    @property
    def closed(self) -> bool:
        """Whether the other end of one of them is gone. One that this process has closed itself,
        and whose number another file may have, does not count."""
        return any(self.ended(number) for number in list(self.made))

    def ended(self, number: int) -> bool:
        try:
            with opened(number) as one:
                if one.getpeername() != self.made[number]:
                    del self.made[number]
                    return False
                return not one.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionError:
            return True
        except OSError:  # closed here, or no socket any more
            del self.made[number]
            return False
