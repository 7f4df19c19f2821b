import random
from collections import Counter

from infra.clock import ManualClock
from infra.inference.worker_roster import MANY, WorkerRoster
from tests.contracts.inference_client_contract import make_request
from tests.infra.inference.scripted_worker import ScriptedWorker


def roster(count, seed=0):
    workers = [ScriptedWorker(str(i), ["ok"], ManualClock()) for i in range(count)]
    return WorkerRoster(workers, random.Random(seed))


def test_load_is_counted_in_samples():
    pool = roster(2)
    big = pool.take(make_request(n=4), 0.0)
    small = [pool.take(make_request(i, n=1), 0.0) for i in range(4)]
    assert big not in small
    pool.ended(big, make_request(n=4), 0.0)
    assert pool.take(make_request(n=1), 0.0) is big


def test_an_old_version_counts_as_a_request_more_but_is_not_shunned():
    pool = roster(2)
    new, old = pool.standings
    new.version, old.version = 5, 4
    request = make_request(n=2, version=5)
    assert [pool.take(request, 0.0) for _ in range(2)].count(new) >= 1
    taken = Counter(pool.take(request, 0.0).worker.name for _ in range(20))
    assert min(taken.values()) >= 8


def test_among_many_two_are_drawn():
    pool = roster(4 * MANY)
    first = Counter(pool.take(make_request(n=1), 0.0).worker.name for _ in range(400))
    assert len(first) == 4 * MANY
    assert max(first.values()) <= 400 // (4 * MANY) + 6
