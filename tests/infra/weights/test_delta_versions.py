"""Delta versions: rebuilt bit for bit, the same digest, and a clear error without their base."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.clock import ManualClock
from infra.contracts.errors import DamagedObject
from infra.contracts.manifests import TensorDelta
from infra.storage import run_layout
from infra.storage.local_store import LocalStore
from infra.storage.memory_store import MemoryStore
from infra.weights import delta
from infra.weights.delta import DeltaPolicy
from infra.weights.fetch_newest import fetch_newest
from infra.weights.stored_weights import StoredWeights
from infra.weights.weight_store import TensorSlice

POLICY = DeltaPolicy(full_every=3)


def make_arrays(version: int) -> dict[str, np.ndarray]:
    """Version v differs from 0 in a few places of ``moves``, wholly in ``noise``."""
    rng = np.random.default_rng(7)
    moves = rng.standard_normal((60, 50)).astype(ml_dtypes.bfloat16)
    moves.view("u2").ravel()[::37] += np.uint16(version)
    return {
        "moves": moves,
        "noise": np.random.default_rng(version).standard_normal(9, "f4"),
        "still": np.arange(2000, dtype="f4"),
    }


def assert_same(found, arrays):
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].tobytes() == array.tobytes() and found[name].shape == array.shape
        assert not found[name].flags.writeable


@pytest.fixture(params=["memory", "local"])
def store(request, tmp_path):
    return MemoryStore() if request.param == "memory" else LocalStore(tmp_path / "run")


def publish(store, versions, **options) -> list:
    weights = StoredWeights(store, "r", clock=ManualClock(), deltas=POLICY)
    return [weights.publish(version, make_arrays(version), **options) for version in versions]


WIDTHS = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_two_arrays(data):
    dtype = np.dtype(WIDTHS[data.draw(st.sampled_from(sorted(WIDTHS)))])
    size = data.draw(st.sampled_from([0, 1, 2, 300, 70_000]))
    old = np.random.default_rng(size).integers(0, np.iinfo(dtype).max, size, dtype, endpoint=True)
    new = old.copy()
    if size:
        places = data.draw(st.lists(st.integers(0, size - 1), max_size=20))
        for place in places:
            new[place] = data.draw(st.integers(0, int(np.iinfo(dtype).max)))
        if data.draw(st.booleans()):
            new[: size // 2] += dtype.type(1)
    change = delta.encode(old, new)
    entry = TensorDelta(
        name="x",
        piece=0,
        part=0,
        offset=0,
        size_bytes=len(change.data),
        crc32c=0,
        raw_bytes=change.raw_bytes,
        changed=change.changed,
        far=change.far,
        wide=change.wide,
    )
    rebuilt = delta.rebuild(old, entry, np.frombuffer(change.data, np.uint8))
    assert rebuilt.tobytes() == new.tobytes()
    assert change.changed == np.count_nonzero(old != new)


@pytest.mark.parametrize("cuts", [{}, {"moves": (1, 2)}])
def test_the_digest_is_that_of_the_whole(store, cuts):
    manifests = publish(store, range(5), cuts=cuts)
    assert [m.base and m.base.version for m in manifests] == [None, 0, 0, None, 3]
    whole = [StoredWeights(MemoryStore(), "r").publish(v, make_arrays(v)) for v in range(5)]
    assert [m.digest for m in manifests] == [m.digest for m in whole]
    reader = StoredWeights(store, "r")
    for version in (2, 1, 0, 4, 3, 1):
        assert_same(reader.fetch(version), make_arrays(version))
        assert reader.verify(version) == 3
    box = reader.fetch(2, [TensorSlice("moves", (3, 20), (5, 20)), "noise"])
    assert box["moves"].tobytes() == make_arrays(2)["moves"][3:8, 20:40].tobytes()


def test_what_is_stored(store):
    _, manifest = publish(store, [0, 1])
    entries = {entry.name: entry for entry in manifest.tensors}
    assert {name: entry.part >= 0 for name, entry in entries.items()} == {
        "moves": False,
        "noise": True,
        "still": False,
    }
    assert [(d.name, d.changed) for d in manifest.deltas] == [("moves", 82)]
    full = sum(entry.size_bytes for entry in manifest.tensors)
    assert sum(part.size_bytes for part in manifest.parts) < full / 10


def test_nothing_changed_costs_nothing(store):
    weights = StoredWeights(store, "r", deltas=POLICY)
    weights.publish(0, make_arrays(0))
    manifest = weights.publish(1, make_arrays(0))
    assert manifest.parts == () and manifest.base.version == 0
    assert_same(StoredWeights(store, "r").fetch(1), make_arrays(0))


@pytest.mark.parametrize("change", ["everything", "shape", "names", "cuts"])
def test_a_change_too_large_is_published_whole(store, change):
    weights = StoredWeights(store, "r", deltas=POLICY)
    weights.publish(0, make_arrays(0))
    arrays, cuts = make_arrays(1), {}
    if change == "everything":
        rng = np.random.default_rng(3)
        arrays = {n: rng.standard_normal(a.shape).astype(a.dtype) for n, a in arrays.items()}
    elif change == "shape":
        arrays |= {"moves": arrays["moves"].T.copy(), "still": arrays["still"].reshape(2, 1000)}
    elif change == "names":
        arrays = {f"new.{name}": array for name, array in arrays.items()}
    else:
        cuts = {"moves": (0, 2), "still": (0, 4)}
    assert weights.publish(1, arrays, cuts=cuts).base is None
    assert_same(StoredWeights(store, "r").fetch(1), arrays)


def test_publishing_a_delta_again_changes_nothing_and_remakes_it(tmp_path):
    store = LocalStore(tmp_path)
    _, manifest = publish(store, [0, 1])
    key = next(part.key for part in manifest.parts if part.key.endswith(".delta"))
    data = (tmp_path / key).read_bytes()
    (tmp_path / key).unlink()
    (tmp_path / key).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(DamagedObject, match=rf"{key}: .*tensor moves: crc32c"):
        StoredWeights(store, "r").fetch(1)
    assert publish(store, [1]) == [manifest]
    assert_same(StoredWeights(store, "r").fetch(1), make_arrays(1))


def break_base(store, how: str) -> None:
    if how == "gone":
        for key in store.list_after("weights/v00000003/"):
            store.delete(key)
        return
    if how == "other":
        for key in store.list_after("weights/v00000003/"):
            store.delete(key)
        other = MemoryStore()
        StoredWeights(other, "r").publish(3, make_arrays(9))
        for key in other.list_after("weights/v00000003/"):
            store.create(key, other.read(key))
        return
    key = next(key for key in store.list_after("weights/v00000003/") if "safetensors" in key)
    data = bytearray(store.read(key))
    data[-1] ^= 1
    store.delete(key)
    store.create(key, bytes(data))


@pytest.mark.parametrize(
    "how, error, words",
    [
        ("gone", KeyError, "version 4 .* is a delta against version 3, which is not there; fetch"),
        ("other", DamagedObject, "version 4 .*: its base, version 3, has digest .*; fetch a full"),
        ("flipped", DamagedObject, r"weights version 3: tensor (moves|still): crc32c"),
    ],
)
def test_without_its_base(store, how, error, words):
    publish(store, range(5))
    break_base(store, how)
    reader = StoredWeights(store, "r")
    with pytest.raises(error, match=words):
        reader.fetch(4)
    newest = fetch_newest(reader)
    sound = 3 if how == "other" else 0
    assert newest.manifest.version == sound and "version" in newest.fallback_reason
    assert_same(newest.arrays, make_arrays(9 if how == "other" else 0))
    if how != "other":
        with pytest.raises(error):
            fetch_newest(reader, above=2)
    again = StoredWeights(store, "r", deltas=POLICY).publish(5, make_arrays(5))
    assert again.base is None, "the publisher sees it too and starts anew"
    newest = fetch_newest(reader, above=4)
    assert (newest.manifest, newest.fallback_reason) == (again, "")
    assert fetch_newest(reader, above=5) is None


def test_a_reader_on_a_bucket_reads_the_base_once():
    class Counting(MemoryStore):
        bytes_read = 0

        def read_range(self, key, start, length):
            Counting.bytes_read += length
            return super().read_range(key, start, length)

    store = Counting()
    publish(store, range(3))
    reader = StoredWeights(store, "r")
    Counting.bytes_read = 0
    reader.fetch(1)
    first, Counting.bytes_read = Counting.bytes_read, 0
    reader.fetch(2)
    assert first > 14_000 and Counting.bytes_read < 1_000


def test_retire_keeps_bases_and_takes_deltas_first(store):
    publish(store, range(5))
    weights = StoredWeights(store, "r")
    assert weights.bases(range(5)) == {1: 0, 2: 0, 4: 3}
    assert weights.retire([2]) == [1]
    assert weights.versions() == [0, 2, 3, 4]
    assert weights.retire([]) == [0, 2], "LATEST is 4, a delta of 3"
    assert_same(StoredWeights(store, "r").fetch(4), make_arrays(4))
    with pytest.raises(KeyError, match=r"version 2 .*was retired"):
        weights.fetch(2)
    assert store.list_folders("weights") == [
        run_layout.weights_folder(v).removeprefix("weights/") for v in (3, 4)
    ]


@pytest.mark.parametrize("policy", [{"full_every": 0}, {"full_every": 2, "max_share": 0.0}])
def test_a_policy_that_cannot_be(policy):
    with pytest.raises(ValueError, match="full_every"):
        DeltaPolicy(**policy)
