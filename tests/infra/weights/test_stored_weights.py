from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from infra.clock import ManualClock
from infra.contracts.errors import DamagedObject, NewerSchema, SchemaMismatch, StorageError
from infra.contracts.json_codec import from_json, to_marker, unseal
from infra.contracts.manifests import WeightManifest
from infra.storage import run_layout
from infra.storage.local_store import LocalStore
from infra.storage.memory_store import MemoryStore
from infra.weights.stored_weights import StoredWeights
from infra.weights.tensor_file import digest_of

GOLDEN = Path(__file__).parents[2] / "golden"
LATEST = run_layout.WEIGHTS_LATEST
FACTS = {
    "parent": "replay",
    "optimizer_step": 24,
    "model_config": {"hf": {"hidden_size": 4, "tie_word_embeddings": True}, "layers": 1},
    "tokenizer_digest": "t1",
    "incarnation": "i1",
}


def make_arrays(seed: int = 0) -> dict[str, np.ndarray]:
    """Every storable type, and the shapes that go wrong easily."""

    def values(*shape: int) -> np.ndarray:
        return (np.arange(np.prod(shape)).reshape(shape) + seed) / 8

    return {
        "embed": values(5, 4).astype("f4"),
        "half": values(3, 3).astype(ml_dtypes.bfloat16),
        "odd": values(3).astype("f2"),
        "flag": np.array([True, False, True]),
        "scalar": np.array(seed, dtype="i8"),
        "empty": np.zeros((0, 4), "f4"),
        "turned": np.asfortranarray(values(2, 3)),
        "big_endian": np.arange(4, dtype=">i4") + seed,
        "strided": np.arange(10, dtype="u1")[::2] + np.uint8(seed),
    }


def assert_same(fetched: dict[str, np.ndarray], arrays: dict[str, np.ndarray]) -> None:
    assert fetched.keys() == arrays.keys()
    for name, array in arrays.items():
        got = fetched[name]
        assert (got.shape, got.dtype.name) == (array.shape, array.dtype.name), name
        assert np.array_equal(got, array), name
        assert not got.flags.writeable


@pytest.fixture(params=["memory", "local"])
def store(request, tmp_path):
    return MemoryStore() if request.param == "memory" else LocalStore(tmp_path / "run")


@pytest.mark.parametrize("part_bytes", [1, 60, 10_000])
def test_publish_and_fetch(store, part_bytes):
    weights = StoredWeights(store, "demo", clock=ManualClock(5.0), part_bytes=part_bytes)
    assert weights.latest() is None and weights.versions() == [] and weights.retire([]) == []
    arrays = make_arrays()
    manifest = weights.publish(3, arrays, **FACTS)
    reader = StoredWeights(store, "demo")
    assert reader.latest() == reader.manifest(3) == manifest
    assert (manifest.version, manifest.created_at, manifest.parent) == (3, 5.0, "replay")
    assert manifest.digest == digest_of(arrays)
    assert [entry.name for entry in manifest.tensors] == sorted(arrays)
    assert {len(manifest.parts) == 1} == {part_bytes == 10_000}
    assert_same(reader.fetch(3), arrays)
    assert_same(reader.fetch(3, ["half", "embed"]), {n: arrays[n] for n in ("half", "embed")})
    assert weights.versions() == [3]


def test_parts_are_plain_safetensors(tmp_path):
    arrays = make_arrays()
    weights = StoredWeights(LocalStore(tmp_path), "demo", part_bytes=60)
    parts = weights.publish(0, arrays).parts
    loaded: dict[str, np.ndarray] = {}
    for part in parts:
        loaded |= load_file(tmp_path / part.key)
        assert (tmp_path / part.key).stat().st_size == part.size_bytes
    for name, array in arrays.items():
        assert loaded[name].dtype.name == array.dtype.name
        assert np.array_equal(loaded[name], array)


def test_tensors_are_aligned(store):
    manifest = StoredWeights(store, "demo").publish(0, make_arrays())
    for entry in manifest.tensors:
        assert entry.offset % np.dtype(getattr(ml_dtypes, entry.dtype, entry.dtype)).itemsize == 0


def test_publishing_again_changes_nothing(store):
    clock = ManualClock()
    first = StoredWeights(store, "demo", clock=clock).publish(1, make_arrays(), parent="a")
    keys = store.list_after("")
    clock.advance(10)
    again = StoredWeights(store, "demo", clock=clock).publish(1, make_arrays(), parent="b")
    assert again == first and store.list_after("") == keys


@pytest.mark.parametrize("change", ["value", "name", "shape", "dtype"])
def test_a_version_never_changes(store, change):
    weights = StoredWeights(store, "demo")
    arrays = {"a": np.ones((2, 3), "f4"), "b": np.ones(2, "f4")}
    first = weights.publish(1, arrays)
    other = {
        "value": arrays | {"a": np.full((2, 3), 2, "f4")},
        "name": {"a": arrays["a"], "c": arrays["b"]},
        "shape": arrays | {"a": arrays["a"].T.copy()},
        "dtype": arrays | {"a": arrays["a"].view("i4")},
    }[change]
    with pytest.raises(StorageError, match=r"version 1 .*exists with other weights"):
        weights.publish(1, other)
    assert weights.latest() == first
    assert_same(weights.fetch(1), arrays)


def test_versions_only_grow(store):
    weights = StoredWeights(store, "demo")
    weights.publish(5, make_arrays(5))
    with pytest.raises(StorageError, match="LATEST is already 5 and versions only grow"):
        weights.publish(4, make_arrays(4))
    weights.publish(7, make_arrays(7))
    assert weights.publish(5, make_arrays(5)).version == 5, "a repeat is no step back"
    assert weights.latest().version == 7 and weights.versions() == [5, 7]


@pytest.mark.parametrize("version, arrays", [(-1, make_arrays()), (0, {})])
def test_nonsense_is_refused(store, version, arrays):
    with pytest.raises(ValueError):
        StoredWeights(store, "demo").publish(version, arrays)


def test_types_that_cannot_be_stored_are_named(store):
    with pytest.raises(StorageError, match="tensor text: <U1 cannot be stored; cast"):
        StoredWeights(store, "demo").publish(0, {"text": np.array(["a"])})
    assert store.list_after("") == []


def test_absent_versions_and_tensors(store):
    weights = StoredWeights(store, "demo")
    weights.publish(1, make_arrays())
    for call in (weights.manifest, weights.fetch):
        with pytest.raises(KeyError, match=r"version 2 .*not committed"):
            call(2)
    with pytest.raises(KeyError, match="no tensor 'nose'"):
        weights.fetch(1, ["embed", "nose"])


def test_racing_publishers_agree(store):
    """Same weights: both succeed. Other weights: exactly one does."""
    with ThreadPoolExecutor(4) as pool:
        same = pool.map(lambda _: StoredWeights(store, "r").publish(1, make_arrays(1)), range(4))
        assert len({manifest.digest for manifest in same}) == 1

        def publish(seed: int) -> int | None:
            try:
                StoredWeights(store, "r").publish(2, make_arrays(seed))
            except StorageError:
                return None
            return seed

        won = [seed for seed in pool.map(publish, range(4)) if seed is not None]
    assert len(won) == 1
    assert_same(StoredWeights(store, "r").fetch(2), make_arrays(won[0]))


class Killed(Exception):
    """The process dies here."""


class DyingStore(MemoryStore):
    """A store whose process dies after (or just before) its n-th write."""

    def __init__(self, writes: int) -> None:
        super().__init__()
        self.writes_left = writes

    def _step(self, write, *arguments):
        if self.writes_left == 0:
            raise Killed
        self.writes_left -= 1
        return write(*arguments)

    def create(self, key, data, *, durable=True):
        return self._step(super().create, key, data)

    def compare_and_swap(self, key, data, expected):
        return self._step(super().compare_and_swap, key, data, expected)

    def delete(self, key):
        return self._step(super().delete, key)


@pytest.mark.parametrize("part_bytes, writes", [(10_000, 3), (60, 6)])
def test_dying_after_each_write_of_a_publication(part_bytes, writes):
    """Readers see the old version whole until LATEST moves; a repeat completes the new one."""
    for died_after in range(writes + 1):
        store = DyingStore(writes=100)
        StoredWeights(store, "r", part_bytes=part_bytes).publish(0, make_arrays(0))
        store.writes_left = died_after
        publisher = StoredWeights(store, "r", part_bytes=part_bytes)
        if died_after < writes:
            with pytest.raises(Killed):
                publisher.publish(1, make_arrays(1))
        else:
            publisher.publish(1, make_arrays(1))
            assert store.writes_left == 0, "the table has a row for every write"
        reader = StoredWeights(store, "r")
        seen = reader.latest().version
        assert seen == (1 if died_after == writes else 0)
        assert_same(reader.fetch(seen), make_arrays(seen))
        store.writes_left = 100
        manifest = StoredWeights(store, "r", part_bytes=part_bytes).publish(1, make_arrays(1))
        assert reader.latest() == manifest and reader.versions() == [0, 1]
        assert_same(reader.fetch(1), make_arrays(1))


def test_dying_between_parts_then_other_weights():
    """A replay that differs after the crash is a new publication: left parts do not get in."""
    store = DyingStore(writes=1)
    with pytest.raises(Killed):
        StoredWeights(store, "r").publish(1, make_arrays(1))
    store.writes_left = 100
    weights = StoredWeights(store, "r")
    weights.publish(1, make_arrays(2))
    assert_same(weights.fetch(1), make_arrays(2))


def test_a_damaged_left_over_part_is_replaced(tmp_path):
    weights = StoredWeights(LocalStore(tmp_path), "r")
    key = weights.publish(1, make_arrays()).parts[0].key
    (tmp_path / run_layout.weights_manifest(1)).unlink()
    (tmp_path / run_layout.WEIGHTS_LATEST).unlink()
    flip(tmp_path / key, -1)
    weights.publish(1, make_arrays())
    assert_same(StoredWeights(LocalStore(tmp_path), "r").fetch(1), make_arrays())


@pytest.mark.parametrize("writes", range(5))
def test_dying_after_each_write_of_a_retirement(writes):
    store = DyingStore(writes=100)
    weights = StoredWeights(store, "r")
    for version in range(3):
        weights.publish(version, make_arrays(version))
    store.writes_left = writes
    try:
        weights.retire([])
    except Killed:
        for version in weights.versions():
            assert_same(StoredWeights(store, "r").fetch(version), make_arrays(version))
    store.writes_left = 100
    weights.retire([])
    assert store.list_folders("weights") == [run_layout.weights_folder(2).split("/")[1]]
    assert_same(weights.fetch(2), make_arrays(2))


def test_retire(store):
    weights = StoredWeights(store, "r")
    for version in range(6):
        weights.publish(version, make_arrays(version))
    view = weights.fetch(0)
    assert weights.retire([1, 4, 9]) == [0, 2, 3]
    assert weights.versions() == [1, 4, 5], "LATEST stays without being asked for"
    assert_same(view, make_arrays(0))
    with pytest.raises(KeyError):
        weights.manifest(0)
    assert weights.retire([1, 4]) == []


def test_retire_spares_a_version_above_latest():
    """Committed, but its publisher has not moved LATEST yet."""
    store = DyingStore(writes=100)
    weights = StoredWeights(store, "r")
    weights.publish(0, make_arrays(0))
    store.writes_left = 2
    with pytest.raises(Killed):
        weights.publish(1, make_arrays(1))
    store.writes_left = 100
    assert weights.retire([]) == [] and weights.versions() == [0, 1]


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_every_flipped_bit_is_found(tmp_path):
    store = LocalStore(tmp_path)
    manifest = StoredWeights(store, "r").publish(2, make_arrays())
    part = manifest.parts[0]
    for entry in manifest.tensors:
        if entry.size_bytes == 0:
            continue
        flip(tmp_path / part.key, entry.offset)
        with pytest.raises(DamagedObject) as e:
            StoredWeights(store, "r").fetch(2)
        for word in ("version 2", f"tensor {entry.name}", part.key):
            assert word in str(e.value)
        others = [t.name for t in manifest.tensors if t.name != entry.name]
        assert len(StoredWeights(store, "r").fetch(2, others)) == len(others)
        flip(tmp_path / part.key, entry.offset)
    assert_same(StoredWeights(store, "r").fetch(2), make_arrays())
    mark = json.loads(store.read(run_layout.quarantine(part.key)))
    assert mark["key"] == part.key and "version 2" in mark["problem"]


@pytest.mark.parametrize("damage", ["cut", "longer", "gone"])
def test_parts_of_another_size(tmp_path, damage):
    store = LocalStore(tmp_path)
    part = StoredWeights(store, "r").publish(2, make_arrays()).parts[0]
    path = tmp_path / part.key
    if damage == "gone":
        path.unlink()
    else:
        data = path.read_bytes()
        path.write_bytes(data[:-1] if damage == "cut" else data + b"x")
    with pytest.raises(DamagedObject, match=f"{part.key}: weights version 2: the part"):
        StoredWeights(store, "r").fetch(2)


def test_verified_once_and_timed(tmp_path):
    class TickingClock(ManualClock):
        def now(self) -> float:
            self.advance(1.0)
            return super().now()

    store = LocalStore(tmp_path)
    reader = StoredWeights(store, "r", clock=TickingClock())
    part = reader.publish(0, make_arrays()).parts[0]
    reader.fetch(0)
    assert reader.verify_secs == 1.0
    flip(tmp_path / part.key, -1)
    reader.fetch(0)
    with pytest.raises(DamagedObject):
        StoredWeights(store, "r").fetch(0)


MANIFEST = "weights/v00000001/MANIFEST.json"


@pytest.mark.parametrize(
    "key, old, new, error, words",
    [
        (MANIFEST, b'"shape":[5,4]', b'"shape":[4,5]', DamagedObject, "says version 1, digest"),
        (MANIFEST, b'"version":1', b'"version":3', DamagedObject, "says version 3"),
        (MANIFEST, b'"part":0', b'"part":7', DamagedObject, "lies in part 7 of 1"),
        (MANIFEST, b'"part":0', b'"part":-1', DamagedObject, "lies in part -1 of 1"),
        (MANIFEST, b'"offset":', b'"offset":-', DamagedObject, "at -"),
        (MANIFEST, b'"size_bytes":80', b'"size_bytes":84', DamagedObject, "has 84 bytes as"),
        (MANIFEST, b'"blocks":[]', b'"blocks":[7]', DamagedObject, "1 block checksums"),
        (MANIFEST, b'"axis":0', b'"axis":"x"', SchemaMismatch, r"tensors\[0\].axis: expected"),
        (MANIFEST, b'"created_at":', b'"created_at":"now","x":', SchemaMismatch, "created_at"),
        (MANIFEST, b'"parts"', b'"prats"', SchemaMismatch, "prats"),
        (MANIFEST, b'"base":null', b'"base":7', SchemaMismatch, "base: expected an object"),
        (MANIFEST, b'"schema_version":2', b'"schema_version":9', NewerSchema, "newer program"),
        (LATEST, b"{", b"", SchemaMismatch, "LatestPointer"),
        (LATEST, b'"version":1', b'"version":4', DamagedObject, "is missing"),
        (LATEST, b'"epoch":0', b'"epoch":null', SchemaMismatch, "epoch"),
    ],
)
def test_damaged_markers_are_named(tmp_path, key, old, new, error, words):
    store = LocalStore(tmp_path)
    StoredWeights(store, "r").publish(1, make_arrays())
    data = (tmp_path / key).read_bytes()
    assert old in data
    (tmp_path / key).write_bytes(data.replace(old, new, 1))
    with pytest.raises(SchemaMismatch, match="does not match its seal"):
        StoredWeights(store, "r").latest()
    (tmp_path / key).write_bytes(unseal(data).replace(old, new, 1))
    with pytest.raises(error, match=words) as e:
        StoredWeights(store, "r").latest()
    assert key in str(e.value) and "\n" not in str(e.value)


def golden_manifest() -> WeightManifest:
    weights = StoredWeights(MemoryStore(), "golden", clock=ManualClock(1.5), part_bytes=60)
    return weights.publish(12, make_arrays(), **FACTS)


def test_golden_manifest():
    """The format of version 2; changing these bytes means a new schema version."""
    golden = (GOLDEN / "weight_manifest_v2.json").read_bytes().rstrip(b"\n")
    assert to_marker(golden_manifest()) == golden
    assert from_json(WeightManifest, golden) == golden_manifest()


def test_a_version_of_schema_1_is_read():
    golden = (GOLDEN / "weight_manifest_v1.json").read_bytes().rstrip(b"\n")
    manifest = replace(golden_manifest(), schema_version=1)
    assert from_json(WeightManifest, golden) == manifest
    store = MemoryStore()
    StoredWeights(store, "golden", part_bytes=60).publish(12, make_arrays())
    for key, data in (
        (run_layout.weights_manifest(12), golden),
        (run_layout.WEIGHTS_LATEST, b'{"digest":"%s","version":12}' % manifest.digest.encode()),
    ):
        store.delete(key)
        store.create(key, data)
    weights = StoredWeights(store, "golden")
    assert weights.latest() == manifest and weights.verify(12) == len(make_arrays())
    assert_same(weights.fetch(12), make_arrays())
    assert weights.publish(13, make_arrays(1), incarnation="i", epoch=4).version == 13


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_publishing_again_remakes_a_part_that_a_machine_crash_damaged(tmp_path, damage):
    weights = StoredWeights(LocalStore(tmp_path), "run")
    manifest = weights.publish(0, make_arrays())
    part = tmp_path / manifest.parts[0].key
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.unlink()
    if damage != "remove":
        part.write_bytes(data if damage == "flip" else data[:-1])

    with pytest.raises(DamagedObject):
        StoredWeights(LocalStore(tmp_path), "run").fetch(0)
    assert StoredWeights(LocalStore(tmp_path), "run").publish(0, make_arrays()) == manifest
    assert_same(StoredWeights(LocalStore(tmp_path), "run").fetch(0), make_arrays())
