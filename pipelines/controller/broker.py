"""The embedded Pub/Sub broker: enough of ``google.pubsub.v1.Subscriber`` for ``ReadFromPubSub``.

Beam finds it through ``PUBSUB_EMULATOR_HOST``. A message is JSON: ``{"tasks": [GroupTask, ...]}``.
Subscriptions are ``projects/headrace-local/subscriptions/prompts-<k>``, one per pipeline process,
all served from one queue. A pull returns one message, so that idle processes share what there is,
and answers within 50 ms: the local runner's only thread waits in it, and no timer fires meanwhile.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
from google.protobuf.empty_pb2 import Empty
from google.pubsub_v1 import types

from infra.clock import Clock
from infra.contracts.errors import ConfigError
from infra.contracts.task_message import encode_tasks
from pipelines.controller.message_queue import MessageQueue

SUBSCRIPTION_PREFIX = "projects/headrace-local/subscriptions/prompts-"
PULL_SECS = 1.0
THREADS = 32
"""A pull occupies a thread for up to ``PULL_SECS``; more processes than this take turns."""

PullRequest = types.PullRequest.pb()
PullResponse = types.PullResponse.pb()
AcknowledgeRequest = types.AcknowledgeRequest.pb()
ReceivedMessage = types.ReceivedMessage.pb()
PubsubMessage = types.PubsubMessage.pb()


def subscription(process: int) -> str:
    """Name the subscription of pipeline process ``process`` (0, 1, ...)."""
    return f"{SUBSCRIPTION_PREFIX}{process}"


class Broker:
    """A gRPC server over a ``MessageQueue``; started on construction.

    Raises:
        ConfigError: the port is in use.
    """

    def __init__(self, queue: MessageQueue, clock: Clock, *, host: str, port: int) -> None:
        self._queue, self._clock = queue, clock
        self._server = grpc.server(
            ThreadPoolExecutor(THREADS, thread_name_prefix="broker"),
            handlers=(self._handlers(),),
            # Without this Linux lets two servers share a port and splits the pulls between them.
            options=(("grpc.so_reuseport", 0),),
        )
        try:
            self.port = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError:
            self.port = 0
        if self.port == 0:
            raise ConfigError(
                f"port {port} on {host} cannot be opened (in use?); give a free --port, or 0"
            )
        self._server.start()

    def close(self) -> None:
        """Stop at once; pulls in progress end with an error at their callers."""
        self._server.stop(grace=None).wait()

    def _handlers(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            "google.pubsub.v1.Subscriber",
            {
                "Pull": grpc.unary_unary_rpc_method_handler(
                    self._pull,
                    request_deserializer=PullRequest.FromString,
                    response_serializer=PullResponse.SerializeToString,
                ),
                "Acknowledge": grpc.unary_unary_rpc_method_handler(
                    self._acknowledge,
                    request_deserializer=AcknowledgeRequest.FromString,
                    response_serializer=Empty.SerializeToString,
                ),
            },
        )

    def _pull(self, request: PullRequest, context: grpc.ServicerContext) -> PullResponse:
        if not request.subscription.startswith(SUBSCRIPTION_PREFIX):
            context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"no subscription {request.subscription}; known: {SUBSCRIPTION_PREFIX}<process>",
            )
        message = self._queue.pull(request.subscription, self._clock.now(), PULL_SECS)
        if message is None:
            return PullResponse()
        body = PubsubMessage(data=encode_tasks(message.tasks), message_id=str(message.number))
        body.publish_time.FromMicroseconds(int(self._clock.now() * 1e6))
        received = ReceivedMessage(ack_id=str(message.number), message=body)
        return PullResponse(received_messages=[received])

    def _acknowledge(self, request: AcknowledgeRequest, context: grpc.ServicerContext) -> Empty:
        """Nothing to do: a pulled message is gone, the lease brings it back if need be."""
        del request, context
        return Empty()
