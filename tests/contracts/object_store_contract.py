"""What every object store promises: inherit ``ObjectStoreContract``, give it a ``store`` fixture.

``StoreMachine`` is the same as a state machine: random calls, compared with ``MemoryStore``.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from infra.contracts.errors import DamagedObject, StorageError
from infra.storage.listing import keys_after
from infra.storage.memory_store import MemoryStore
from infra.storage.object_store import ObjectStore

RACERS = 16
ORDERED = ("a!", "a-1/x", "a.json", "a/b/c", "a/b/d", "a/c", "a0", "b/v00000002/M", "é")
"""Ascending as text: a folder sorts by its name *with* the slash."""


class ObjectStoreContract:
    """Every test takes an empty ``store``."""

    def test_create_then_read(self, store: ObjectStore) -> None:
        assert store.create("a/b.json", b"one")
        assert store.read("a/b.json") == b"one"
        assert bytes(store.view("a/b.json")) == b"one"
        assert store.read_range("a/b.json", 1, 2) == b"ne"
        assert store.read_with_token("a/b.json")[0] == b"one"

    def test_create_keeps_what_is_there(self, store: ObjectStore) -> None:
        assert store.create("a", b"one")
        assert not store.create("a", b"two")
        assert not store.create("a", b"one")
        assert store.read("a") == b"one"

    @pytest.mark.parametrize(
        "pieces",
        [
            [],
            [b""],
            [b"ab", b"", memoryview(b"cd")],
            [memoryview(np.arange(6, dtype="<i4").reshape(2, 3))],
            [bytearray(b"x") * 100_000, b"y"],
        ],
    )
    def test_create_streams_buffers(self, store: ObjectStore, pieces: list) -> None:
        assert store.create("a", iter(pieces))
        assert store.read("a") == b"".join(pieces)
        assert bytes(store.view("a")) == b"".join(pieces)

    def test_a_large_object_in_uneven_pieces(self, store: ObjectStore) -> None:
        """The source may fill one buffer again and again."""
        data = np.random.default_rng(0).bytes(1_000_003)

        def pieces():
            buffer = bytearray(70_001)
            for start in range(0, len(data), len(buffer)):
                piece = data[start : start + len(buffer)]
                buffer[: len(piece)] = piece
                yield memoryview(buffer)[: len(piece)]

        assert store.create("a/b", pieces())
        assert not store.create("a/b", pieces())
        assert store.read("a/b") == data
        assert bytes(store.view("a/b")) == data
        for start, length in ((0, 1), (262_143, 2), (999_999, 4), (1, 1_000_002)):
            assert store.read_range("a/b", start, length) == data[start : start + length]
        _, token = store.read_with_token("a/b")
        assert store.compare_and_swap("a/b", data[::-1], token)
        assert store.read("a/b") == data[::-1]

    def test_a_large_stream_that_fails_leaves_nothing(self, store: ObjectStore) -> None:
        def pieces():
            for _ in range(9):
                yield bytes(100_000)
            raise RuntimeError("the source broke")

        with pytest.raises(RuntimeError, match="source broke"):
            store.create("a/b", pieces())
        assert store.list_after("") == []
        assert store.create("a/b", b"whole")

    def test_a_stream_that_fails_leaves_nothing(self, store: ObjectStore) -> None:
        def pieces():
            yield b"half"
            raise RuntimeError("the source broke")

        with pytest.raises(RuntimeError, match="source broke"):
            store.create("a/b", pieces())
        assert store.list_after("") == [] and store.list_folders("") == []
        assert store.create("a/b", b"whole")

    @pytest.mark.parametrize("key", ["absent", "a", "a/b/c/d", "a/b/c"])
    def test_absent(self, store: ObjectStore, key: str) -> None:
        store.create("a/b/file", b"x")
        for read in (store.read, store.view, lambda k: store.read_range(k, 0, 0)):
            with pytest.raises(KeyError, match=key):
                read(key)
        assert store.read_with_token(key) is None
        store.delete(key)
        assert store.read("a/b/file") == b"x"

    @pytest.mark.parametrize("span", [(0, 4), (3, 1), (4, 0), (-1, 1), (0, -1)])
    def test_a_range_is_whole_or_an_error(self, store: ObjectStore, span: tuple[int, int]) -> None:
        store.create("a/b", b"abc")
        with pytest.raises(DamagedObject, match="a/b"):
            store.read_range("a/b", *span)
        assert store.read_range("a/b", 3, 0) == b""

    @pytest.mark.parametrize(
        "key", ["", "/a", "a/", "a//b", "..", "../a", "a/../b", "a/./b", ".hidden", "a/.b", "a\0b"]
    )
    def test_keys_stay_inside(self, store: ObjectStore, key: str) -> None:
        calls = (
            store.read,
            store.view,
            store.delete,
            store.read_with_token,
            lambda k: store.read_range(k, 0, 1),
            lambda k: store.create(k, b""),
            lambda k: store.compare_and_swap(k, b"", None),
        )
        for call in calls:
            with pytest.raises(StorageError, match="not allowed"):
                call(key)

    @pytest.mark.parametrize("prefix", ["..", "/", "a/../", "a//", "."])
    def test_prefixes_stay_inside(self, store: ObjectStore, prefix: str) -> None:
        for call in (store.list_after, store.list_folders):
            with pytest.raises(StorageError, match="not allowed"):
                call(prefix)

    @pytest.mark.parametrize("second", ["a/b", "a", "a/b/c/d"])
    def test_a_key_is_not_a_folder(self, store: ObjectStore, second: str) -> None:
        store.create("a/b/c", b"x")
        with pytest.raises(StorageError, match=f"{second}: "):
            store.create(second, b"y")
        assert store.list_after("") == ["a/b/c"]

    def test_view_is_read_only_and_outlives_the_object(self, store: ObjectStore) -> None:
        store.create("a", b"abcd")
        view = store.view("a")
        assert view.readonly
        store.delete("a")
        assert bytes(view) == b"abcd"

    def test_compare_and_swap(self, store: ObjectStore) -> None:
        swap = store.compare_and_swap
        first = swap("a/b", b"one", None)
        assert first and swap("a/b", b"other", None) is None
        second = swap("a/b", b"two", first)
        assert second and swap("a/b", b"other", first) is None
        assert store.read_with_token("a/b") == (b"two", second)
        store.delete("a/b")
        assert swap("a/b", b"other", second) is None
        assert swap("a/b", b"again", None)

    def test_created_objects_can_be_swapped(self, store: ObjectStore) -> None:
        store.create("a", b"one")
        _, token = store.read_with_token("a")
        assert store.compare_and_swap("a", b"two", token)
        assert not store.create("a", b"three")
        assert store.read("a") == b"two"

    def test_listing(self, store: ObjectStore) -> None:
        for key in reversed(ORDERED):
            store.create(key, b"")
        listed = store.list_after
        assert listed("") == list(ORDERED) == sorted(ORDERED)
        assert listed("a/") == ["a/b/c", "a/b/d", "a/c"]
        assert listed("a/b/") == ["a/b/c", "a/b/d"]
        assert listed("a/b") == ["a/b/c", "a/b/d"]
        assert listed("b/v0") == ["b/v00000002/M"]
        assert listed("nothing") == listed("nothing/at/all/") == []
        for i, key in enumerate(ORDERED):
            assert listed("", after=key) == list(ORDERED[i + 1 :])
            assert listed("", limit=i) == list(ORDERED[:i])
        assert listed("a/", after="a/b/c", limit=1) == ["a/b/d"]
        assert listed("a/", after="a/b/~") == ["a/c"]
        assert listed("a/", after="z") == []

    def test_a_listing_goes_on_while_keys_come_and_go(self, store: ObjectStore) -> None:
        for i in range(10):
            store.create(f"a/{i}", b"")
        assert store.list_after("a/", limit=4) == ["a/0", "a/1", "a/2", "a/3"]
        store.delete("a/3")
        store.create("a/3x", b"")
        assert store.list_after("a/", after="a/3", limit=3) == ["a/3x", "a/4", "a/5"]
        assert list(keys_after(store, "a/", "a/8")) == ["a/9"]

    def test_folders(self, store: ObjectStore) -> None:
        for key in ORDERED:
            store.create(key, b"")
        assert store.list_folders("") == ["a", "a-1", "b"]
        assert store.list_folders("a") == store.list_folders("a/") == ["b"]
        assert store.list_folders("", after="a") == ["a-1", "b"]
        assert store.list_folders("a/c") == store.list_folders("none") == []

    def test_a_folder_ends_with_its_last_object(self, store: ObjectStore) -> None:
        store.create("a/b/c", b"x")
        store.create("a/d", b"x")
        store.delete("a/b/c")
        assert store.list_folders("a") == [] and store.list_folders("") == ["a"]
        assert store.create("a/b", b"a file now")
        store.delete("a/b")
        store.delete("a/d")
        assert store.list_after("") == [] and store.list_folders("") == []
        assert store.create("a/b/c", b"x")

    def test_threads_race_to_create(self, store: ObjectStore) -> None:
        with ThreadPoolExecutor(RACERS) as pool:
            for round_ in range(10):
                key = f"r{round_}/deep/key"
                won = list(pool.map(lambda i, k=key: store.create(k, b"%d" % i), range(RACERS)))
                assert sum(won) == 1
                assert store.read(key) == b"%d" % won.index(True)

    def test_threads_race_to_swap(self, store: ObjectStore) -> None:
        """Counting by compare-and-swap loses nothing."""

        def add_one(_: int) -> None:
            while True:
                found = store.read_with_token("count")
                data, token = found or (b"0", None)
                if store.compare_and_swap("count", b"%d" % (int(data) + 1), token):
                    return

        with ThreadPoolExecutor(RACERS) as pool:
            list(pool.map(add_one, range(5 * RACERS)))
        assert store.read("count") == b"%d" % (5 * RACERS)

    def test_threads_create_and_delete_in_one_folder(self, store: ObjectStore) -> None:
        def come_and_go(i: int) -> None:
            for _ in range(10):
                assert store.create(f"a/b/{i}", b"x")
                store.delete(f"a/b/{i}")

        with ThreadPoolExecutor(RACERS) as pool:
            list(pool.map(come_and_go, range(RACERS)))
        assert store.list_after("") == []


KEYS = st.sampled_from(("a", "b", "c/d", "c/e", "c/f/g", "c-1/h", "i/j/k"))
DATA = st.sampled_from((b"", b"one", b"two"))
TEXT = st.sampled_from(("", "a", "c", "c/", "c/d", "c/f", "c/f/g", "c-", "i/j", "z"))


class StoreMachine(RuleBasedStateMachine):
    """Set ``make_store`` to compare that store with memory, step by step."""

    def make_store(self) -> ObjectStore:
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self.model, self.store = MemoryStore(), self.make_store()

    @rule(key=KEYS, data=DATA)
    def create(self, key: str, data: bytes) -> None:
        assert self.store.create(key, data) == self.model.create(key, data)

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        self.store.delete(key)
        self.model.delete(key)

    @rule(key=KEYS, data=DATA, stale=st.booleans())
    def swap(self, key: str, data: bytes, stale: bool) -> None:
        results = []
        for store in (self.store, self.model):
            found = store.read_with_token(key)
            token = "stale" if stale else found and found[1]
            results.append(store.compare_and_swap(key, data, token) is not None)
        assert results == [not stale, not stale]

    @rule(key=KEYS)
    def read(self, key: str) -> None:
        found, wanted = self.store.read_with_token(key), self.model.read_with_token(key)
        assert (found and found[0]) == (wanted and wanted[0])

    @rule(prefix=TEXT, after=TEXT, limit=st.integers(0, 4))
    def list(self, prefix: str, after: str, limit: int) -> None:
        listed = self.store.list_after(prefix, after, limit)
        assert listed == self.model.list_after(prefix, after, limit)
        assert self.store.list_folders(prefix, after) == self.model.list_folders(prefix, after)

    @precondition(lambda self: self.store)
    @invariant()
    def same_keys(self) -> None:
        assert self.store.list_after("") == self.model.list_after("")
