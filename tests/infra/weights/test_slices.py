"""Cut tensors and boxes of tensors: right, verified, and read by range only."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from infra.contracts.errors import DamagedObject, StorageError
from infra.storage.local_store import LocalStore
from infra.storage.memory_store import MemoryStore
from infra.weights.stored_weights import StoredWeights
from infra.weights.weight_store import TensorSlice

ROWS = np.arange(24 * 6, dtype="f4").reshape(24, 6)
ARRAYS = {
    "column": ROWS.astype(ml_dtypes.bfloat16) + 1,
    "norm": np.arange(6, dtype="f4"),
    "row": ROWS,
    "scalar": np.float32(3.5),
    "stack": np.arange(4 * 6 * 2, dtype="i2").reshape(4, 6, 2),
}
CUTS = {"row": (0, 4), "column": (1, 2), "stack": (1, 3)}


class CountingStore(MemoryStore):
    """Counts the bytes that are read of parts; a view of one is refused."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[tuple[str, int, int]] = []

    def read_range(self, key, start, length):
        self.ranges.append((key, start, length))
        return super().read_range(key, start, length)

    def view(self, key):
        raise AssertionError(f"{key} was downloaded whole")


LARGE = np.arange(3072 * 2048, dtype="u2").reshape(3072, 2048)
"""A row is 4 KiB, a block of 4 MiB 1,024 rows."""


def expected(name: str, start=None, shape=None) -> np.ndarray:
    array = np.asarray(ARRAYS[name])
    if start is None:
        return array
    return array[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))]


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("cuts", [{}, CUTS])
def test_every_box(tmp_path, local, cuts):
    store = LocalStore(tmp_path) if local else MemoryStore()
    StoredWeights(store, "r").publish(0, ARRAYS, cuts=cuts)
    reader = StoredWeights(store, "r")
    for name, array in reader.fetch(0).items():
        assert np.array_equal(array, expected(name)) and not array.flags.writeable

    @settings(max_examples=60, deadline=None)
    @given(st.data())
    def check(data):
        name = data.draw(st.sampled_from(sorted(ARRAYS)))
        sizes = np.shape(ARRAYS[name])
        start = tuple(data.draw(st.integers(0, n)) for n in sizes)
        shape = tuple(data.draw(st.integers(0, n - a)) for n, a in zip(sizes, start, strict=True))
        got = reader.fetch(0, [TensorSlice(name, start, shape), *({"norm"} - {name})])
        assert got[name].dtype == np.asarray(ARRAYS[name]).dtype
        assert np.array_equal(got[name], expected(name, start, shape))

    check()


def test_a_cut_version_has_the_same_digest():
    store = MemoryStore()
    plain = StoredWeights(store, "r").publish(0, ARRAYS)
    assert StoredWeights(store, "r").publish(1, ARRAYS, cuts=CUTS).digest == plain.digest


def test_parts_follow_the_shards(tmp_path):
    """Shard k's pieces lie side by side in one file, which any safetensors reader opens."""
    manifest = StoredWeights(LocalStore(tmp_path), "r").publish(0, ARRAYS, cuts=CUTS)
    entries = {entry.name: entry for entry in manifest.tensors}
    assert [piece.part for piece in entries["row"].pieces] == [1, 2, 3, 4]
    assert [piece.part for piece in entries["column"].pieces] == [1, 2]
    assert entries["norm"].part == entries["scalar"].part == 0
    loaded = load_file(tmp_path / manifest.parts[2].key)
    assert loaded.keys() == {
        "row.piece-1-of-4",
        "column.piece-1-of-2",
        "stack.piece-1-of-3",
    }
    assert np.array_equal(loaded["column.piece-1-of-2"], ARRAYS["column"][:, 3:])


def test_a_shard_is_one_range():
    store = CountingStore()
    StoredWeights(store, "r").publish(0, ARRAYS, cuts={"row": (0, 2), "column": (1, 2)})
    wanted = [TensorSlice("row", (12, 0), (12, 6)), TensorSlice("column", (0, 3), (24, 3))]
    StoredWeights(store, "r").fetch(0, wanted)
    assert [length for _, _, length in store.ranges] == [12 * 6 * 4 + 24 * 3 * 2]


def test_rows_are_read_by_block():
    store = CountingStore()
    StoredWeights(store, "r").publish(0, {"large": LARGE})
    for first, count, blocks in ((1000, 20, 1), (1000, 25, 2), (2047, 1, 1), (0, 3072, 3)):
        store.ranges.clear()
        got = StoredWeights(store, "r").fetch(0, [TensorSlice("large", (first, 7), (count, 9))])
        assert np.array_equal(got["large"], LARGE[first : first + count, 7:16])
        assert [length for _, _, length in store.ranges] == [blocks << 22]
    store.ranges.clear()
    assert (
        StoredWeights(store, "r").fetch(0, [TensorSlice("large", (3, 0), (0, 6))])["large"].size
        == 0
    )
    assert store.ranges == []


@pytest.mark.parametrize("local", [True, False])
def test_only_what_is_read_is_verified(tmp_path, local):
    store = LocalStore(tmp_path) if local else MemoryStore()
    manifest = StoredWeights(store, "r").publish(0, {"large": LARGE})
    key = manifest.parts[0].key
    data = bytearray(store.read(key))
    data[manifest.tensors[0].offset + 1500 * 4096] ^= 4
    if local:
        (tmp_path / key).write_bytes(data)
    else:
        store.delete(key)
        store.create(key, bytes(data))
    reader = StoredWeights(store, "r")
    for first, count, sound in (
        (0, 1024, True),
        (2048, 9, True),
        (1024, 1, False),
        (9, 2000, False),
    ):
        box = [TensorSlice("large", (first, 0), (count, 2048))]
        if sound:
            assert np.array_equal(reader.fetch(0, box)["large"], LARGE[first : first + count])
        else:
            with pytest.raises(DamagedObject, match=f"{key}: .*tensor large: crc32c"):
                reader.fetch(0, box)


@pytest.mark.parametrize(
    "wanted, error, words",
    [
        ([TensorSlice("nose", (0,), (1,))], KeyError, "no tensor 'nose'"),
        ([TensorSlice("row", (0,), (1,))], ValueError, "has 2 axes"),
        ([TensorSlice("row", (23, 0), (2, 6))], ValueError, "does not lie in tensor row"),
        ([TensorSlice("row", (-1, 0), (1, 6))], ValueError, "does not lie in"),
        (["row", TensorSlice("row", (0, 0), (1, 6))], ValueError, "wanted twice"),
    ],
)
def test_boxes_that_cannot_be(wanted, error, words):
    store = MemoryStore()
    StoredWeights(store, "r").publish(0, ARRAYS)
    with pytest.raises(error, match=words):
        StoredWeights(store, "r").fetch(0, wanted)


@pytest.mark.parametrize(
    "cuts, words",
    [
        ({"row": (0, 5)}, "cannot be cut into 5 equal pieces along axis 0"),
        ({"row": (2, 2)}, "along axis 2"),
        ({"row": (0, 0)}, "into 0 equal"),
        ({"nose": (0, 2)}, "nose is to be cut and not given"),
    ],
)
def test_cuts_that_cannot_be(cuts, words):
    store = MemoryStore()
    with pytest.raises(StorageError, match=words):
        StoredWeights(store, "r").publish(0, ARRAYS, cuts=cuts)
    assert store.list_after("") == []
