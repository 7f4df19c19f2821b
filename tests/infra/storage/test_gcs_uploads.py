"""Objects of one request and of many, whole in spite of a connection that breaks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from infra.contracts.errors import DamagedObject, StorageError
from infra.storage.gcs_store import GcsStore
from tests.infra.storage.gcs_objects import MULTIPLE, Fault
from tests.infra.storage.gcs_stores import open_at

KEY = "runs/one/a/b"
LARGE = bytes(range(256)) * (MULTIPLE // 256) * 3 + b"the end"


@pytest.mark.parametrize("size", [0, 1, MULTIPLE - 1, MULTIPLE])
def test_what_fits_one_chunk_is_one_request(emulator, size):
    assert open_at(emulator).create("a", [b"x" * size])
    assert [request[:5] for request in emulator.requests] == ["POST "]
    assert emulator.find("bucket", "runs/one/a").data == b"x" * size


@pytest.mark.parametrize("size", [MULTIPLE + 1, 2 * MULTIPLE, 3 * MULTIPLE + 5])
def test_larger_objects_go_in_chunks(emulator, size):
    data = bytes(range(251)) * (size // 251 + 1)
    store = open_at(emulator)
    store.create("first", b"the bucket is there")
    del emulator.requests[:]
    assert store.create("a", (data[i : min(i + 1000, size)] for i in range(0, size, 1000)))
    chunks = -(-size // MULTIPLE)
    assert [request[:3] for request in emulator.requests] == ["GET", "POS"] + ["PUT"] * chunks
    assert emulator.find("bucket", "runs/one/a").data == data[:size]


@pytest.mark.parametrize("size, chunks", [(8 << 20, 0), (9 << 20, 1), (33 << 20, 2)])
def test_the_default_sizes(emulator, size, chunks):
    store = GcsStore("bucket", endpoint=emulator.endpoint)
    assert store.create("a", bytes(size))
    assert sum(request.startswith("PUT") for request in emulator.requests) == chunks
    assert len(emulator.find("bucket", "a").data) == size


def test_an_object_that_exists_is_not_sent_again(emulator):
    store = open_at(emulator)
    store.create("a", b"x")
    del emulator.requests[:]
    assert not store.create("a", (bytes(MULTIPLE) for _ in range(100)))
    assert [request[:3] for request in emulator.requests] == ["GET"]


class TestLargeUploads:
    @pytest.mark.parametrize("chunk", range(4))
    @pytest.mark.parametrize(
        "fault",
        [
            {"lost": True},
            {"status": 503},
            {"keep": 0},
            {"keep": 1000},
            {"keep": 7},
        ],
        ids=str,
    )
    def test_a_chunk_that_breaks_is_sent_from_where_it_broke(self, emulator, store, chunk, fault):
        before = [Fault(method="PUT")] * chunk
        emulator.faults += [Fault(method="PUT") for _ in before] + [Fault(method="PUT", **fault)]
        assert store.create("a/b", [LARGE]) is True
        assert store.read("a/b") == LARGE
        assert sum(f.times for f in emulator.faults) == 0

    def test_only_the_rest_is_sent_again(self, emulator, store):
        emulator.faults.append(Fault(method="PUT", keep=MULTIPLE // 2, times=3))
        assert store.create("a/b", [LARGE])
        assert store.read("a/b") == LARGE

    def test_the_race_is_lost_at_the_end(self, emulator, store):
        def pieces() -> Iterator[bytes]:
            yield LARGE
            assert open_at(emulator).create("a/b", b"other")
            yield b"more"

        assert store.create("a/b", pieces()) is False
        assert store.read("a/b") == b"other"

    def test_the_race_is_lost_after_the_look(self, emulator, store):
        emulator.faults.append(
            Fault(method="GET", part="/o/", act=lambda: emulator.store("bucket", KEY, b"o", {}))
        )
        assert store.create("a/b", [LARGE]) is False

    def test_a_session_that_is_gone(self, emulator, store):
        emulator.faults.append(Fault(method="PUT", status=410))
        with pytest.raises(StorageError, match=r"a/b: cannot write: 410 .*start again"):
            store.create("a/b", [LARGE])
        assert store.read_with_token("a/b") is None

    def test_stored_damaged_is_removed(self, emulator, store):
        """A server that stores another byte than it got, and says so."""

        def flip() -> None:
            (upload,) = emulator.uploads.values()
            upload.data[5] ^= 1

        emulator.faults.append(Fault(method="PUT", act=flip))
        with pytest.raises(DamagedObject, match="gs://bucket/runs/one/a/b: cannot write: it arriv"):
            store.create("a/b", [LARGE])
        assert store.read_with_token("a/b") is None
        assert store.create("a/b", [LARGE])
