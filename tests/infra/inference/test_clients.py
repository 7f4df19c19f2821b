import dataclasses

import pytest

from infra.clock import ManualClock
from infra.contracts.errors import ConfigError, InferenceError
from infra.inference.fake_client import FakeInferenceClient
from infra.inference.http_client import HttpInferenceClient
from infra.inference.open_client import open_client
from tests.contracts.inference_client_contract import (
    InferenceClientContract,
    make_request,
    respond,
)
from tests.infra.inference.worker_server import WorkerServer


class TestFakeClient(InferenceClientContract):
    @pytest.fixture
    def client(self):
        return FakeInferenceClient(respond=respond)


class TestHttpClient(InferenceClientContract):
    @pytest.fixture
    def client(self, serve):
        return serve()[1]


@pytest.fixture
def serve():
    """Start a worker with a script, and a client of it whose backoff takes no time."""
    started = []

    def start(script=lambda n: None, **settings):
        worker = WorkerServer(FakeInferenceClient(respond=respond), script)
        client = HttpInferenceClient(worker.url, clock=ManualClock(), **settings)
        started.extend((client, worker))
        return worker, client

    yield start
    for part in started:
        part.close()


def busy(times):
    return lambda n: (503, b'{"error":"queue full","retryable":true}') if n < times else None


def test_busy_is_retried_until_it_answers(serve):
    worker, client = serve(busy(8))
    assert len(client.submit(make_request()).result().samples) == 3
    assert worker.calls == 9
    assert worker.connections == 1, "kept alive"
    assert worker.timeouts == sorted(worker.timeouts, reverse=True), "only what is left is asked"


def test_busy_ends_at_the_deadline(serve):
    _, client = serve(busy(10**9))
    with pytest.raises(InferenceError, match=r"gave up after .* of 20 s: status 503: queue full"):
        client.submit(make_request()).result()


@pytest.mark.parametrize("status", [400, 404, 413])
def test_the_callers_errors_are_not_retried(serve, status):
    worker, client = serve(lambda n: (status, b'{"error":"too long"}'))
    with pytest.raises(InferenceError, match=rf"refused \({status}\): too long") as error:
        client.submit(make_request()).result()
    assert not error.value.retryable
    assert worker.calls == 1


@pytest.mark.parametrize("answer", [(500, b"oops"), (200, b"not a record"), (200, b"{}")])
def test_unusable_answers_are_retried_a_few_times(serve, answer):
    worker, client = serve(lambda n: answer, retries=2)
    with pytest.raises(InferenceError, match="gave up"):
        client.submit(make_request()).result()
    assert worker.calls == 3


def test_a_connection_cut_before_the_answer_is_retried(serve):
    worker, client = serve(lambda n: (0, b"") if n in (0, 1) else None)
    assert len(client.submit(make_request()).result().samples) == 3
    assert worker.calls == 3


def test_a_worker_that_comes_back_on_its_port_is_found_again():
    class Reviving(ManualClock):
        """Brings the worker back when the client has waited five times."""

        waits = 0

        def wait(self, secs):
            super().wait(secs)
            self.waits += 1
            if self.waits == 5:
                workers.append(WorkerServer(FakeInferenceClient(respond=respond), port=port))

    clock = Reviving()
    workers = [WorkerServer(FakeInferenceClient(respond=respond))]
    port = workers[0].port
    client = HttpInferenceClient(workers[0].url, clock=clock)
    client.submit(make_request()).result()
    workers[0].close()
    assert len(client.submit(make_request(1)).result().samples) == 3
    assert len(workers) == 2
    client.close()
    workers[1].close()


def test_nobody_there_is_an_error_at_the_deadline():
    worker = WorkerServer(FakeInferenceClient())
    worker.close()
    client = HttpInferenceClient(worker.url, clock=ManualClock())
    with pytest.raises(InferenceError, match="Connection refused"):
        client.submit(make_request()).result()
    with pytest.raises(InferenceError, match=r"worker 127\.0\.0\.1"):
        client.health()
    client.close()


def test_a_request_whose_time_is_over_is_not_sent(serve):
    worker, client = serve()
    with pytest.raises(InferenceError, match="deadline passed"):
        client.submit(dataclasses.replace(make_request(), timeout_secs=0.0)).result()
    assert worker.calls == 0


def test_health(serve):
    _, client = serve()
    assert client.health()["status"] == "ok"


@pytest.mark.parametrize("url", ["", "localhost:80", "https://x:1", "http://x", "ftp://x:1"])
def test_bad_endpoints_are_refused(url):
    with pytest.raises(ConfigError, match="give http://host:port"):
        open_client(url)
