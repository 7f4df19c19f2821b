"""Three real workers of which some die, hang or lie; and the choice among scripted ones."""

import dataclasses
import random
import threading
from concurrent.futures import wait

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.clock import ManualClock
from infra.contracts.errors import ConfigError, InferenceError
from infra.contracts.json_codec import to_json
from infra.inference.fake_client import FakeInferenceClient
from infra.inference.hedging import ENOUGH, HedgeBudget, HedgeConfig
from infra.inference.native_worker import NativeWorker
from infra.inference.open_client import open_client
from infra.inference.pooled_client import PooledClient
from infra.inference.worker_roster import EJECT_AFTER
from tests.contracts.inference_client_contract import (
    InferenceClientContract,
    make_request,
    respond,
)
from tests.infra.inference.scripted_worker import ScriptedWorker
from tests.infra.inference.worker_server import WorkerServer


@pytest.fixture
def serve():
    """Start workers, one per script, and a client of all whose backoff takes no time."""
    started = []

    def start(*scripts, patience_secs=10.0, **settings):
        workers = [WorkerServer(FakeInferenceClient(respond=respond), s or never) for s in scripts]
        links = [NativeWorker(w.url, patience_secs=patience_secs) for w in workers]
        client = PooledClient(links, clock=ManualClock(), **settings)
        started.extend((client, *workers))
        return workers, client

    yield start
    for part in started:
        part.close()


def never(n):
    return None


def old_reply(n):
    """Another request's samples: a worker that lies."""
    reply = FakeInferenceClient().answer(make_request(7, n=1))
    return 200, to_json(dataclasses.replace(reply, request_id=make_request().request_id))


class TestPoolOfThree(InferenceClientContract):
    @pytest.fixture
    def client(self, serve):
        return serve(None, None, None)[1]


class TestPoolWithADeadOneAndALiar(InferenceClientContract):
    @pytest.fixture
    def client(self, serve):
        workers, client = serve(None, None, old_reply)
        workers[0].close()
        return client


class TestPoolWithOneThatHangs(InferenceClientContract):
    @pytest.fixture
    def client(self, serve):
        def hang(n):
            workers[0].closing.wait()

        workers, client = serve(hang, None, patience_secs=0.02)
        workers[0].sick.set()
        return client


def test_a_worker_that_dies_leaves_its_requests_to_others(serve):
    entered, gate = threading.Event(), threading.Event()

    def slow(n):
        entered.set()
        gate.wait()

    def second(n):
        """Busy until the other has its request, so that each gets one."""
        entered.wait()

    workers, client = serve(slow, second)
    requests = [make_request(i) for i in range(2)]
    futures = [client.submit(r) for r in requests]
    entered.wait()
    for connection in list(workers[0].open):
        connection.shutdown(2)
    assert [f.result().request_id for f in futures] == [r.request_id for r in requests]
    gate.set()


def test_one_that_is_slow_and_says_that_it_is_well_is_waited_for(serve):
    def slow(n):
        for _ in range(3):
            workers[0].probes.acquire()

    workers, client = serve(slow, slow, patience_secs=0.01)
    workers[1].close()
    assert client.submit(make_request()).result()
    assert workers[0].calls == 1


def test_closing_ends_what_is_under_way(serve):
    entered = threading.Event()

    def hang(n):
        entered.set()
        workers[0].closing.wait()

    workers, client = serve(hang)
    future = client.submit(make_request())
    entered.wait()
    client.close()
    with pytest.raises(InferenceError, match="the client was closed"):
        future.result()


def test_retry_after_is_honoured_and_others_are_asked(serve):
    busy = (429, b'{"error":"full"}', {"Retry-After": "7"})
    workers, client = serve(lambda n: busy, None)
    for i in range(6):
        client.submit(make_request(i)).result()
    assert workers[0].calls <= 1, "left alone for 7 s"
    counters = client.counters()
    assert counters["pipeline/worker_0/busy"] == workers[0].calls
    assert counters["pipeline/worker_0/failures"] == 0


def test_retry_after_of_the_only_worker_is_waited_for(serve):
    busy = (503, b'{"error":"full"}', {"Retry-After": "7"})
    (worker,), client = serve(lambda n: busy if n == 0 else None)
    clock = client._clock
    before = clock.now()
    client.submit(make_request()).result()
    assert (worker.calls, clock.now() - before) == (2, 7.0)


def test_a_refusal_counts_when_two_agree(serve):
    refuse = lambda n: (404, b'{"error":"no such page"}')  # noqa: E731
    workers, client = serve(refuse, None, None)
    for i in range(9):
        assert client.submit(make_request(i)).result()
    workers, client = serve(refuse, refuse, refuse)
    with pytest.raises(InferenceError, match=r"refused \(404\)") as error:
        client.submit(make_request()).result()
    assert not error.value.retryable
    assert sum(w.calls for w in workers) == 2


def test_the_slower_copy_is_discarded_and_its_connection_cut(serve):
    slow, first, asked = threading.Event(), threading.Lock(), []

    def first_waits(n):
        """Whichever worker is asked first hangs; the other answers."""
        if first.acquire(blocking=False):
            slow.wait()

    def wait_at_once(futures, secs):
        """Time is decided here: the delay of a hedge is over at once."""
        asked.append(secs)
        if secs is not None:
            return set()
        return wait(futures, return_when="FIRST_COMPLETED").done

    workers, client = serve(
        None, None, hedge=HedgeConfig(quantile=0.5, share=1.0), wait=wait_at_once
    )
    for i in range(ENOUGH):
        client.submit(make_request(i)).result()
    assert asked == [], "too little is known for a hedge"
    for worker in workers:
        worker.script = first_waits
    reply = client.submit(make_request(99)).result()
    assert reply.request_id == make_request(99).request_id
    assert sum(v for k, v in client.counters().items() if k.endswith("hedges")) == 1
    slow.set()
    client._racers.shutdown(wait=True)
    counters = client.counters()
    assert not any(counters[f"pipeline/worker_{i}/in_flight_samples"] for i in (0, 1))
    assert not any(counters[f"pipeline/worker_{i}/failures"] for i in (0, 1))


def test_a_hedge_needs_knowledge_and_stays_within_its_share():
    budget = HedgeBudget(HedgeConfig(quantile=0.9, share=0.1))
    assert budget.delay() is None
    for secs in range(100):
        budget.answered(float(secs))
    assert budget.delay() == 90.0
    assert not budget.spend(), "two requests so far"
    for _ in range(18):
        budget.delay()
    assert [budget.spend() for _ in range(3)] == [True, True, False]


BAD = st.lists(
    st.sampled_from(["dead", "busy", "failed", "refused", "hang", "lie", "ok"]),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(
    bad=st.lists(BAD, max_size=4),
    place=st.integers(0, 4),
    requests=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_with_one_healthy_worker_every_request_is_answered_once(bad, place, requests, seed):
    # One misconfigured worker is outvoted, two are not.
    refusing = [i for i, words in enumerate(bad) if "refused" in words]
    for i in refusing[1:]:
        bad[i] = ["dead" if word == "refused" else word for word in bad[i]]
    clock = ManualClock()
    workers = [ScriptedWorker(f"bad {i}", words, clock) for i, words in enumerate(bad)]
    workers.insert(min(place, len(workers)), ScriptedWorker("good", ["ok"], clock))
    client = PooledClient(workers, clock=clock, jitter=random.Random(seed), threads=1)
    asked = [dataclasses.replace(make_request(i), timeout_secs=1e4) for i in range(requests)]
    futures = []
    for request in asked:
        begun = clock.now()
        futures.append(client.submit(request))
        reply = futures[-1].result()
        assert reply.request_id == request.request_id
        assert len(reply.samples) == request.sampling.n
        assert clock.now() < begun + request.timeout_secs
    counters = client.counters()
    assert not any(counters[f"pipeline/worker_{i}/in_flight_samples"] for i in range(len(workers)))
    client.close()


def test_a_dead_worker_is_left_out_and_probed_ever_more_rarely():
    clock = ManualClock()
    dead, good = ScriptedWorker("dead", ["dead"], clock), ScriptedWorker("good", ["ok"], clock)
    client = PooledClient([dead, good], clock=clock, jitter=random.Random(0), threads=1)
    for i in range(50):
        client.submit(make_request(i)).result()
    assert dead.calls == EJECT_AFTER
    assert client.counters()["pipeline/worker_0/ejected"] == 1.0
    for i in range(50):
        clock.advance(10.0)
        client.submit(make_request(i)).result()
    assert dead.calls == EJECT_AFTER, "probes are not requests"
    dead.words = ["ok"]
    clock.advance(100.0)
    for i in range(20):
        client.submit(make_request(i)).result()
    assert dead.calls > EJECT_AFTER + 1
    assert client.counters()["pipeline/worker_0/ejected"] == 0.0
    client.close()


def test_endpoints_given_twice_are_refused():
    with pytest.raises(ConfigError, match="'http://a:1' is given twice"):
        open_client("http://a:1, http://a:1")
    client = open_client("http://a:1,http://b:2")
    assert len(client.counters()) == 14
    client.close()
