"""A JetStream server over gRPC: ``jetstream+grpc://host:port?tokenizer=FOLDER``.

Its protocol is prompt ids and a length in, ids out: how it samples is the server's setting, and it
tells neither log-probs nor a version. So its rollouts are text alone, and a request for a sampling
other than the address declares (``temperature=``, 1 if not given) is refused. The stubs are those
of the google-jetstream package; they need no JAX.
"""

from __future__ import annotations

import importlib
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from infra.contracts.errors import ConfigError, InferenceError
from infra.contracts.records import FinishReason, GenerateReply, GenerateRequest, Sample
from infra.inference.capabilities import Capabilities, LogprobMeaning, VersionMeaning, unsupported
from infra.inference.worker import Busy, Call, Failed, Unreachable
from infra.text.tokenizer import Tokenizer, load_tokenizer

SCHEME = "jetstream+grpc"
_FORM = f"give {SCHEME}://host:port?tokenizer=FOLDER, and temperature=T if it is not 1"
EXACT = "exact"
"""Any history: without one a server puts its begin token before the ids."""


class JetStreamWorker:
    """See ``infra.inference.worker.Worker``. Every sample is a stream of its own.

    Raises:
        ConfigError: the address cannot be read, or google-jetstream is not installed.
    """

    capabilities = Capabilities(
        token_ids=True, logprobs=LogprobMeaning.NONE, versions=VersionMeaning.NONE
    )

    def __init__(self, url: str, *, trainable: bool = False, threads: int = 256) -> None:
        host, tokenizer, self._temperature = _parse(url)
        self.name = f"engine {host}"
        self._tokenizer: Tokenizer = load_tokenizer(tokenizer)
        self._trainable = trainable
        try:
            self._grpc: Any = importlib.import_module("grpc")
            self._pb2: Any = importlib.import_module("jetstream.core.proto.jetstream_pb2")
            stubs = importlib.import_module("jetstream.core.proto.jetstream_pb2_grpc")
        except ImportError as e:
            raise ConfigError(
                f"endpoint '{url}': {e}; pip install grpcio, and --no-deps google-jetstream==0.2.2"
            ) from e
        self._channel = self._grpc.insecure_channel(host)
        self._stub = stubs.OrchestratorStub(self._channel)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="jetstream")

    def attempt(self, request: GenerateRequest, call: Call) -> GenerateReply:
        self._check(request)
        try:
            prompt = self._tokenizer.encode_prompt(request.messages).tolist()
        except ValueError as e:
            raise InferenceError(f"{self.name}: {e}", retryable=False) from e
        decode = self._pb2.DecodeRequest(
            session_cache=EXACT,
            max_tokens=request.sampling.max_new_tokens,
            token_content=self._pb2.DecodeRequest.TokenContent(token_ids=prompt),
        )
        streams = [self._stub.Decode(decode, timeout=request.timeout_secs) for _ in request.seeds]

        def stop() -> None:
            for stream in streams:
                stream.cancel()

        try:
            call.on_cancel(stop)
            samples = [self._pool.submit(self._sample, stream, request) for stream in streams]
            done, _ = wait(samples, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        finally:
            call.off()
            stop()  # one that failed ends the others
        return GenerateReply(
            request_id=request.request_id,
            prompt_ids=None,
            samples=tuple(future.result() for future in samples),
            weights=(),
            engine="jetstream",
            dtype="",
            tokenizer_digest=self._tokenizer.digest,
        )

    def _check(self, request: GenerateRequest) -> None:
        sampling = request.sampling
        reason = ""
        if self._trainable:
            reason = "its rollouts cannot be trained on: it returns no log-probs"
        elif sampling.top_p < 1 or sampling.top_k > 0:
            reason = "it takes no top_p or top_k; they are settings of the server"
        elif sampling.reshapes or unsupported(self.capabilities, sampling):
            reason = "it takes no sampling options beyond length and stop strings"
        elif sampling.temperature != self._temperature:
            reason = (
                f"temperature {sampling.temperature:g} was asked, its address says that it samples "
                f"at {self._temperature:g}"
            )
        if reason:
            raise InferenceError(f"{self.name}: {reason}", retryable=False)

    def _sample(self, stream: Any, request: GenerateRequest) -> Sample:
        """Gather one answer, up to the token that completes a stop string."""
        ids: list[int] = []
        stops, text = request.sampling.stop, ""
        reason = FinishReason.STOP
        try:
            for answer in stream:
                for sample in answer.stream_content.samples[:1]:
                    ids += sample.token_ids
                text = self._tokenizer.decode(ids) if stops else ""
                if any(stop in text for stop in stops):
                    stream.cancel()
                    break
            else:
                if len(ids) >= request.sampling.max_new_tokens:
                    reason = FinishReason.LENGTH
        except self._grpc.RpcError as e:
            raise self._attempt_error(e) from e
        return Sample(
            response_ids=None,
            response_text=self._tokenizer.decode(ids),
            behaviour_logprobs=None,
            raw_logprobs=None,
            policy_versions=None,
            finish_reason=reason,
        )

    def _attempt_error(self, error: Any) -> Exception:
        codes = self._grpc.StatusCode
        text = f"{error.code().name}: {error.details()}"
        if error.code() is codes.RESOURCE_EXHAUSTED:
            return Busy(text)
        if error.code() in (codes.UNAVAILABLE, codes.CANCELLED, codes.DEADLINE_EXCEEDED):
            return Unreachable(text)
        return Failed(text)

    def probe(self, timeout_secs: float) -> None:
        try:
            health = self._stub.HealthCheck(self._pb2.HealthCheckRequest(), timeout=timeout_secs)
        except self._grpc.RpcError as e:
            raise Unreachable(f"{e.code().name}: {e.details()}") from e
        if not health.is_live:
            raise Unreachable("not live")

    def close(self) -> None:
        self._channel.close()
        self._pool.shutdown(wait=False)


def _parse(url: str) -> tuple[str, str, float]:
    """(host:port, tokenizer folder, temperature)."""
    parts = urlsplit(url)
    said = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = [key for key in said if key not in ("tokenizer", "temperature")]
    try:
        temperature = float(said.get("temperature", "1"))
        good = parts.scheme == SCHEME and parts.hostname and parts.port and temperature >= 0
    except ValueError:
        good = False
    if not good or unknown or not said.get("tokenizer"):
        raise ConfigError(f"endpoint '{url}': {_FORM}")
    return f"{parts.hostname}:{parts.port}", said["tokenizer"], temperature
