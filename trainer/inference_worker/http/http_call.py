"""One caller's wait: for tokens, for finished groups, or for the caller to go away.

A handler's thread sleeps on two sockets: the caller's, which becomes readable when it is closed,
and one end of a pair that the engine's thread rings. So nothing polls, and a request whose caller
has gone gives its slots back at once.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Self

import numpy as np

from infra.contracts.errors import InferenceError
from infra.contracts.records import GenerateReply, GenerateRequest
from trainer.inference_worker.generation_job import Drawn
from trainer.inference_worker.scheduler import Scheduler

GRACE_SECS = 5.0
"""How much longer than its deadline a request is waited for: the engine reports lateness itself."""


class CallerGone(ConnectionError):
    """The other side closed its connection before it had its answer."""


class Call:
    """The groups of one HTTP request. Leaving the context cancels what is unfinished."""

    def __init__(self, scheduler: Scheduler, caller: socket.socket) -> None:
        self._scheduler, self._caller = scheduler, caller
        self._bell, self._ear = socket.socketpair()
        self._bell.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._ear, select.POLLIN)
        self._poll.register(caller, select.POLLIN)
        self._lock = threading.Lock()
        self._items: list[tuple[int, Drawn | Future[GenerateReply]]] = []
        self._open = True
        self._futures: list[tuple[str, Future[GenerateReply]]] = []
        self._wait_secs = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for request_id, future in self._futures:
            self._scheduler.cancel(request_id, future)  # does nothing to a finished one
        with self._lock:
            self._open = False
            self._bell.close()
        self._ear.close()

    def submit(
        self,
        request: GenerateRequest,
        *,
        prompt_ids: np.ndarray | None = None,
        stream: bool = False,
    ) -> None:
        """Queue a group; ``stream``: its tokens are wanted as they are drawn."""
        number = len(self._futures)
        watch = (lambda drawn: self._put(number, drawn)) if stream else None
        future = self._scheduler.submit(request, prompt_ids=prompt_ids, watch=watch)
        self._futures.append((request.request_id, future))
        self._wait_secs = max(self._wait_secs, request.timeout_secs + GRACE_SECS)
        future.add_done_callback(lambda done: self._put(number, done))

    def events(self) -> Iterator[list[tuple[int, Drawn | GenerateReply]]]:
        """Yield what has come since the last time, until all groups are done.

        A group's number with each of its tokens, as drawn, and at last with its reply.

        Raises:
            InferenceError: a group failed.
            CallerGone: nobody waits any more.
        """
        unfinished = len(self._futures)
        while unfinished:
            news = []
            for number, item in self._take():
                if isinstance(item, Future):
                    unfinished -= 1
                    item = item.result()
                news.append((number, item))
            yield news

    def replies(self) -> list[GenerateReply]:
        """Wait for all groups; replies in the order of submission."""
        done = {number: item for news in self.events() for number, item in news}
        return [done[number] for number in range(len(self._futures))]

    def _put(self, number: int, item: Drawn | Future[GenerateReply]) -> None:
        with self._lock:
            if not self._open:
                return
            self._items.append((number, item))
            if len(self._items) == 1:
                with contextlib.suppress(BlockingIOError):  # rung often enough
                    self._bell.send(b"!")

    def _take(self) -> list[tuple[int, Drawn | Future[GenerateReply]]]:
        while True:
            with self._lock:
                items, self._items = self._items, []
            if items:
                return items
            ready = [fd for fd, _ in self._poll.poll(self._wait_secs * 1000)]
            if not ready:
                raise InferenceError("no answer within its time; is the engine alive?")
            if self._ear.fileno() in ready:
                self._ear.recv(64)
            if self._caller.fileno() in ready:
                self._look_at_caller()

    def _look_at_caller(self) -> None:
        try:
            gone = not self._caller.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            gone = True
        if gone:
            raise CallerGone("the caller closed its connection")
        self._poll.unregister(self._caller)  # it sends its next request early: it is there
