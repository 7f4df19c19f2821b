"""Wake-up hints between roles on one machine: unix datagrams, only ever a short cut.

A listener binds ``<role>-<pid>.sock`` in the folder that HEADRACE_HINTS names; a sender writes one
JSON object to every ``<role>-*.sock``. Nothing depends on a hint: polling finds the same facts a
little later, so without the variable, a peer or room in its queue a hint is simply not sent.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
import select
import socket
import time
from typing import Any

from infra.contracts.errors import ConfigError

FOLDER_VARIABLE = "HEADRACE_HINTS"
_HINT_BYTES = 65536
_PATH_BYTES = 107
"""What a unix socket's path may have (Linux)."""


class HintListener:
    """Receives the hints for one role in this process."""

    def __init__(self, role: str) -> None:
        folder = os.environ.get(FOLDER_VARIABLE)
        self._socket: socket.socket | None = None
        self._path = ""
        if folder:
            os.makedirs(folder, exist_ok=True)
            self._socket, self._path = _bind(folder, role)

    def wait(self, timeout_secs: float) -> list[dict[str, Any]]:
        """Return all hints that are here, waiting for the first up to ``timeout_secs``.

        An empty list means the time is over. What cannot be read comes as an empty hint.
        """
        timeout_secs = max(timeout_secs, 0.0)
        if self._socket is None:
            time.sleep(timeout_secs)
            return []
        poller = select.poll()  # select() itself stops at file descriptor 1024
        poller.register(self._socket, select.POLLIN)
        poller.poll(math.ceil(timeout_secs * 1000))
        hints = []
        with contextlib.suppress(BlockingIOError):  # drained
            while True:
                hints.append(_decode(self._socket.recv(_HINT_BYTES)))
        return hints

    def close(self) -> None:
        """Stop receiving and remove the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)

    def __enter__(self) -> HintListener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def send_hint(role: str, **payload: Any) -> int:
    """Wake every listener of ``role``; return how many were reached. A peer may be gone."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return 0
    data = json.dumps(payload).encode()
    if len(data) > _HINT_BYTES:
        raise ValueError(f"a hint of {len(data)} bytes; send at most {_HINT_BYTES}, or a key")
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return 0
    peers = [n for n in names if n.startswith(f"{role}-") and n.endswith(".sock")]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        return sum(_send(sender, data, os.path.join(folder, name)) for name in peers)


def _bind(folder: str, role: str) -> tuple[socket.socket, str]:
    """Bind the first free name; a dead process may have had our pid."""
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    receiver.setblocking(False)
    for number in itertools.count():
        suffix = f"-{number}" if number else ""
        path = os.path.join(folder, f"{role}-{os.getpid()}{suffix}.sock")
        if len(os.fsencode(path)) > _PATH_BYTES:
            receiver.close()
            raise ConfigError(
                f"{FOLDER_VARIABLE} = {folder}: {len(os.fsencode(path))} bytes with the socket's "
                f"name, unix sockets take {_PATH_BYTES}; give a folder with a shorter path"
            )
        try:
            receiver.bind(path)
            return receiver, path
        except OSError as e:
            if e.errno != errno.EADDRINUSE:
                receiver.close()
                raise ConfigError(f"{path}: cannot listen: {e.strerror}; check the folder") from e
    raise AssertionError("unreachable")


def _send(sender: socket.socket, data: bytes, path: str) -> bool:
    try:
        sender.sendto(data, path)
        return True
    except ConnectionRefusedError:  # its process died without closing
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    except OSError as e:
        # Gone, or its queue is full (then it wakes anyway), or we may not: polling does it.
        if e.errno not in (errno.ENOENT, errno.EAGAIN, errno.ENOBUFS, errno.EACCES, errno.EMSGSIZE):
            raise
    return False


def _decode(data: bytes) -> dict[str, Any]:
    try:
        hint = json.loads(data)
    except ValueError:
        return {}
    return hint if isinstance(hint, dict) else {}
