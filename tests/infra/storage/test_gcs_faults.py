"""What goes wrong between a store and its bucket, and what callers see of it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from infra.contracts.errors import DamagedObject, StorageError
from infra.storage.open_store import open_store
from tests.infra.storage.gcs_emulator import GcsEmulator
from tests.infra.storage.gcs_objects import MULTIPLE, Fault
from tests.infra.storage.gcs_stores import open_at

KEY = "runs/one/a/b"
LARGE = bytes(range(256)) * (MULTIPLE // 256) * 3 + b"the end"


CALLS = {
    "create": ("POST", lambda store: store.create("a/new", b"x")),
    "large": ("PUT", lambda store: store.create("a/new", [LARGE])),
    "session": ("POST", lambda store: store.create("a/new", [LARGE])),
    "swap": ("POST", lambda store: store.compare_and_swap("a/new", b"x", None)),
    "read": ("GET", lambda store: store.read("a/b")),
    "view": ("GET", lambda store: store.view("a/b")),
    "range": ("GET", lambda store: store.read_range("a/b", 0, 1)),
    "empty range": ("GET", lambda store: store.read_range("a/b", 0, 0)),
    "token": ("GET", lambda store: store.read_with_token("a/b")),
    "list": ("GET", lambda store: store.list_after("a/")),
    "folders": ("GET", lambda store: store.list_folders("")),
    "delete": ("DELETE", lambda store: store.delete("a/b")),
}


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
@pytest.mark.parametrize("name", CALLS)
def test_what_passes_is_tried_again(emulator, store, name, status):
    method, call = CALLS[name]
    store.create("a/b", b"x")
    calm = call(open_at(emulator))
    if "new" in str(emulator.objects("bucket").keys()):
        store.delete("a/new")
    if name == "delete":
        store.create("a/b", b"x")
    emulator.faults.append(fault := Fault(method=method, status=status, times=2))
    result = call(store)
    assert fault.times == 0
    assert result == calm or name == "swap" or name == "token"


@pytest.mark.parametrize("name", CALLS)
def test_an_answer_that_is_lost_is_asked_for_again(emulator, store, name):
    method, call = CALLS[name]
    store.create("a/b", b"x")
    emulator.faults.append(fault := Fault(method=method, lost=True))
    call(store)
    assert fault.times == 0
    wanted = {"create": b"x", "swap": b"x", "large": LARGE, "session": LARGE}.get(name)
    assert store.read_with_token("a/new") == (
        wanted and (wanted, store.read_with_token("a/new")[1])
    )


class TestLostAnswersToWrites:
    """A write that took place, though nobody heard of it, succeeded; another's did not."""

    def test_create(self, emulator, store):
        emulator.faults.append(Fault(method="POST", lost=True))
        assert store.create("a/b", b"mine") is True
        assert len([r for r in emulator.requests if r.startswith("POST")]) == 2
        assert store.create("a/b", b"mine") is False, "another writer, though of the same bytes"

    def test_create_with_every_answer_lost(self, emulator, store):
        emulator.faults.append(Fault(method="POST", lost=True, times=3))
        assert store.create("a/b", b"mine") is True

    def test_create_that_another_won(self, emulator, store):
        """503 without effect; before the second try another writer comes."""

        def other() -> None:
            assert open_at(emulator).create("a/b", b"other")

        emulator.faults.append(Fault(method="POST", status=503, act=other))
        assert store.create("a/b", b"mine") is False
        assert store.read("a/b") == b"other"

    def test_swap(self, emulator, store):
        token = store.compare_and_swap("a/b", b"one", None)
        emulator.faults.append(Fault(method="POST", lost=True))
        second = store.compare_and_swap("a/b", b"two", token)
        assert store.read_with_token("a/b") == (b"two", second)
        assert store.compare_and_swap("a/b", b"three", second)

    def test_swap_that_another_won(self, emulator, store):
        token = store.compare_and_swap("a/b", b"one", None)

        def other() -> None:
            assert open_at(emulator).compare_and_swap("a/b", b"other", token)

        emulator.faults.append(Fault(method="POST", status=503, act=other))
        assert store.compare_and_swap("a/b", b"two", token) is None
        assert store.read("a/b") == b"other"

    def test_swap_that_is_overtaken(self, emulator, store):
        """Ours took place, then another's: None would deny it, a token would claim too much."""
        token = store.compare_and_swap("a/b", b"one", None)

        def other() -> None:
            data, current = open_at(emulator).read_with_token("a/b")
            assert data == b"two"
            assert open_at(emulator).compare_and_swap("a/b", b"other", current)

        emulator.faults.append(Fault(method="POST", lost=True, act=other))
        with pytest.raises(StorageError, match="gs://bucket/runs/one/a/b: the answer to a write"):
            store.compare_and_swap("a/b", b"two", token)

    def test_create_that_is_gone_again(self, emulator, store):
        def other() -> None:
            open_at(emulator).delete("a/b")
            emulator.store("bucket", KEY, b"by hand", {})

        emulator.faults.append(Fault(method="POST", lost=True, act=other))
        with pytest.raises(StorageError, match="read it again"):
            store.create("a/b", b"mine")


class TestDamagedReads:
    @pytest.mark.parametrize("read", ["read", "view", "read_with_token"])
    def test_once(self, emulator, store, read):
        store.create("a/b", b"the truth")
        emulator.faults.append(Fault(method="GET", damage=True))
        found = getattr(store, read)("a/b")
        assert bytes(found[0] if read == "read_with_token" else found) == b"the truth"

    @pytest.mark.parametrize("read", ["read", "view", "read_with_token"])
    def test_every_time(self, emulator, read):
        store = open_at(emulator, deadline_secs=0.05)
        store.create("a/b", b"the truth")
        emulator.faults.append(Fault(method="GET", part="alt=media", damage=True, times=10_000))
        with pytest.raises(DamagedObject, match="gs://bucket/runs/one/a/b: cannot read: ") as e:
            getattr(store, read)("a/b")
        assert "does not match its crc32c" in str(e.value) and "\n" not in str(e.value)

    @pytest.mark.parametrize(
        "read", [lambda s: s.read("a/b"), lambda s: s.read_range("a/b", 2, 900)]
    )
    def test_an_answer_that_breaks_off(self, emulator, store, read):
        store.create("a/b", bytes(1000))
        whole = read(store)
        emulator.faults.append(fault := Fault(method="GET", cut=True, times=2))
        assert read(store) == whole and fault.times == 0


WORDS = {
    400: "check the bucket's name",
    401: "gcloud auth application-default login",
    403: "grant this account roles/storage.objectUser",
    429: "write less often",
    503: "the service's status, then start again",
}


@pytest.mark.parametrize("status", WORDS)
@pytest.mark.parametrize("name", CALLS)
def test_what_does_not_pass_is_named(emulator, name, status):
    """One line: which object, what was said, what to do."""
    method, call = CALLS[name]
    store = open_at(emulator, deadline_secs=0.02)
    store.create("a/b", b"x")
    emulator.faults.append(Fault(method=method, status=status, times=100_000))
    with pytest.raises(StorageError, match="cannot ") as e:
        call(store)
    text = str(e.value)
    said = f"{status} The emulator says {status}. Twice."
    assert (said if status != 401 else "Anonymous credentials cannot be refreshed") in text
    assert text.startswith("gs://bucket/runs/one") and "\n" not in text and len(text) < 400
    assert WORDS[status] in text


@pytest.mark.parametrize("name", CALLS)
def test_a_missing_bucket_is_no_missing_object(emulator, name):
    _, call = CALLS[name]
    with pytest.raises(StorageError, match=r"404 .*bucket.*; create the bucket or correct"):
        call(open_at(emulator, bucket="missing"))


@pytest.mark.parametrize("name", CALLS)
def test_a_bucket_that_vanishes(emulator, store, name):
    store.create("a/b", b"x")
    del emulator.buckets["bucket"]
    with pytest.raises(StorageError, match=r"404 .*bucket.*; create the bucket or correct"):
        CALLS[name][1](store)


def test_absent_objects_cost_one_look_at_the_bucket(emulator, store):
    for _ in range(3):
        assert store.read_with_token("a/b") is None
    assert len(emulator.requests) == 3 + 1


@pytest.mark.parametrize("name", CALLS)
def test_nobody_answers(name):
    """The port was just given back: a connection is refused."""
    with GcsEmulator("bucket") as emulator:
        store = open_at(emulator, deadline_secs=0.02)
    with pytest.raises(StorageError, match=r"gs://bucket/runs/one.*check the network") as e:
        CALLS[name][1](store)
    assert "\n" not in str(e.value)


def test_nobody_is_signed_in(tmp_path, monkeypatch):
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(StorageError, match=r"gs://bucket/run: cannot open: .*gcloud auth") as e:
        open_store("gs://bucket/run")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("form", ["{}", "http://{}"])
def test_the_emulators_variable(emulator, monkeypatch, form):
    host = emulator.endpoint.removeprefix("http://")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", form.format(host))
    store = open_store("gs://bucket/runs/one/")
    assert store.url == "gs://bucket/runs/one" and store.create("a/b", b"x")
    assert open_store(store.url).read("a/b") == emulator.find("bucket", KEY).data == b"x"


def test_racing_creators_on_a_bad_network(emulator, store):
    """16 threads, some answers lost, some refused: one wins, and it knows."""
    for round_ in range(5):
        key, start = f"r{round_}", threading.Barrier(16)
        emulator.faults += [
            Fault(method="POST", lost=True, times=3),
            Fault(method="POST", status=503),
        ]

        def create(i: int, key: str = key, start: threading.Barrier = start) -> bool:
            start.wait()
            return store.create(key, b"%d" % i)

        with ThreadPoolExecutor(16) as pool:
            won = list(pool.map(create, range(16)))
        assert sum(won) == 1 and store.read(key) == b"%d" % won.index(True)


def test_racing_counters_on_a_bad_network(emulator, store):
    """Nothing is counted twice or lost, but for what the store itself says it cannot know."""
    store.create("count", b"0")
    emulator.faults += [
        Fault(method="POST", status=0, times=5),
        Fault(method="POST", lost=True),
    ] * 4

    def add_one(_: int) -> str:
        while True:
            data, token = store.read_with_token("count")
            try:
                if store.compare_and_swap("count", b"%d" % (int(data) + 1), token):
                    return "known"
            except StorageError as e:
                assert "nobody can say" in str(e)
                return "unknown"

    with ThreadPoolExecutor(16) as pool:
        said = list(pool.map(add_one, range(48)))
    assert said.count("known") <= int(store.read("count")) <= 48
