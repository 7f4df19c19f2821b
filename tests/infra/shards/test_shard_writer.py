"""The shard writer: data first, manifest last, whatever dies in between; bad groups refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from infra.contracts.errors import DamagedObject, SchemaMismatch
from infra.contracts.json_codec import to_json
from infra.contracts.records import Decision, Group
from infra.shards.shard_index import ShardIndex
from infra.shards.shard_reader import read_shard, verify_shard
from infra.storage.local_store import LocalStore
from infra.storage.memory_store import MemoryStore
from infra.storage.object_store import ObjectStore
from tests.builders import make_group
from tests.infra.shards.stores import Died, DyingStore, encoded, overwrite, write


def test_the_manifest_describes_its_shard() -> None:
    store = MemoryStore()
    new = make_group(1030, version=5, n=4, rewards=[1.0, 0.0, 0.0, 0.5])
    manifest = write(store, new, make_group(1025, version=3))
    assert manifest.block == 1 and manifest.decision is Decision.ACCEPTED
    assert manifest.data_key == f"rollouts/00000001/{manifest.data_digest}.parquet"
    assert manifest.size_bytes == len(store.read(manifest.data_key))
    assert (manifest.rows, manifest.oldest_version, manifest.newest_version) == (6, 3, 5)
    assert manifest.capabilities == ("scorable", "trainable")
    first, second = manifest.groups
    assert first.admission_index == 1025
    assert (second.rollouts, second.reward_mean, second.pass_rate) == (4, 0.375, 0.5)
    assert (second.tokens, second.oldest_version, second.newest_version) == (12, 5, 5)


def foreign(group: Group) -> Group:
    names = ("prompt_ids", "response_ids", "loss_mask", "behaviour_logprobs", "raw_logprobs")
    nothing = dict.fromkeys((*names, "policy_versions"))
    rollouts = (replace(rollout, spans=(), weights=(), **nothing) for rollout in group.rollouts)
    return replace(group, rollouts=tuple(rollouts))


def with_arrays(group: Group, **arrays: object) -> Group:
    first, *rest = group.rollouts
    return replace(group, rollouts=(replace(first, **arrays), *rest))


NOT_FINITE = np.array([0, np.nan, 0], np.float32)


@pytest.mark.parametrize(
    ("group", "capabilities"),
    [
        (make_group(), ("scorable", "trainable")),
        (make_group(decision=Decision.REJECTED), ("scorable", "trainable")),
        (make_group(decision=Decision.FAILED), ()),
        (foreign(make_group()), ("scorable",)),
        (
            with_arrays(make_group(decision=Decision.FAILED, n=2), raw_logprobs=NOT_FINITE),
            ("scorable",),
        ),
    ],
)
def test_a_shard_declares_what_it_can_be_used_for(
    group: Group, capabilities: tuple[str, ...]
) -> None:
    store = MemoryStore()
    manifest = write(store, group)
    assert manifest.capabilities == capabilities
    assert encoded(read_shard(store, manifest)) == encoded([group])


def test_a_retry_with_other_timings_and_order_finds_the_first_attempt() -> None:
    store = MemoryStore()
    records = [make_group(i) for i in range(3)]
    first = write(store, *records)
    later = [replace(group, timings={"generate": 9.0, "score": 1.0}) for group in records]
    assert write(store, *reversed(later), now=2.0) == first
    assert len(store.list_after("")) == 2


@pytest.mark.parametrize(
    ("creation", "after", "visible"), [(1, False, 0), (1, True, 0), (2, False, 0), (2, True, 1)]
)
def test_death_at_any_point_leaves_nothing_half_visible_and_a_retry_completes(
    creation: int, after: bool, visible: int
) -> None:
    store = DyingStore(creation, after=after)
    with pytest.raises(Died):
        write(store, make_group())
    assert len(ShardIndex(store).poll()) == visible
    retried = replace(make_group(), timings={"generate": 7.0})
    manifest = write(store, retried, now=2.0)
    assert ShardIndex(store).poll() == (manifest,)
    verify_shard(store, manifest)
    assert len(store.list_after("")) == 2


class RacingStore(MemoryStore):
    """Runs a rival's whole write just before our n-th creation."""

    def __init__(self, creation: int, rival: Callable[[ObjectStore], object]) -> None:
        super().__init__()
        self.creation, self.rival = creation, rival

    def create(self, key: str, data: bytes | Iterable[bytes | memoryview]) -> bool:
        self.creation -= 1
        if self.creation == 0:
            self.rival(self)
        return super().create(key, data)


@pytest.mark.parametrize("creation", [1, 2])
def test_two_writers_of_the_same_groups_agree(creation: int) -> None:
    slower = replace(make_group(), timings={"generate": 3.0})
    results = []
    store = RacingStore(creation, lambda s: results.append(write(s, slower, now=2.0)))
    ours = write(store, make_group())
    assert results == [ours]
    assert ShardIndex(store).poll() == (ours,)
    verify_shard(store, ours)


def test_many_threads_write_the_same_groups_to_a_folder(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    variants = [replace(make_group(), timings={"generate": float(i)}) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        manifests = list(pool.map(lambda group: write(LocalStore(tmp_path), group), variants))
    assert len({to_json(manifest) for manifest in manifests}) == 1
    verify_shard(store, manifests[0])


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ((), "at least one group"),
        ((make_group(0), make_group(1, decision=Decision.REJECTED)), "of one decision"),
        ((make_group(1023), make_group(1024)), "of one block"),
        ((make_group(0), make_group(1, run="other")), "of one run"),
        ((make_group(0), make_group(0)), "a group appears twice"),
        ((make_group(decision=None),), "has no decision"),
        ((make_group(n=0),), "accepted with 0 rollouts"),
        ((replace(make_group(), judgements=()),), "every rollout needs one"),
        ((make_group(recipe_digest="other"),), "recipe other, the shard's is recipe-digest"),
        ((make_group(rewards=[float("nan"), 0.0]),), "reward or weight is not finite"),
        ((with_arrays(make_group(), behaviour_logprobs=NOT_FINITE),), "behaviour_logprobs is not"),
        ((with_arrays(make_group(), loss_mask=np.ones(2, bool)),), "array lengths differ"),
        (
            (with_arrays(make_group(), token_columns={"value": np.ones(2, np.float32)}),),
            "array lengths differ",
        ),
        ((with_arrays(make_group(), raw_logprobs=None),), "raw_logprobs missing"),
        ((with_arrays(make_group(), spans=((0, 4, "model", "stop"),)),), "outside the 3 tokens"),
    ],
)
def test_what_must_not_be_committed_is_refused_and_leaves_nothing(
    records: tuple[Group, ...], message: str
) -> None:
    store = MemoryStore()
    with pytest.raises(SchemaMismatch, match=message):
        write(store, *records)
    assert store.list_after("") == []


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: b""])
def test_a_retry_does_not_build_on_a_damaged_first_attempt(
    damage: Callable[[bytes], bytes],
) -> None:
    store = DyingStore(2)
    with pytest.raises(Died):
        write(store, make_group())
    (key,) = store.list_after("")
    overwrite(store, key, damage(store.read(key)))
    with pytest.raises(DamagedObject, match="earlier attempt"):
        write(store, make_group())
    assert ShardIndex(store).poll() == ()


def test_a_retry_does_not_build_on_other_content_under_its_name() -> None:
    store, other = DyingStore(2), MemoryStore()
    with pytest.raises(Died):
        write(store, make_group())
    (key,) = store.list_after("")
    overwrite(store, key, other.read(write(other, make_group(1)).data_key))
    with pytest.raises(DamagedObject, match="other content than its name"):
        write(store, make_group())
