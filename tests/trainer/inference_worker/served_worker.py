"""A server over the counting engine, and a vocabulary whose tokens are parts of characters."""

import http.client
import json
import threading

import numpy as np

from infra.clock import SystemClock
from trainer.inference_worker.config import InferenceConfig
from trainer.inference_worker.engine.counting_engine import CountingEngine
from trainer.inference_worker.http.http_backend import Backend
from trainer.inference_worker.scheduler import Scheduler
from trainer.inference_worker.server import WorkerServer

TEXT = "abc Zürich 5 €, 数学; 🙂 ok. Q: 1 A: 2\n"
VOCABULARY = [bytes([b]) for b in TEXT.encode()]


class Pieces:
    """Token i is the i-th byte of ``TEXT``, so counting on writes it; no token ends a response."""

    eos_ids = ()
    digest = "pieces"
    vocab_size = len(VOCABULARY)

    def encode_prompt(self, messages):
        text = "".join(m.content for m in messages)
        try:
            return np.array(self.encode_prompt_text(text), np.int32)
        except ValueError as e:
            raise ValueError(f"{text[:20]!r} is not in the vocabulary") from e

    def encode_prompt_text(self, text):
        return [VOCABULARY.index(bytes([b])) for b in text.encode()]

    def encode(self, text):
        return np.array(self.encode_prompt_text(text), np.int32)

    def decode(self, ids):
        return b"".join(VOCABULARY[i] for i in ids).decode(errors="replace")

    def token_text(self, token):
        return self.decode([token])


class Served:
    """A worker on a port; use as a context."""

    def __init__(
        self,
        *,
        slots=4,
        max_len=64,
        version=7,
        max_queue=64,
        tokenizer=None,
        kind=CountingEngine,
        **server,
    ):
        self.tokenizer = tokenizer or Pieces()
        engine = kind(slots, max_len, self.tokenizer.vocab_size)
        settings = InferenceConfig(slots=slots, max_len=max_len, max_queue=max_queue)
        self.scheduler = Scheduler(engine, self.tokenizer, settings, SystemClock())
        if version >= 0:
            self.scheduler.offer_weights(version, "seven", {})
        self.totals = self.scheduler.totals
        backend = Backend(scheduler=self.scheduler, tokenizer=self.tokenizer, model="counting")
        self.server = WorkerServer("127.0.0.1", 0, backend, **server)
        self.address = self.server.server_address[:2]
        self.url = "http://{}:{}".format(*self.address)
        jobs = (self.scheduler.run, lambda: self.server.serve_forever(poll_interval=0.02))
        self._threads = [threading.Thread(target=job) for job in jobs]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.scheduler.stop()
        self.server.shutdown()
        self.server.server_close()
        for thread in self._threads:
            thread.join()

    def connect(self):
        return http.client.HTTPConnection(*self.address, timeout=20)

    def ask(self, path, body=None, headers=None):
        """One request on a connection of its own: status, headers, body as JSON or text."""
        connection = self.connect()
        try:
            if isinstance(body, dict):
                body = json.dumps(body).encode()
            connection.request("GET" if body is None else "POST", path, body, headers or {})
            response = connection.getresponse()
            text = response.read()
        finally:
            connection.close()
        kind = response.headers["Content-Type"]
        return response.status, response.headers, json.loads(text) if "json" in kind else text
