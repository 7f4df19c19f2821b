"""Pause, resume, abort and drain over HTTP and from the command line; slow and early callers."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from infra.contracts.errors import ConfigError, InferenceError
from infra.contracts.json_codec import from_json, to_json
from infra.contracts.records import (
    FinishReason,
    GenerateReply,
    GenerateRequest,
    Message,
    SamplingParams,
)
from infra.inference.worker_command import main
from tests.trainer.inference_worker.served_worker import Served
from tests.trainer.inference_worker.test_server_limits import (
    ENDLESS,
    MILLION,
    SHORT,
    begin,
    first_event,
    metric,
)
from trainer.inference_worker.http.http_limits import HttpLimits


def worker(served, *words, capsys):
    assert main([served.url, *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def endless(name="r", segment_tokens=0):
    return to_json(
        GenerateRequest(
            request_id=name,
            messages=(Message(role="text", content="a"),),
            sampling=SamplingParams(n=1, max_new_tokens=2**31 - 1),
            seeds=(1,),
            min_version=0,
            timeout_secs=60.0,
            segment_tokens=segment_tokens,
        )
    )


def test_a_paused_worker_says_so_and_goes_on_after_it(capsys):
    with Served() as served:
        health = worker(served, "pause", "--mode", "in_place", capsys=capsys)
        assert (health["status"], health["paused"]) == ("paused", "in_place")
        status, headers, body = served.ask("/v1/completions", SHORT)
        assert (status, headers["Retry-After"]) == (503, "1")
        assert "paused (in_place)" in body["error"]["message"]
        assert served.ask("/health")[0] == 503 and served.ask("/healthz")[0] == 200
        assert metric(served, "paused") == {"": 1}
        served.scheduler.offer_weights(8, "eight", {})
        while served.scheduler.version != 8:
            pass
        assert worker(served, "resume", capsys=capsys)["digest"] == "eight"
        assert served.ask("/v1/completions", SHORT)[0] == 200
        assert served.ask("/health")[0] == 200


@pytest.mark.parametrize("words", [("abort", "--request", "r"), ("pause", "--mode", "abort")])
def test_who_takes_segments_has_what_there_is_and_others_a_503(words, capsys):
    with Served(max_len=MILLION) as served, ThreadPoolExecutor() as pool:
        asked = pool.submit(served.ask, "/v1/generate", endless(segment_tokens=MILLION))
        other = pool.submit(served.ask, "/v1/generate", endless("r/2"))
        while served.totals.tokens < 100:
            pass
        health = worker(served, *words, capsys=capsys)
        assert health.get("aborted", 2) == 2
        status, _, body = asked.result(20)
        sample = from_json(GenerateReply, json.dumps(body)).samples[0]
        assert (status, sample.finish_reason) == (200, FinishReason.SEGMENT)
        assert len(sample.response_ids) == len(sample.behaviour_logprobs) > 0
        assert other.result(20)[0] == 503
        assert metric(served, "segments_total") == metric(served, "groups_aborted_total") == {"": 1}


def test_draining_lets_what_runs_finish_and_cuts_segments(capsys):
    with Served(max_len=MILLION) as served, ThreadPoolExecutor() as pool:
        asked = pool.submit(served.ask, "/v1/generate", endless(segment_tokens=MILLION))
        stream = begin(served, {**ENDLESS, "stream": True})
        first_event(stream)
        while served.scheduler.load() != (2, 0):
            pass
        assert worker(served, "drain", capsys=capsys)["status"] == "draining"
        assert asked.result(20)[0] == 200
        assert served.scheduler.load() == (1, 0)  # the stream goes on
        assert worker(served, "status", capsys=capsys)["status"] == "draining"
        assert worker(served, "abort", "--all", capsys=capsys)["aborted"] == 1
        assert served.server.wait_idle(20)
        stream.close()


def test_the_pages_want_the_token_and_sound_bodies(tmp_path, capsys):
    with Served(token="secret") as served:
        mine = {"Authorization": "Bearer secret"}
        for page in ("/v1/pause", "/v1/resume", "/v1/abort", "/v1/drain"):
            assert served.ask(page, b"{}")[0] == 401
            for body in (b"[]", b"{", b'{"what": 1}', b"[" * 9999, b"\xff"):
                status, _, answer = served.ask(page, body, mine)
                assert status == 400 and answer["error"]
        for body in ({"mode": "later"}, {"mode": 1}, {"mode": None}):
            assert "one of finish" in served.ask("/v1/pause", body, mine)[2]["error"]
        for body in ({}, {"request_id": 5}, {"all": 1}, {"request_id": "a", "all": True}):
            assert "give either" in served.ask("/v1/abort", body, mine)[2]["error"]
        assert served.ask("/health")[0] == 200
        with pytest.raises(InferenceError, match="401"):
            main([served.url, "pause"])
        file = tmp_path / "token"
        file.write_text("secret\n")
        assert main([served.url, "pause", "--token-file", str(file)]) == 0
        assert "paused     finish" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["ftp://a:1"], ["http://a"], ["a:1", "abort"], ["a:1", "resume", "--mode", "abort"]]
)
def test_wrong_commands_are_one_line(words):
    with pytest.raises(ConfigError):
        main(words)


def test_nobody_there_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(InferenceError, match=f"worker 127.0.0.1:{port}: .*refused"):
        main([f"127.0.0.1:{port}"])


def test_a_connection_that_comes_back_too_soon_is_held():
    class Waits:
        """A clock that stands still and notes what is waited for."""

        def __init__(self):
            self.waited = []

        def now(self):
            return 100.0

        def wait(self, secs):
            self.waited.append(secs)

    clock = Waits()
    with Served(clock=clock, limits=HttpLimits(retry_secs=3.0)) as served:
        served.scheduler.pause("finish")
        connection = served.connect()
        for _ in range(3):
            connection.request("POST", "/v1/completions", json.dumps(SHORT))
            answer = connection.getresponse()
            assert (answer.status, answer.headers["Retry-After"]) == (503, "3")
            answer.read()
        connection.close()
    assert [secs > 0 for secs in clock.waited] == [False, True, True]
    assert max(clock.waited) == 3.0


def test_callers_that_send_nothing_more_hold_their_own_threads_only():
    """Heads, bodies and answers that never end: others are served, and idle ones are let go."""
    with Served(limits=HttpLimits(idle_secs=0.3)) as served:
        head = b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n"
        peers = []
        for sent in (b"", b"POST /v1", head[:-2], head, head + b'{"prompt"', b"\r\n" * 5):
            peers.append(socket.create_connection(served.address, timeout=20))
            peers[-1].sendall(sent)
        assert served.ask("/v1/completions", SHORT)[0] == 200
        for peer in peers:
            while peer.recv(4096):
                pass  # closed by the server
            peer.close()
        assert served.ask("/v1/completions", SHORT)[0] == 200
