"""The broker as Beam and as a bare Pub/Sub client see it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import apache_beam as beam
import grpc
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.runner import PipelineState
from google.pubsub_v1 import SubscriberClient
from google.pubsub_v1.services.subscriber.transports import SubscriberGrpcTransport

from infra.clock import ManualClock
from infra.contracts.errors import ConfigError
from infra.contracts.task_message import decode_tasks
from pipelines.controller.broker import Broker, subscription
from pipelines.controller.message_queue import MessageQueue
from tests.builders import make_task


@pytest.fixture
def queue() -> MessageQueue:
    return MessageQueue()


@pytest.fixture
def broker(queue: MessageQueue) -> Iterator[Broker]:
    broker = Broker(queue, ManualClock(start=100.0), host="127.0.0.1", port=0)
    yield broker
    broker.close()


def client_of(broker: Broker) -> SubscriberClient:
    channel = grpc.insecure_channel(f"127.0.0.1:{broker.port}")
    return SubscriberClient(transport=SubscriberGrpcTransport(channel=channel))


def pull(client: SubscriberClient, process: int) -> list[tuple]:
    answer = client.pull(subscription=subscription(process), max_messages=10, timeout=30.0)
    if answer.received_messages:
        ack_ids = [received.ack_id for received in answer.received_messages]
        client.acknowledge(subscription=subscription(process), ack_ids=ack_ids)
    return [decode_tasks(received.message.data) for received in answer.received_messages]


def test_one_message_a_pull_shared_by_all_subscriptions(
    queue: MessageQueue, broker: Broker
) -> None:
    messages = [(make_task(0), make_task(1)), (make_task(2),), (make_task(3),)]
    for tasks in messages:
        queue.publish(tasks)
    client = client_of(broker)
    assert pull(client, 0) == [messages[0]]
    assert pull(client, 7) == [messages[1]]
    assert pull(client, 0) == [messages[2]]
    assert pull(client, 0) == []
    assert queue.taken_by(subscription(7)) == {make_task(2).group_id}


def test_expired_and_unknown(queue: MessageQueue, broker: Broker) -> None:
    queue.publish((make_task(0, expires_at=100.0),))
    client = client_of(broker)
    assert pull(client, 0) == []
    with pytest.raises(Exception, match="no subscription projects/other/subscriptions/x; known"):
        client.pull(subscription="projects/other/subscriptions/x", max_messages=1)


def test_a_port_in_use_is_refused(broker: Broker) -> None:
    with pytest.raises(ConfigError, match=f"port {broker.port} on 127.0.0.1 cannot be opened"):
        Broker(MessageQueue(), ManualClock(), host="127.0.0.1", port=broker.port)


class _Collect(beam.DoFn):
    """The local runner runs in this process, so a list of the module is reachable."""

    def process(self, message: bytes) -> None:
        RECEIVED.append(decode_tasks(message))
        if len(RECEIVED) == 3:
            COMPLETE.set()


RECEIVED: list[tuple] = []
COMPLETE = threading.Event()


def test_beam_reads_from_it(
    queue: MessageQueue, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", f"127.0.0.1:{broker.port}")
    messages = [(make_task(0), make_task(1)), (make_task(2),), (make_task(3),)]
    queue.publish(messages[0])
    options = PipelineOptions(["--streaming", "--runner=BundleBasedDirectRunner"])
    pipeline = beam.Pipeline(options=options)
    source = beam.io.ReadFromPubSub(subscription=subscription(0))
    _ = pipeline | "Read" >> source | "Collect" >> beam.ParDo(_Collect())
    result = pipeline.run()
    queue.publish(messages[1])  # while it runs
    queue.publish(messages[2])
    assert COMPLETE.wait(60.0)
    result.cancel()
    assert result.state in (PipelineState.CANCELLED, PipelineState.DONE)
    assert sorted(RECEIVED, key=lambda tasks: tasks[0].admission_index) == messages
    assert len(queue.taken_by(subscription(0))) == 4
