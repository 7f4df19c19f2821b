"""The contract over HTTP, listings and uploads. Uploads and faults: beside it."""

from __future__ import annotations

import itertools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import settings

from infra.contracts.errors import ConfigError, StorageError
from infra.storage.gcs_store import GcsStore
from infra.storage.listing import keys_after
from tests.contracts.object_store_contract import ObjectStoreContract, StoreMachine
from tests.infra.storage.gcs_emulator import GcsEmulator
from tests.infra.storage.gcs_objects import MULTIPLE
from tests.infra.storage.gcs_stores import open_at


class TestGcsStore(ObjectStoreContract):
    @pytest.fixture
    def store(self, emulator: GcsEmulator) -> GcsStore:
        return open_at(emulator)

    def test_a_key_is_not_a_folder(self, store: GcsStore) -> None:
        """A bucket allows it, and a check would cost a request for each part of the key."""
        assert store.create("a/b/c", b"x") and store.create("a/b", b"y")
        assert store.list_after("") == ["a/b", "a/b/c"] and store.list_folders("a") == ["b"]


class GcsMachine(StoreMachine):
    """One server for all examples, a prefix for each."""

    emulator: GcsEmulator
    prefixes = itertools.count()

    def make_store(self) -> GcsStore:
        return open_at(self.emulator, f"example/{next(self.prefixes)}")


GcsMachine.TestCase.settings = settings(max_examples=10, stateful_step_count=20, deadline=None)


class TestAgainstMemory(GcsMachine.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        GcsMachine.emulator = cls.enterClassContext(GcsEmulator("bucket"))


def test_stores_share_a_bucket(emulator):
    one, two = open_at(emulator, "runs/one"), open_at(emulator, "/runs/one-more/")
    whole = open_at(emulator, "")
    assert one.create("a", b"1") and two.create("a", b"2") and whole.create("b", b"3")
    assert one.list_after("") == two.list_after("") == ["a"]
    assert whole.list_after("") == ["b", "runs/one-more/a", "runs/one/a"]
    assert whole.list_folders("") == ["runs"]
    assert whole.list_folders("runs", after="one") == ["one-more"]
    assert (one.url, two.url, whole.url) == (
        "gs://bucket/runs/one",
        "gs://bucket/runs/one-more",
        "gs://bucket",
    )


def test_what_people_leave_in_a_bucket_is_not_listed(emulator):
    """The console marks a folder by an empty object that ends with a slash."""
    for name in ("r/", "r/rollouts/", "r/rollouts/a", "r/.keep", "r/.tmp/x", "r/x//y"):
        emulator.store("bucket", name, b"", {})
    store = open_at(emulator, "r")
    assert store.list_after("", limit=1) == store.list_after("") == ["rollouts/a"]
    assert store.list_folders("") == ["rollouts", "x"]


def test_a_listing_asks_for_no_more_than_it_returns(emulator):
    """2,500 keys: the newest ten cost one small page, all of them three."""
    for i in range(2_500):
        emulator.store("bucket", f"r/rollouts/{i:05d}", b"", {})
    store = open_at(emulator, "r")
    assert store.list_after("rollouts/", after="rollouts/02489", limit=1000) == [
        f"rollouts/{i:05d}" for i in range(2_490, 2_500)
    ]
    assert store.list_after("rollouts/", limit=2) == ["rollouts/00000", "rollouts/00001"]
    first, second = emulator.requests
    assert "startOffset=r%2Frollouts%2F02489&" in first and "maxResults=3&" in second
    assert len(list(keys_after(store, "rollouts/"))) == 2_500
    assert len(emulator.requests) == 2 + 3


def test_folders_are_listed_page_by_page(emulator):
    for i in range(1_100):
        emulator.store("bucket", f"r/rollouts/{i:08d}/data", b"", {})
    store = open_at(emulator, "r")
    assert store.list_folders("rollouts") == [f"{i:08d}" for i in range(1_100)]
    assert len(emulator.requests) == 2
    assert store.list_folders("rollouts", after="00001097") == ["00001098", "00001099"]
    assert len(emulator.requests) == 3


def test_threads_share_a_store(emulator):
    store = open_at(emulator)

    def work(i: int) -> bytes:
        store.create(f"{i}", [bytes([i]) * MULTIPLE] * 2)
        return store.read(f"{i}")

    with ThreadPoolExecutor(16) as pool:
        for i, data in enumerate(pool.map(work, range(32))):
            assert data == bytes([i]) * 2 * MULTIPLE


@pytest.mark.parametrize("key", ["a b", "a?b#c", "é", "a%2Fb", "a+b", "a&b=c", "a\\b"])
def test_keys_are_quoted(emulator, key):
    store = open_at(emulator)
    assert store.create(f"x/{key}/y", b"1") and store.list_folders("x") == [key]
    assert store.list_after(f"x/{key}") == [f"x/{key}/y"]
    assert store.list_after("x/", after=f"x/{key}") == [f"x/{key}/y"]
    assert store.read(f"x/{key}/y") == b"1"
    store.delete(f"x/{key}/y")
    assert store.list_after("") == []


@pytest.mark.parametrize("bucket", ["", "A", "a_", "a b", "UPPER", "ab/c"])
def test_names_that_no_bucket_has(bucket):
    with pytest.raises(ConfigError, match="no bucket's name; give gs://bucket/path"):
        GcsStore(bucket, "run", endpoint="localhost:1")


@pytest.mark.parametrize("prefix", ["a//b", "../a", "a/.b"])
def test_prefixes_that_no_key_has(prefix):
    with pytest.raises(StorageError, match="not allowed"):
        GcsStore("bucket", prefix, endpoint="localhost:1")


def test_local_runs_do_not_load_googles_package():
    code = (
        "import sys; from infra.storage.open_store import open_store\n"
        "open_store('/tmp'); sys.exit('google.cloud.storage' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_missing_package_is_named():
    code = (
        "import sys; sys.modules['google.cloud.storage'] = None\n"
        "from infra.contracts.errors import ConfigError\n"
        "from infra.storage.open_store import open_store\n"
        "try: open_store('gs://bucket/run')\n"
        "except ConfigError as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("gs://bucket/run: ") and done.stdout.count("\n") == 1
    assert "pip install 'headrace[gcs]'" in done.stdout and "headrace[gcp]" in done.stdout
