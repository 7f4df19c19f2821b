"""How the server says no: full, crowded, stopping, without weights, left by its caller."""

import dataclasses
import json
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from infra.bearer_token import WORKER
from infra.contracts.errors import InferenceError
from infra.contracts.records import GenerateRequest, Message, SamplingParams
from infra.inference.open_client import open_client
from tests.trainer.inference_worker.served_worker import Served
from trainer.inference_worker.http.http_limits import HttpLimits

ENDLESS = {"prompt": "a", "max_tokens": 2**31 - 1}
"""With a context of a million tokens it ends when it is cancelled."""
SHORT = {"prompt": "a", "max_tokens": 3}
MILLION = 1_000_000


def metric(served, name):
    text = served.ask("/metrics")[2].decode()
    return {k: float(v) for k, v in re.findall(rf"^headrace_worker_{name}(\S*) (\S+)$", text, re.M)}


def begin(served, body, page="/v1/completions"):
    """Send a request and return its socket, unread."""
    data = json.dumps(body).encode()
    peer = socket.create_connection(served.address, timeout=20)
    peer.sendall(b"POST %b HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (page.encode(), len(data)))
    peer.sendall(data)
    return peer


def first_event(peer):
    """Read a stream as far as its first event."""
    reader = peer.makefile("rb")
    for line in reader:
        if line.startswith(b"data: "):
            return json.loads(line[6:])
    raise AssertionError("the stream ended")


class Held:
    """A scheduler whose tokens wait at a gate, once one is drawn."""

    def __init__(self, scheduler):
        self._scheduler = scheduler
        self.gate, self.drawn = threading.Event(), threading.Event()

    def __getattr__(self, name):
        return getattr(self._scheduler, name)

    def submit(self, request, *, prompt_ids, watch):
        def slowly(token):
            watch(token)
            self.drawn.set()
            self.gate.wait(20)

        return self._scheduler.submit(request, prompt_ids=prompt_ids, watch=slowly)


@pytest.mark.parametrize("stream", [False, True])
def test_a_caller_that_leaves_frees_its_slots(stream):
    with Served(slots=2, max_len=MILLION) as served:
        peers = [begin(served, {**ENDLESS, "stream": stream}) for _ in range(2)]
        other = begin(served, {**ENDLESS, "stream": True, "seed": 1})  # begins once a slot is free
        for peer in peers:
            peer.close()
        assert first_event(other)["choices"]
        assert served.ask("/v1/completions", SHORT)[0] == 200  # the other slot
        other.close()
        assert served.ask("/v1/completions", {**SHORT, "n": 2})[0] == 200
        assert served.totals.cancelled == 3
        assert metric(served, "groups_cancelled_total") == {"": 3}


def test_a_full_queue_is_429_with_retry_after():
    with Served(slots=2, max_len=MILLION, max_queue=2) as served:
        peers = [begin(served, {**ENDLESS, "stream": True}) for _ in range(2)]
        for peer in peers:
            first_event(peer)
        status, headers, body = served.ask("/v1/completions", SHORT)
        assert (status, headers["Retry-After"]) == (429, "1")
        assert body["error"]["type"] == "rate_limit_error"
        assert "the queue is full" in body["error"]["message"]
        two = {**SHORT, "prompt": ["a", "b"]}
        peers.pop().close()
        while served.ask("/v1/completions", SHORT)[0] == 429:
            pass  # until the slot is free again
        # Of two groups only one finds a place: both are refused, the first does not stay behind.
        assert served.ask("/v1/completions", two)[0] == 429
        while served.ask("/v1/completions", SHORT)[0] == 429:
            pass
        peers.pop().close()


def test_a_draining_worker_finishes_what_runs_and_takes_nothing_new():
    with Served() as served, ThreadPoolExecutor() as pool:
        held = Held(served.scheduler)
        served.server.backend = dataclasses.replace(served.server.backend, scheduler=held)
        running = pool.submit(served.ask, "/v1/completions", {**SHORT, "stream": True})
        assert held.drawn.wait(20)
        served.server.drain()
        status, headers, body = served.ask("/v1/completions", SHORT)
        assert (status, headers["Retry-After"], headers["Connection"]) == (503, "1", "close")
        assert "stopping" in body["error"]["message"]
        assert served.ask("/health")[0] == 503
        assert served.ask("/healthz")[0] == 200
        assert not served.server.wait_idle(0)
        held.gate.set()
        assert running.result(20)[2].endswith(b"data: [DONE]\n\n")
        assert served.server.wait_idle(20)


def test_without_weights_requests_wait_at_first_and_are_refused_later():
    limits = HttpLimits(no_weights_secs=1e-9)
    with Served(version=-1, limits=limits) as served:
        status, _, body = served.ask("/v1/completions", SHORT)
        assert (status, "no weights" in body["error"]["message"]) == (503, True)
        assert served.ask("/health")[0] == 503
        served.scheduler.offer_weights(1, "one", {})
        while served.scheduler.version < 0:
            pass
        assert served.ask("/v1/completions", SHORT)[0] == 200
    with Served(version=-1) as served, ThreadPoolExecutor() as pool:
        waiting = pool.submit(served.ask, "/v1/completions", SHORT)
        served.scheduler.offer_weights(1, "one", {})
        assert waiting.result(20)[0] == 200


def test_connections_beyond_the_limit_are_told_so():
    with Served(limits=HttpLimits(connections=2)) as served:
        others = [served.connect() for _ in range(2)]
        for kept in others:
            kept.request("GET", "/health")
            assert kept.getresponse().read()
        status, headers, _ = served.ask("/v1/completions", SHORT)
        assert (status, headers["Retry-After"], headers["Connection"]) == (503, "1", "close")
        assert metric(served, "connections")[""] >= 3  # probes still see it
        kept.request("POST", "/v1/completions", json.dumps(SHORT))
        assert kept.getresponse().status == 200
        for kept in others:
            kept.close()


def test_a_body_that_is_too_long_is_refused_before_it_is_sent():
    with Served(limits=HttpLimits(body_bytes=1000)) as served:
        status, _, body = served.ask("/v1/completions", b"x" * 1001)
        assert (status, body["error"]["type"]) == (413, "invalid_request_error")
        with socket.create_connection(served.address, timeout=20) as peer:
            head = b"POST /v1/completions HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: "
            peer.sendall(head + b"1001\r\n\r\n")
            assert peer.makefile("rb").readline().split()[1] == b"413"
        with socket.create_connection(served.address, timeout=20) as peer:
            data = json.dumps(SHORT).encode()
            peer.sendall(head + b"%d\r\n\r\n" % len(data))
            reader = peer.makefile("rb")
            assert reader.readline().split()[1] == b"100"
            assert reader.readline() == b"\r\n"
            peer.sendall(data)
            assert reader.readline().split()[1] == b"200"


def test_a_stream_over_http_1_0_ends_with_its_connection():
    with Served() as served, socket.create_connection(served.address, timeout=20) as peer:
        data = json.dumps({**SHORT, "stream": True}).encode()
        peer.sendall(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(data))
        peer.sendall(data)
        answer = peer.makefile("rb").read()
        assert answer.endswith(b"data: [DONE]\n\n")
        assert b"Transfer-Encoding" not in answer


def test_an_error_within_a_stream_is_an_event_and_no_end_mark_follows():
    with Served(max_len=MILLION) as served:
        answer = served.ask("/v1/completions", {**ENDLESS, "stream": True, "timeout_secs": 0.2})
        assert answer[0] == 200
        last = answer[2].rstrip().rpartition(b"\n\n")[2]
        assert "no answer within 0.2 s" in json.loads(last[6:])["error"]["message"]


def test_a_worker_that_stops_tells_its_callers():
    with Served(max_len=MILLION) as served, ThreadPoolExecutor() as pool:
        asked = pool.submit(served.ask, "/v1/completions", ENDLESS)
        while not served.scheduler.load()[0]:
            pass
        served.scheduler.stop()
        status, _, body = asked.result(20)
        assert (status, "stopping" in body["error"]["message"]) == (503, True)


def test_the_token_guards_what_generates_and_not_the_probes():
    with Served(token="secret") as served:
        for page in ("/v1/completions", "/v1/chat/completions", "/generate", "/v1/generate"):
            status, headers, _ = served.ask(page, SHORT, {"Authorization": "Bearer sécret"})
            assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
            assert served.ask(page, SHORT)[0] == 401
            assert served.ask(page, b"{}", {"Authorization": "bearer secret"})[0] == 400
        assert [served.ask(page)[0] for page in ("/healthz", "/health", "/metrics")] == [200] * 3
        assert served.ask("/v1/models")[0] == 401


def test_the_pipelines_client_shows_the_token_of_its_environment(monkeypatch):
    def ask(url):
        client = open_client(url)
        sampling = SamplingParams(n=1, max_new_tokens=1)
        message = Message(role="text", content="a")
        request = GenerateRequest(
            request_id="r",
            messages=(message,),
            sampling=sampling,
            seeds=(1,),
            min_version=0,
            timeout_secs=20.0,
        )
        try:
            return client.submit(request).result(20)
        finally:
            client.close()

    with Served(token="secret") as served:
        monkeypatch.setenv(WORKER, "secret")
        assert len(ask(served.url).samples) == 1
        monkeypatch.setenv(WORKER, "another")
        with pytest.raises(InferenceError, match="401"):
            ask(served.url)


def test_metrics_count_what_happened():
    with Served() as served:
        for _ in range(3):
            served.ask("/v1/completions", {**SHORT, "n": 2})
        served.ask("/v1/completions", {"prompt": "a", "n": 0})
        served.ask("/nowhere")
        assert metric(served, "sampled_tokens_total") == {"": 18}
        assert metric(served, "prompt_tokens_total") == {"": 3}
        assert metric(served, "policy_version") == {"": 7}
        assert metric(served, "weight_swaps_total") == {"": 1}
        assert metric(served, "busy_slots") == {"": 0}
        counted = metric(served, "http_requests_total")
        assert counted['{page="/v1/completions",status="200"}'] == 3
        assert counted['{page="/v1/completions",status="400"}'] == 1
        assert counted['{page="other",status="404"}'] == 1
        latency = metric(served, "http_request_seconds")
        assert latency['_count{page="/v1/completions"}'] == 4
        assert latency['_sum{page="/v1/completions"}'] > 0


def test_limits_are_positive():
    with pytest.raises(ValueError, match="connections = 0; must be positive"):
        HttpLimits(connections=0)
