"""A worker in this process that does what its script says."""

import dataclasses
import threading

from infra.contracts.errors import InferenceError
from infra.inference.capabilities import NATIVE
from infra.inference.fake_client import FakeInferenceClient
from infra.inference.worker import Busy, Failed, Unreachable


class ScriptedWorker:
    """A worker in this process: each call takes the next word of its script, then the last."""

    capabilities = NATIVE

    def __init__(self, name, words, clock):
        self.name, self.words, self.clock = name, list(words), clock
        self.fake = FakeInferenceClient()
        self.calls = 0
        self.lock = threading.Lock()

    def attempt(self, request, call):
        with self.lock:
            word = self.words.pop(0) if len(self.words) > 1 else self.words[0]
            self.calls += 1
        if word == "dead":
            raise Unreachable("connection refused")
        if word == "busy":
            raise Busy("full", 1.0)
        if word == "failed":
            raise Failed("status 500")
        if word == "refused":
            raise InferenceError("set up wrongly", retryable=False)
        if word == "hang":
            self.clock.wait(request.timeout_secs)
            raise Unreachable("timed out")
        reply = self.fake.answer(request)
        return dataclasses.replace(reply, samples=()) if word == "lie" else reply

    def probe(self, timeout_secs):
        with self.lock:
            if self.words[0] in ("dead", "hang"):
                raise Unreachable("no answer")

    def close(self):
        pass
