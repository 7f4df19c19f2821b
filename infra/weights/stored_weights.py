"""Weight versions in an object store: safetensors parts, then the manifest, then LATEST.

Publishing may die between any two writes and be repeated: parts are named by their content, the
manifest is created once, and LATEST only grows. Readers start from LATEST or a manifest, so what is
half-published is invisible.

Parts are not forced to the local disk: 538 MB took 1.4 to 2.7 s of an update of 5 s. After a crash
of the machine the newest versions may therefore be damaged. Readers see that by checksum, and the
trainer, whose checkpoint, ledger and shards are durable, makes LATEST again when it restarts (of a
delta version only if its base is sound; else readers fall back to a full version until the next).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from infra.clock import Clock, SystemClock
from infra.contracts.errors import DamagedObject, StorageError
from infra.contracts.json_codec import to_marker
from infra.contracts.manifests import WeightManifest
from infra.storage import run_layout
from infra.storage.object_store import ObjectStore
from infra.weights import tensor_file
from infra.weights.boxes import boxes
from infra.weights.delta import DeltaPolicy
from infra.weights.latest_pointer import LatestPointer, advance_latest, check_fence, read_latest
from infra.weights.manifest_file import Place, decode_manifest, pieces_of
from infra.weights.piece_reader import maps
from infra.weights.tensor_file import Tensor
from infra.weights.version_reader import VersionReader
from infra.weights.version_writer import Changes, VersionWriter, cuts_of, find_changes
from infra.weights.weight_store import Cuts, TensorSlice

PART_BYTES = 2 << 30
_REMEMBERED = 8


class StoredWeights:
    """Implements ``WeightStore``. Not for several threads at once.

    Args:
        store: where the run lies.
        run: its name, written into manifests.
        clock: stamps manifests and times verification.
        part_bytes: size above which a further part begins.
        deltas: when to publish only what changed; None: never.
    """

    def __init__(
        self,
        store: ObjectStore,
        run: str,
        *,
        clock: Clock | None = None,
        part_bytes: int = PART_BYTES,
        deltas: DeltaPolicy | None = None,
    ) -> None:
        self._store = store
        self._run = run
        self._clock = clock or SystemClock()
        self._deltas = deltas
        self._writer = VersionWriter(store, part_bytes)
        self._reader = VersionReader(store, self._clock, self.manifest)
        self._newest: WeightManifest | None = None
        self._manifests: dict[int, tuple[bytes, WeightManifest]] = {}
        self._bases: dict[int, int | None] = {}

    @property
    def verify_secs(self) -> float:
        """What the last ``fetch`` spent on checksums; nearly 0 if all had been verified before."""
        return self._reader.verify_secs

    def publish(
        self,
        version: int,
        arrays: Mapping[str, np.ndarray],
        *,
        parent: str = "",
        cuts: Cuts | None = None,
        optimizer_step: int = 0,
        model_config: Mapping[str, object] | None = None,
        tokenizer_digest: str = "",
        cast: str = "",
        incarnation: str = "",
        epoch: int = 0,
        updated_at: float = 0.0,
    ) -> WeightManifest:
        """Commit one version; see ``WeightStore.publish``. The arrays must not change meanwhile."""
        if version < 0 or not arrays:
            raise ValueError(f"version {version} with {len(arrays)} arrays cannot be published")
        newest = check_fence(self._store, incarnation, epoch)
        tensors = tensor_file.measure(arrays, cuts)
        digest = tensor_file.weights_digest(tensor.identity for tensor in tensors)
        committed = self._committed(version)
        if committed is not None and committed.digest == digest:
            self._remake(committed, arrays)
        if committed is None:
            self._refuse_older(version, newest)
            written = self._writer.write(version, tensors, self._changes(version, tensors))
            committed = self._commit(
                WeightManifest(
                    run=self._run,
                    version=version,
                    digest=digest,
                    parts=written.parts,
                    tensors=written.tensors,
                    parent=parent,
                    optimizer_step=optimizer_step,
                    model_config=dict(model_config or {}),
                    tokenizer_digest=tokenizer_digest,
                    incarnation=incarnation,
                    created_at=self._clock.now(),
                    updated_at=updated_at,
                    epoch=epoch,
                    cast=cast,
                    base=written.base,
                    deltas=written.deltas,
                ),
                tensors,
            )
        if committed.digest != digest:
            check_fence(self._store, incarnation, epoch)
            raise StorageError(
                f"{self._name(version)} exists with other weights ({committed.digest}, not "
                f"{digest}); published versions never change, use a new version"
            )
        owner = {"incarnation": incarnation, "epoch": epoch}
        advance_latest(self._store, LatestPointer(version=version, digest=digest, **owner))
        return committed

    def _refuse_older(self, version: int, newest: LatestPointer | None) -> None:
        if newest is not None and newest.version >= version:
            raise StorageError(
                f"{self._name(version)}: LATEST is already {newest.version} and versions only "
                f"grow; publish {newest.version + 1} or later"
            )

    def latest(self) -> WeightManifest | None:
        """The manifest that LATEST points to; read again only when LATEST has moved."""
        pointer = read_latest(self._store)
        while pointer is not None:
            known = self._newest
            if known is None or (known.version, known.digest) != (pointer.version, pointer.digest):
                known = self._committed(pointer.version)
            if known is not None and known.digest == pointer.digest:
                self._newest = known
                return known
            previous, pointer = pointer, read_latest(self._store)
            if pointer == previous:  # else it moved on, and the old version may be retired
                found = "is missing" if known is None else f"has digest {known.digest}"
                raise DamagedObject(
                    f"{self._store.url}/{run_layout.WEIGHTS_LATEST} names version "
                    f"{previous.version} ({previous.digest}), whose manifest {found}"
                )
        return None

    def manifest(self, version: int) -> WeightManifest:
        """Raises ``KeyError`` if that version is not committed (or was retired)."""
        manifest = self._committed(version)
        if manifest is None:
            raise KeyError(f"{self._name(version)} is not committed or was retired")
        return manifest

    def fetch(
        self, version: int, wanted: Iterable[str | TensorSlice] | None = None
    ) -> dict[str, np.ndarray]:
        """Read tensors or boxes as read-only arrays; see ``WeightReader.fetch``.

        Views of the mapped file where there is one. Of a box, the blocks of those rows are read.

        Raises:
            KeyError: the version is not committed (or was retired), or has no such tensor.
            DamagedObject: something is not what the manifest says; nothing is returned.
        """
        manifest = self.manifest(version)
        found = self._reader.read(manifest, boxes(manifest, wanted, self._name(version)))
        if wanted is None and maps(self._store):
            self._reader.check_headers(manifest)
        return found

    def verify(self, version: int) -> int:
        """Read every byte of a version (and of its base) anew; return how many tensors are sound.

        Raises as ``fetch`` does.
        """
        manifest = self.manifest(version)
        self._reader.forget(manifest)
        if manifest.base is not None:
            self.verify(manifest.base.version)
        self._reader.check_headers(manifest)
        self._reader.verify_secs = 0.0
        for entry in manifest.tensors:  # one at a time: a model need not fit into memory
            self._reader.pieces(manifest, [(entry.name, k) for k in range(len(pieces_of(entry)))])
        return len(manifest.tensors)

    def versions(self) -> list[int]:
        """Committed versions, ascending."""
        return [version for version in self._folders() if self._has_manifest(version)]

    def retire(self, keep: Iterable[int]) -> list[int]:
        """Delete versions below LATEST that are not in ``keep``, manifest first, then parts.

        Bases of the deltas that stay, stay; deltas go before their bases. A reader in the middle of
        a version that goes gets ``KeyError``. Folders that a dead publisher or an interrupted
        ``retire`` left are cleared too.
        """
        pointer = read_latest(self._store)
        if pointer is None:
            return []
        folders = self._folders()
        kept = {v for v in folders if v >= pointer.version} | set(keep)
        kept |= set(self.bases(kept & set(folders)).values())
        retired = []
        for version in sorted(set(folders) - kept, reverse=True):
            if self._has_manifest(version):
                self._store.delete(run_layout.weights_manifest(version))
                retired.append(version)
            for key in self._store.list_after(run_layout.weights_folder(version) + "/"):
                self._store.delete(key)
        return sorted(retired)

    def bases(self, versions: Iterable[int]) -> dict[int, int]:
        """Delta version -> its base, of those that are committed (immutable: read once each)."""
        versions = sorted(versions)
        for version in versions:
            if version not in self._bases and (manifest := self._committed(version)):
                self._bases[version] = manifest.base.version if manifest.base else None
        self._bases = {v: self._bases[v] for v in versions if v in self._bases}
        return {v: base for v, base in self._bases.items() if base is not None}

    def _commit(self, manifest: WeightManifest, tensors: list[Tensor]) -> WeightManifest:
        """Create the manifest; return the one that counts, which may be another publisher's."""
        key = run_layout.weights_manifest(manifest.version)
        if not self._store.create(key, to_marker(manifest)):
            return self.manifest(manifest.version)
        if self._deltas and manifest.base is None and not maps(self._store):
            copies = {(p.name, p.index): p.bytes().copy() for t in tensors for p in t.pieces}
            self._reader.hold(manifest, copies)
        return manifest

    def _changes(self, version: int, tensors: list[Tensor]) -> Changes | None:
        """What changed against the last full version; None if a full one is due or better."""
        if self._deltas is None:
            return None
        try:
            newest = self.latest()
            if newest is None:
                return None
            base = newest if newest.base is None else self.manifest(newest.base.version)
            replaced = newest.base is not None and newest.base.digest != base.digest
            if replaced or version - base.version >= self._deltas.full_every:
                return None
            return self._against(base, tensors, self._deltas)
        except (StorageError, KeyError):
            return None  # the base is gone or damaged: a full version puts that right

    def _against(
        self, base: WeightManifest, tensors: list[Tensor], policy: DeltaPolicy
    ) -> Changes | None:
        places: list[Place] = [(e.name, k) for e in base.tensors for k in range(len(pieces_of(e)))]
        return find_changes(base, self._reader.base_pieces(base, places), tensors, policy)

    def _remake(self, committed: WeightManifest, arrays: Mapping[str, np.ndarray]) -> None:
        """Write again what a machine crash damaged of a version, laid out as it was."""
        tensors = tensor_file.measure(arrays, cuts_of(committed))
        changes = None
        if committed.base is not None:
            try:
                base = self.manifest(committed.base.version)
                changes = self._against(base, tensors, DeltaPolicy(full_every=1, max_share=1.0))
            except (StorageError, KeyError):
                return  # cannot be put right without its base; the next version will be full
        only = {part.key for part in committed.parts}
        self._writer.write(committed.version, tensors, changes, only)

    def _committed(self, version: int) -> WeightManifest | None:
        found = self._store.read_with_token(run_layout.weights_manifest(version))
        if found is None:
            return None
        known = self._manifests.pop(version, None)
        if known is None or known[0] != found[0]:
            known = found[0], decode_manifest(self._store, version, found[0])
        self._manifests[version] = known
        while len(self._manifests) > _REMEMBERED:
            del self._manifests[next(iter(self._manifests))]
        return known[1]

    def _folders(self) -> list[int]:
        return [run_layout.version_of_folder(name) for name in self._store.list_folders("weights")]

    def _has_manifest(self, version: int) -> bool:
        key = run_layout.weights_manifest(version)
        return self._store.list_after(key, limit=1) == [key]

    def _name(self, version: int) -> str:
        return f"weights version {version} of {self._store.url}"
