"""The client of an endpoint, one per process: bundles come and go, connections stay."""

from __future__ import annotations

import os

from infra.bearer_token import WORKER, read_token
from infra.contracts.errors import ConfigError
from infra.contracts.records import SamplingParams
from infra.inference.capabilities import unsupported, untrainable
from infra.inference.client import InferenceClient
from infra.inference.fake_client import FakeInferenceClient
from infra.inference.hedging import HedgeConfig
from infra.inference.jetstream_worker import SCHEME, JetStreamWorker
from infra.inference.native_worker import NativeWorker
from infra.inference.openai_address import parse_address
from infra.inference.openai_worker import OpenAiWorker
from infra.inference.pooled_client import PooledClient
from infra.inference.worker import Worker
from infra.text.tokenizer import load_tokenizer

KEY = "HEADRACE_API_KEY"
"""Environment variable with the bearer token of OpenAI-compatible engines."""
SAMPLES_PER_REQUEST = 8
"""An OpenAI-compatible engine gets one request per sample; about so many per thread."""


def open_client(
    endpoint: str,
    *,
    threads: int = 32,
    retries: int = 4,
    trainable: bool = False,
    hedge: HedgeConfig | None = None,
    segment_tokens: int = 0,
) -> InferenceClient:
    """Return a client for one or several addresses, separated by commas.

    An address is ``http://host:port`` (our worker) or ``openai+http://host:port/v1?model=NAME``
    (``openai_address``); ``fake:``, alone, makes rollouts up.

    JetStream servers are ``jetstream_worker``'s.

    Args:
        endpoint: The addresses.
        threads: Requests under way at a time, per worker.
        retries: Attempts after the first for unusable answers.
        trainable: Refuse replies that could not be trained on.
        hedge: Send slow requests to a second worker too.
        segment_tokens: Ask for segments of so many tokens, where all can; 0: whole responses.

    Our workers are shown ``HEADRACE_WORKER_TOKEN``.

    Raises:
        ConfigError: something else, or a tokenizer or token that cannot be read.
    """
    if endpoint == "fake:":
        return FakeInferenceClient()
    urls = [url.strip() for url in endpoint.split(",")]
    twice = [url for i, url in enumerate(urls) if url in urls[:i]]
    if twice:
        raise ConfigError(f"endpoint '{twice[0]}' is given twice")
    workers = [_worker(url, threads, trainable) for url in urls]
    return PooledClient(
        workers,
        threads=threads * len(workers),
        retries=retries,
        hedge=hedge,
        segment_tokens=segment_tokens,
    )


def require_trainable(client: InferenceClient, sampling: SamplingParams) -> None:
    """Refuse, before anything is sampled, an endpoint whose rollouts a trainer could not use.

    Raises:
        ConfigError: one line that says why.
    """
    lacks = unsupported(client.capabilities, sampling)
    if lacks:
        raise ConfigError(f"--endpoint: it cannot sample so: {lacks}")
    reason = untrainable(client.capabilities, sampling)
    if reason:
        raise ConfigError(f"--endpoint: its rollouts cannot be trained on: {reason}")


def _worker(url: str, threads: int, trainable: bool) -> Worker:
    if url.startswith("http://"):
        return NativeWorker(url, token=read_token(WORKER))
    if url.startswith(SCHEME + "://"):
        return JetStreamWorker(url, trainable=trainable, threads=threads * SAMPLES_PER_REQUEST)
    if not url.startswith("openai+"):
        raise ConfigError(
            f"endpoint '{url}': give http://host:port, openai+http://host:port/v1?model=NAME, or "
            "fake: for made-up rollouts"
        )
    address = parse_address(url)
    return OpenAiWorker(
        address,
        tokenizer=load_tokenizer(address.tokenizer) if address.tokenizer else None,
        trainable=trainable,
        key=os.environ.get(KEY, ""),
        threads=threads * SAMPLES_PER_REQUEST,
    )
