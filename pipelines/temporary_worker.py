"""An inference worker for as long as a job needs one: ``headrace serve`` as a child process."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from infra.clock import Clock
from infra.contracts.errors import InferenceError
from infra.inference.http_client import HttpInferenceClient
from pipelines.launcher.ports import free_port
from pipelines.launcher.role_commands import HEADRACE

HOST = "127.0.0.1"
START_SECS = 300.0
STOP_SECS = 10.0
POLL_SECS = 0.1


@contextlib.contextmanager
def temporary_worker(run: str, version: int, clock: Clock) -> Iterator[str]:
    """Start a worker of one version, wait until it answers, stop it at the end.

    Yields:
        Its URL.

    Raises:
        InferenceError: it ended by itself, or did not answer in ``START_SECS``.
    """
    port = free_port(HOST)
    words = ("serve", run, "--version", str(version), "--port", str(port))
    # Our stdout is for the result alone.
    process = subprocess.Popen((*HEADRACE, *words), stdout=sys.stderr)
    try:
        url = f"http://{HOST}:{port}"
        _wait_until_healthy(url, process, clock)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_healthy(url: str, process: subprocess.Popen, clock: Clock) -> None:
    deadline = clock.now() + START_SECS
    with contextlib.closing(HttpInferenceClient(url, threads=1)) as client:
        while True:
            if process.poll() is not None:
                raise InferenceError(f"the worker ended with {process.returncode} at its start")
            try:
                client.health()
                return
            except InferenceError as e:
                if clock.now() > deadline:
                    raise InferenceError(f"{e} (waited {START_SECS:g} s)") from e
            clock.wait(POLL_SECS)
