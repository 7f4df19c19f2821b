"""A child process that answers one JSON line at a time, under a deadline that really holds.

Reads and writes go through ``select``, so neither a child that does not read nor one that does not
answer can block the parent; when the deadline passes the child's process group is killed and
reaped, and the next call starts a new one.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

MAX_ANSWER_BYTES = 1 << 20


class ChildTimeout(Exception):
    """The child did not answer in time; it has been killed."""


class ChildFailed(Exception):
    """The child could not be started, ended, or answered with something that is no answer."""


class ChildProcess:
    """One persistent child. Calls from several threads take turns; each has the whole deadline."""

    def __init__(self, argv: Sequence[str], *, start_secs: float) -> None:
        self._argv = [sys.executable, *argv]
        self._start_secs = start_secs
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self.greeting: dict[str, Any] = {}
        self.starts = 0
        _living.add(self)

    def start(self) -> dict[str, Any]:
        """Start the child unless it lives, return its greeting. Raises ``ChildFailed``."""
        with self._lock:
            self._ensure()
            return self.greeting

    def call(self, request: dict[str, Any], deadline_secs: float) -> dict[str, Any]:
        """Send one request and return the answer.

        Raises:
            ChildTimeout: no answer within ``deadline_secs`` (starting the child is not counted).
            ChildFailed: the child died, or its answer is not one JSON object.
        """
        with self._lock:
            self._ensure()
            return self._exchange(json.dumps(request).encode() + b"\n", deadline_secs)

    def close(self) -> None:
        """Kill and reap the child; a later call starts a new one."""
        with self._lock:
            self._kill()

    def _ensure(self) -> None:
        if self._process and self._process.poll() is None:
            return
        self._kill()
        self._process = subprocess.Popen(
            self._argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            os.set_blocking(pipe.fileno(), False)
        self.starts += 1
        try:
            self.greeting = self._exchange(b"", self._start_secs)
        except ChildTimeout:
            raise ChildFailed(f"not started within start_secs = {self._start_secs:g}") from None
        if "error" in self.greeting:
            self._kill()
            raise ChildFailed(self.greeting["error"])

    def _exchange(self, data: bytes, deadline_secs: float) -> dict[str, Any]:
        try:
            answer = json.loads(self._transfer(data, time.monotonic() + deadline_secs))
            if not isinstance(answer, dict):
                raise ValueError("not an object")
            return answer
        except (ChildTimeout, ChildFailed):
            self._kill()
            raise
        except (OSError, ValueError) as e:
            self._kill()
            raise ChildFailed(f"the scorer process failed: {e}") from e

    def _transfer(self, data: bytes, deadline: float) -> bytes:
        process = self._process
        assert process and process.stdin and process.stdout
        out, received = memoryview(data), bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if out:
                selector.register(process.stdin, selectors.EVENT_WRITE)
            while not received.endswith(b"\n"):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise ChildTimeout
                for key, _ in selector.select(left):
                    if key.fileobj is process.stdin:
                        out = out[os.write(process.stdin.fileno(), out) :]
                        if not out:
                            selector.unregister(process.stdin)
                        continue
                    chunk = os.read(process.stdout.fileno(), 1 << 16)
                    if not chunk:
                        raise ChildFailed(f"the scorer process ended with {process.wait()}")
                    received += chunk
                    if len(received) > MAX_ANSWER_BYTES:
                        raise ChildFailed(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
        return bytes(received)

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            process.poll()  # already gone, with all its group
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe:
                pipe.close()


_living: weakref.WeakSet[ChildProcess] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for child in list(_living):
        child.close()
