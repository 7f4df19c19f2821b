"""The client of JetStream servers against a made-up one. Skipped without the package's stubs."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from infra.contracts.errors import ConfigError, InferenceError
from infra.contracts.records import FinishReason, GenerateRequest, Message, SamplingParams
from infra.inference.jetstream_worker import JetStreamWorker
from infra.inference.open_client import open_client
from infra.inference.worker import Busy, Call, Failed, Unreachable
from infra.text.tokenizer import write_char_tokenizer

grpc = pytest.importorskip("grpc")
pb2 = pytest.importorskip("jetstream.core.proto.jetstream_pb2")
from jetstream.core.proto import jetstream_pb2_grpc as stubs  # noqa: E402


class CountingServer(stubs.OrchestratorServicer):
    """Answers a prompt with its last id plus 1, plus 2, ..., up to id 9."""

    def __init__(self):
        self.requests, self.code, self.held = [], None, threading.Event()
        self.arrived = threading.Semaphore(0)
        self.held.set()

    def Decode(self, request, context):
        self.requests.append(request)
        self.arrived.release()
        if self.code is not None:
            context.abort(self.code, "as told")
        last = request.token_content.token_ids[-1]
        for token in range(last + 1, min(last + 1 + request.max_tokens, 10)):
            sample = pb2.DecodeResponse.StreamContent.Sample(token_ids=[token])
            content = pb2.DecodeResponse.StreamContent(samples=[sample])
            yield pb2.DecodeResponse(stream_content=content)
        self.held.wait(20)

    def HealthCheck(self, request, context):
        return pb2.HealthCheckResponse(is_live=self.code is None)


@pytest.fixture
def served():
    servicer = CountingServer()
    server = grpc.server(ThreadPoolExecutor(8))
    stubs.add_OrchestratorServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, port
    servicer.held.set()
    server.stop(None).wait()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_char_tokenizer(folder, "abcdefghi.", eos=".")
    return folder


@pytest.fixture
def worker(served, tokenizer):
    worker = JetStreamWorker(f"jetstream+grpc://127.0.0.1:{served[1]}?tokenizer={tokenizer}")
    yield worker
    worker.close()


def request(text="abc", n=2, **sampling):
    return GenerateRequest(
        request_id="r",
        messages=(Message(role="text", content=text),),
        sampling=SamplingParams(n=n, **{"max_new_tokens": 4} | sampling),
        seeds=tuple(range(n)),
        min_version=0,
        timeout_secs=20.0,
    )


def test_samples_are_text_alone_and_prompts_are_exact(worker, served):
    reply = worker.attempt(request(), Call())
    assert [s.response_text for s in reply.samples] == ["defg", "defg"]
    assert {s.finish_reason for s in reply.samples} == {FinishReason.LENGTH}
    assert reply.prompt_ids is None and reply.weights == ()
    asked = served[0].requests[0]
    assert list(asked.token_content.token_ids) == [1, 2, 3]
    assert asked.session_cache  # else servers put a begin token before the ids
    (ended,) = worker.attempt(request("h", n=1), Call()).samples
    assert (ended.response_text, ended.finish_reason) == ("i", FinishReason.STOP)


def test_a_stop_string_ends_the_stream(worker, served):
    served[0].held.clear()  # it would never end by itself
    (sample,) = worker.attempt(request(n=1, stop=("ef",)), Call()).samples
    assert (sample.response_text, sample.finish_reason) == ("def", FinishReason.STOP)


def test_cancelling_ends_the_attempt(worker, served):
    served[0].held.clear()
    call = Call()
    with ThreadPoolExecutor(1) as pool:
        attempt = pool.submit(worker.attempt, request(), call)
        for _ in range(2):
            assert served[0].arrived.acquire(timeout=20)
        call.cancel()
        with pytest.raises(Unreachable, match="CANCELLED"):
            attempt.result(20)


def test_errors_say_whether_to_come_again(worker, served):
    worker.probe(20)
    for code, error in (
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Busy),
        (grpc.StatusCode.UNAVAILABLE, Unreachable),
        (grpc.StatusCode.INTERNAL, Failed),
    ):
        served[0].code = code
        with pytest.raises(error, match="as told"):
            worker.attempt(request(), Call())
    with pytest.raises(Unreachable, match="not live"):
        worker.probe(20)


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ({"top_p": 0.9}, "no top_p"),
        ({"top_k": 5}, "no top_p or top_k"),
        ({"temperature": 0.5}, "temperature 0.5 was asked, .* samples at 1"),
    ],
)
def test_another_sampling_than_the_servers_is_refused(worker, served, sampling, reason):
    with pytest.raises(InferenceError, match=reason):
        worker.attempt(request(**sampling), Call())
    assert not served[0].requests


def test_addresses(served, tokenizer):
    base = f"jetstream+grpc://127.0.0.1:{served[1]}"
    for url in (base, f"{base}?tokenizer={tokenizer}&model=x", "jetstream+grpc://h?tokenizer=t"):
        with pytest.raises(ConfigError, match="give jetstream"):
            JetStreamWorker(url)
    client = open_client(f"{base}?tokenizer={tokenizer}&temperature=0", trainable=True)
    with pytest.raises(InferenceError, match="cannot be trained on"):
        client.submit(request(temperature=0.0)).result(20)
    client.close()
