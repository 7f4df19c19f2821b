"""The real process on the real broker: messages in, shards out, SIGTERM ends it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from infra.clock import SystemClock
from infra.contracts.errors import ConfigError
from infra.contracts.records import SamplingParams
from infra.heartbeats import read_heartbeats
from infra.hints import HintListener
from infra.inference.fake_client import FakeInferenceClient
from infra.ledger.group_index import GroupIndex, GroupState
from infra.metrics import MetricsReader
from pipelines.controller.broker import Broker
from pipelines.controller.message_queue import MessageQueue
from pipelines.stream_rollouts import main
from tests.builders import make_task
from tests.infra.inference.worker_server import WorkerServer
from tests.pipelines.run_folder import make_run

ROOT = Path(__file__).parents[2]
SAMPLING = SamplingParams(n=2, max_new_tokens=4, stop=("\n",))


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A run, a worker, a broker with its queue, and a folder for hints."""
    monkeypatch.setenv("HEADRACE_HINTS", str(tmp_path / "h"))
    store = make_run(tmp_path / "run")
    worker = WorkerServer(FakeInferenceClient(("1\n", "2\n")))
    queue = MessageQueue()
    broker = Broker(queue, SystemClock(), host="127.0.0.1", port=0)
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", f"127.0.0.1:{broker.port}")
    yield store, worker, queue
    broker.close()
    worker.close()


def start(store, worker):
    words = ["-m", "infra.commands", "rollouts", str(store.url), "--endpoint", worker.url]
    return subprocess.Popen(
        [sys.executable, *words, "--process", "3"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )


def test_messages_become_shards_and_sigterm_ends_it(world):
    store, worker, queue = world
    now = SystemClock().now()
    tasks = [make_task(i, sampling=SAMPLING, expires_at=now + 60) for i in range(6)]
    process = start(store, worker)
    with HintListener("trainer") as trainer, HintListener("controller") as controller:
        queue.publish(tuple(tasks[:3]))
        queue.publish(tuple(tasks[3:]))
        index = GroupIndex(store)
        while sum(index.counts.values()) < len(tasks):
            assert trainer.wait(40.0), process.stderr.read() if process.poll() else "no hint"
            index.refresh()
        assert controller.wait(5.0)
    assert index.counts == {GroupState.WAITING: 2, GroupState.REJECTED: 4}
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert errors == "", "Beam's noise is kept away"
    assert read_heartbeats(store)["rollouts-3"]["state"] == "stopped"
    rows = MetricsReader(store, "rollouts-3").poll()
    assert sum(row.get("pipeline/parse/tasks", {"sum": 0})["sum"] for row in rows) == 6


def test_sigterm_while_generating_leaves_the_group_in_flight(world):
    store, worker, queue = world
    worker.script = lambda n: (503, b'{"error":"starting","retryable":true}')
    queue.publish((make_task(0, sampling=SAMPLING, expires_at=SystemClock().now() + 60),))
    process = start(store, worker)
    while worker.calls == 0:
        try:
            process.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
        raise AssertionError(process.stderr.read())
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    index = GroupIndex(store)
    index.refresh()
    assert not index.counts


def test_without_a_broker_it_says_so(tmp_path, monkeypatch):
    monkeypatch.delenv("PUBSUB_EMULATOR_HOST", raising=False)
    make_run(tmp_path)
    with pytest.raises(ConfigError, match="PUBSUB_EMULATOR_HOST is not set"):
        main([str(tmp_path), "--endpoint", "http://127.0.0.1:9"])


def test_an_endpoint_that_cannot_feed_a_trainer_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", "127.0.0.1:9")
    make_run(tmp_path)
    words = [
        "--endpoint",
        "http://127.0.0.1:9",
        "--endpoint",
        "openai+http://127.0.0.1:9/v1?model=m",
    ]
    with pytest.raises(ConfigError, match="cannot be trained on: nobody says which policy version"):
        main([str(tmp_path), *words])


def test_a_missing_endpoint_or_run(tmp_path, monkeypatch):
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", "127.0.0.1:9")
    with pytest.raises(ConfigError, match="there is no run"):
        main([str(tmp_path / "nowhere")])
    make_run(tmp_path)
    with pytest.raises(ConfigError, match="--endpoint is missing"):
        main([str(tmp_path)])
