"""Processes that die at a chosen moment, without a chance to clean up."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import Any

from infra.storage.object_store import ObjectStore

DIED = 77
PRELOAD = ["tests.infra.faults.writers", "tests.infra.faults.checkpoint_writer"]
_WRITES = ("create", "compare_and_swap", "delete")


class Moment(StrEnum):
    """When in its n-th call of a store, or of the file system, a process dies."""

    AFTER = "after"
    BEFORE = "before"
    DURING = "halfway through the data of"
    FILE = "before the file system's"


class DyingStore:
    """Passes every call on and remembers it; the process ends in call ``number`` (from 1)."""

    def __init__(self, store: ObjectStore, number: int = 0, moment: Moment = Moment.AFTER) -> None:
        self._store, self._number, self._moment = store, number, moment
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._store, name)
        if not callable(member):
            return member
        return lambda *args, **options: self._call(name, member, *args, **options)

    def _call(self, name: str, member: Callable, *args: Any, **options: Any) -> Any:
        self.calls.append(f"{name} {args[0]}")
        if len(self.calls) != self._number:
            return member(*args, **options)
        if self._moment is Moment.AFTER:
            member(*args, **options)
        if self._moment is Moment.DURING:
            key, data, *expected = args
            if expected == [None]:
                self._store.create(key, _half(data))
            else:
                member(key, _half(data), *expected, **options)
        os._exit(DIED)


def moments_of(calls: Iterable[str]) -> Iterator[tuple[int, Moment, str]]:
    """Every moment to die in: after each call, before each write and halfway through its data."""
    for number, call in enumerate(calls, 1):
        yield number, Moment.AFTER, call
        if call.startswith(_WRITES):
            yield number, Moment.BEFORE, call
        if call.startswith(("create", "compare_and_swap")):
            yield number, Moment.DURING, call


def watch_files(folder: str, number: int = 0) -> list[str]:
    """Remember every change of a file below ``folder`` from now on; die before the n-th."""
    changes: list[str] = []

    def hook(event: str, args: tuple) -> None:
        if not (event == "open" or event.startswith("os.")) or not args:
            return
        if not isinstance(args[0], str | os.PathLike) or not str(args[0]).startswith(folder):
            return
        reads = event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if reads or event in ("os.listdir", "os.scandir"):
            return
        changes.append(f"{event} {os.path.relpath(args[0], folder)}")
        if len(changes) == number:
            os._exit(DIED)

    sys.addaudithook(hook)
    return changes


def run_child(work: Callable[..., None], *args: object) -> int:
    """Run ``work`` in a process of its own and return its exit status.

    The child is forked from a server that has imported everything and started no threads.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    child = context.Process(target=work, args=args)
    child.start()
    child.join(60)
    assert child.exitcode is not None, "the child hangs"
    return child.exitcode


def _half(data: bytes | Iterable[bytes | memoryview]) -> Iterator[bytes]:
    pieces = [data] if isinstance(data, bytes | bytearray | memoryview) else data
    for piece in pieces:
        yield bytes(piece)[: len(bytes(piece)) // 2]
        os._exit(DIED)
