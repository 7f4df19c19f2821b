"""The worker over real HTTP, on the counting engine: answers, refusals, hostile input."""

import http.client
import json
import socket
import threading

import numpy as np
import pytest

from infra.contracts.errors import ConfigError, InferenceError
from infra.contracts.json_codec import from_json, to_json
from infra.contracts.records import GenerateReply, GenerateRequest, Message, SamplingParams
from infra.inference.http_client import HttpInferenceClient
from tests.trainer.inference_worker.served_worker import Served
from trainer.inference_worker.http.http_limits import HttpLimits
from trainer.inference_worker.server import WorkerServer

MAX_BODY_BYTES = HttpLimits().body_bytes


class Bytes:
    """Characters are their codes; NUL ends a response."""

    eos_ids = (0,)
    digest = "bytes"
    vocab_size = 128

    def encode_prompt(self, messages):
        return np.array([ord(c) for c in messages[0].content], np.int32)

    def decode(self, ids):
        return "".join(map(chr, ids))


@pytest.fixture(scope="module")
def served():
    with Served(tokenizer=Bytes(), max_len=32) as served:
        yield served


@pytest.fixture
def server(served):
    return served.server


@pytest.fixture
def connection(server):
    connection = http.client.HTTPConnection(*server.server_address, timeout=20)
    yield connection
    connection.close()


def request(name="r", **changes):
    values = {
        "request_id": name,
        "messages": (Message(role="text", content="ab"),),
        "sampling": SamplingParams(n=2, max_new_tokens=3),
        "seeds": (0, 5),
        "min_version": 0,
        "timeout_secs": 10.0,
    }
    return GenerateRequest(**(values | changes))


def post(connection, body, path="/v1/generate", headers=None):
    connection.request("POST", path, body, headers or {})
    response = connection.getresponse()
    return response.status, response.read()


def test_round_trips_on_one_kept_connection(connection):
    for i in range(20):
        status, body = post(connection, to_json(request(f"r{i}")))
        assert status == 200
        reply = from_json(GenerateReply, body)
        assert [s.response_text for s in reply.samples] == ["bcd", "ghi"]
        assert reply.weights == ((7, "seven"),)


def test_health(connection):
    connection.request("GET", "/healthz")
    response = connection.getresponse()
    assert (response.status, json.loads(response.read())["version"]) == (200, 7)


def test_many_at_once(server):
    replies = {}

    def ask(i):
        connection = http.client.HTTPConnection(*server.server_address, timeout=20)
        replies[i] = post(connection, to_json(request(f"many-{i}", seeds=(i, i + 1))))
        connection.close()

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, (status, body) in replies.items():
        assert status == 200
        assert from_json(GenerateReply, body).samples[0].response_ids[0] == (ord("b") + i) % 128


@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({"seeds": (1,)}, 400, "1 seeds for n = 2"),
        ({"seeds": (1, -1)}, 400, "seeds must be in"),
        ({"seeds": (1, 2**40)}, 400, "seeds must be in"),
        ({"segment_tokens": -1}, 400, "segment_tokens must be in"),
        ({"so_far": ((1,),)}, 400, "so_far of 1 samples for n = 2"),
        ({"so_far": ((1,), (128,))}, 400, "so_far has an id outside [0, 128)"),
        ({"so_far": ((1,), (2, 3, 4))}, 422, "so_far has 3 tokens after a prompt of 2"),
        ({"request_id": ""}, 400, "request_id must have"),
        ({"timeout_secs": 0.0}, 400, "timeout_secs must be in"),
        ({"timeout_secs": 1e9}, 400, "timeout_secs must be in"),
        ({"sampling": SamplingParams(n=2, stop=("x" * 300,))}, 400, "stop string is longer"),
        ({"sampling": SamplingParams(n=2, temperature=1e-42)}, 400, "temperature = 1e-42"),
        ({"messages": (Message(role="text", content="a" * 32),)}, 422, "32 tokens; 1 to 31 fit"),
        ({"messages": (Message(role="text", content=""),)}, 422, "0 tokens"),
    ],
)
def test_wrong_requests_are_refused_and_not_retryable(connection, changes, status, message):
    got, body = post(connection, to_json(request(**changes)))
    error = json.loads(body)
    assert (got, error["retryable"]) == (status, False)
    assert message in error["error"]
    assert post(connection, to_json(request("after")))[0] == 200  # the connection lives on


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"{" * 100_000,
        b"[" * 100_000,
        to_json(request()).replace(b'"n":2', b'"n":"2"'),
        to_json(request()).replace(b'"n":2', b'"n":0'),
        to_json(request()).replace(b'"r"', b'"\\ud800"'),
        to_json(request()).replace(b'"n":2', b'"n":1e999'),
        to_json(request()).replace(b'"temperature":1.0', b'"temperature":NaN'),
        to_json(request()).replace(b'"seeds"', b'"extra":1,"seeds"'),
    ],
)
def test_bodies_that_are_no_request(connection, body):
    status, answer = post(connection, body)
    assert (status, json.loads(answer)["retryable"]) == (400, False)


def test_late_answers_are_retryable(connection):
    status, body = post(connection, to_json(request("late", min_version=99, timeout_secs=0.05)))
    error = json.loads(body)
    assert (status, error["retryable"]) == (503, True)
    assert "needs version 99, the worker has 7" in error["error"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/", 404), ("POST", "/other", 404), ("DELETE", "/generate", 501)],
)
def test_other_pages(connection, method, path, status):
    connection.request(method, path, b"" if method == "POST" else None)
    assert connection.getresponse().status == status


def raw(server, data):
    """Send bytes, close our side, and return the status line."""
    with socket.create_connection(server.server_address, timeout=20) as peer:
        peer.sendall(data)
        peer.shutdown(socket.SHUT_WR)
        return peer.makefile("rb").readline()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"POST /generate HTTP/1.1\r\nHost: x\r\n\r\n", b"411"),
        (b"POST /generate HTTP/1.1\r\nContent-Length: -5\r\n\r\n", b"411"),
        (b"POST /generate HTTP/1.1\r\nContent-Length: ten\r\n\r\n", b"411"),
        (b"POST /generate HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", b"413"),
        (
            b"POST /x HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
            b"404",
        ),
        (b"POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"411"),
        (b"POST /generate HTTP/1.1\r\nContent-Length: 10\r\n\r\nabc", b"400"),
        (b"POST /generate HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (MAX_BODY_BYTES + 1), b"413"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400"),
    ],
)
def test_broken_http(server, data, status):
    assert raw(server, data).split()[1] == status


def test_a_taken_port_is_one_line(server):
    port = server.server_address[1]
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}.*another --port"):
        WorkerServer("127.0.0.1", port, None)


def test_the_projects_own_client(server):
    client = HttpInferenceClient("http://{}:{}".format(*server.server_address))
    futures = [client.submit(request(f"client-{i}", seeds=(i, i))) for i in range(8)]
    for i, future in enumerate(futures):
        assert future.result(20).samples[0].response_ids[0] == (ord("b") + i) % 128
    with pytest.raises(InferenceError, match="1 seeds for n = 2") as caught:
        client.submit(request(seeds=(1,))).result(20)
    assert not caught.value.retryable
    client.close()
