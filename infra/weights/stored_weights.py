"""Weight versions in an object store: safetensors parts, then the manifest, then LATEST.

Publishing may die between any two writes and be repeated: parts are named by their content, the
manifest is created once, and LATEST only grows. Readers start from LATEST or a manifest, so what is
half-published is invisible.

Parts are not forced to the local disk: 538 MB took 1.4 to 2.7 s of an update of 5 s. After a crash
of the machine the newest versions may therefore be damaged. Readers see that by checksum, and the
trainer, whose checkpoint, ledger and shards are durable, makes LATEST again when it restarts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from infra.clock import Clock, SystemClock
from infra.contracts.errors import DamagedObject, StorageError
from infra.contracts.ids import content_id
from infra.contracts.json_codec import to_json
from infra.contracts.manifests import TensorEntry, WeightManifest, WeightPart
from infra.shards.quarantine import quarantine
from infra.storage import run_layout
from infra.storage.object_store import ObjectStore
from infra.weights import tensor_file
from infra.weights.latest_pointer import LatestPointer, advance_latest, decode, read_latest
from infra.weights.tensor_file import Tensor

PART_BYTES = 2 << 30
_REMEMBERED = 8
"""How many versions are remembered as verified; a worker looks at the newest one or two."""


class StoredWeights:
    """Implements ``WeightStore``. Not for several threads at once.

    Args:
        store: where the run lies.
        run: its name, written into manifests.
        clock: stamps manifests and times verification.
        part_bytes: size above which a further part begins.
    """

    def __init__(
        self,
        store: ObjectStore,
        run: str,
        *,
        clock: Clock | None = None,
        part_bytes: int = PART_BYTES,
    ) -> None:
        self._store = store
        self._run = run
        self._clock = clock or SystemClock()
        self._part_bytes = part_bytes
        self._newest: WeightManifest | None = None
        self._verified: dict[tuple[int, str], set[str]] = {}
        self.verify_secs = 0.0
        """What the last ``fetch`` spent on checksums; 0 if all had been verified before."""

    def publish(
        self,
        version: int,
        arrays: Mapping[str, np.ndarray],
        *,
        parent: str = "",
        optimizer_step: int = 0,
        model_config: Mapping[str, object] | None = None,
        tokenizer_digest: str = "",
        incarnation: str = "",
    ) -> WeightManifest:
        """Commit one version; see ``WeightStore.publish``. The arrays must not change meanwhile."""
        if version < 0 or not arrays:
            raise ValueError(f"version {version} with {len(arrays)} arrays cannot be published")
        tensors = tensor_file.measure(arrays)
        digest = tensor_file.weights_digest(tensor.identity for tensor in tensors)
        committed = self._committed(version)
        if committed is not None and committed.digest == digest:
            self._write_parts(version, tensors)  # remakes a part that a machine crash damaged
        if committed is None:
            newest = read_latest(self._store)
            if newest is not None and newest.version >= version:
                raise StorageError(
                    f"{self._name(version)}: LATEST is already {newest.version} and versions only "
                    f"grow; publish {newest.version + 1} or later"
                )
            parts, entries = self._write_parts(version, tensors)
            manifest = WeightManifest(
                run=self._run,
                version=version,
                digest=digest,
                parts=parts,
                tensors=entries,
                parent=parent,
                optimizer_step=optimizer_step,
                model_config=dict(model_config or {}),
                tokenizer_digest=tokenizer_digest,
                incarnation=incarnation,
                created_at=self._clock.now(),
            )
            key = run_layout.weights_manifest(version)
            created = self._store.create(key, to_json(manifest))
            committed = manifest if created else self.manifest(version)
        if committed.digest != digest:
            raise StorageError(
                f"{self._name(version)} exists with other weights ({committed.digest}, not "
                f"{digest}); published versions never change, use a new version"
            )
        pointer = LatestPointer(version=committed.version, digest=committed.digest)
        advance_latest(self._store, pointer)
        return committed

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

    def fetch(self, version: int, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
        """Read tensors as read-only views; each is verified once per object of this class.

        Raises:
            KeyError: the version is not committed (or was retired), or has no such tensor.
            DamagedObject: a part or tensor is not what the manifest says; nothing is returned.
        """
        manifest = self.manifest(version)
        entries = {entry.name: entry for entry in manifest.tensors}
        wanted = list(entries if names is None else names)
        unknown = [name for name in wanted if name not in entries]
        if unknown:
            raise KeyError(f"{self._name(version)} has no tensor '{unknown[0]}'")
        parts = self._open_parts(manifest, {entries[name].part for name in wanted})
        started = self._clock.now()
        self._verify(manifest, [entries[name] for name in wanted], parts)
        self.verify_secs = self._clock.now() - started
        return {
            name: tensor_file.array_at(entries[name], parts[entries[name].part]) for name in wanted
        }

    def versions(self) -> list[int]:
        """Committed versions, ascending."""
        return [version for version in self._folders() if self._has_manifest(version)]

    def retire(self, keep: Iterable[int]) -> list[int]:
        """Delete versions below LATEST that are not in ``keep``, manifest first, then parts.

        Folders that a dead publisher or an interrupted ``retire`` left are cleared too.
        """
        pointer = read_latest(self._store)
        if pointer is None:
            return []
        kept, retired = set(keep), []
        for version in self._folders():
            if version >= pointer.version or version in kept:
                continue
            if self._has_manifest(version):
                self._store.delete(run_layout.weights_manifest(version))
                retired.append(version)
            for key in self._store.list_after(run_layout.weights_folder(version) + "/"):
                self._store.delete(key)
        return retired

    def _write_parts(
        self, version: int, tensors: list[Tensor]
    ) -> tuple[tuple[WeightPart, ...], tuple[TensorEntry, ...]]:
        parts, entries = [], []
        for index, group in enumerate(tensor_file.split(tensors, self._part_bytes)):
            header, placed = tensor_file.lay_out(group, index)
            name = content_id("part", header, *(tensor.crc32c for tensor in group))
            part = WeightPart(
                key=run_layout.weights_part(version, name),
                size_bytes=len(header) + sum(entry.size_bytes for entry in placed),
            )
            if not self._store.create(part.key, tensor_file.contents(header, group), durable=False):
                self._repair(part, placed, tensor_file.contents(header, group))
            parts.append(part)
            entries += placed
        return tuple(parts), tuple(sorted(entries, key=lambda entry: entry.name))

    def _repair(
        self, part: WeightPart, entries: list[TensorEntry], contents: Iterable[bytes | memoryview]
    ) -> None:
        """A part that a dead publisher left is taken over only if it is sound (no marker yet)."""
        data = np.frombuffer(self._store.view(part.key), np.uint8)
        if len(data) != part.size_bytes or any(tensor_file.problem(e, data) for e in entries):
            self._store.delete(part.key)
            self._store.create(part.key, contents, durable=False)

    def _open_parts(self, manifest: WeightManifest, indices: set[int]) -> dict[int, np.ndarray]:
        parts = {}
        for index in sorted(indices):
            part = manifest.parts[index]
            try:
                data = np.frombuffer(self._store.view(part.key), np.uint8)
            except KeyError:
                self.manifest(manifest.version)  # retired meanwhile: not damage
                raise self._damaged(manifest, part.key, "the part is missing") from None
            if len(data) != part.size_bytes:
                text = f"the part has {len(data)} bytes, not {part.size_bytes}"
                raise self._damaged(manifest, part.key, text)
            parts[index] = data
        return parts

    def _verify(
        self, manifest: WeightManifest, entries: list[TensorEntry], parts: dict[int, np.ndarray]
    ) -> None:
        verified = self._verified.setdefault((manifest.version, manifest.digest), set())
        for entry in entries:
            if entry.name in verified:
                continue
            text = tensor_file.problem(entry, parts[entry.part])
            if text:
                key = manifest.parts[entry.part].key
                raise self._damaged(manifest, key, f"tensor {entry.name}: {text}")
            verified.add(entry.name)
        while len(self._verified) > _REMEMBERED:
            del self._verified[next(iter(self._verified))]

    def _damaged(self, manifest: WeightManifest, key: str, text: str) -> DamagedObject:
        return quarantine(self._store, key, f"weights version {manifest.version}: {text}")

    def _committed(self, version: int) -> WeightManifest | None:
        key = run_layout.weights_manifest(version)
        found = self._store.read_with_token(key)
        if found is None:
            return None
        manifest = decode(WeightManifest, self._store, key, found[0])
        digest = tensor_file.weights_digest(
            (entry.name, entry.shape, entry.dtype, entry.crc32c) for entry in manifest.tensors
        )
        sound = all(0 <= entry.part < len(manifest.parts) for entry in manifest.tensors)
        if not sound or (manifest.version, manifest.digest) != (version, digest):
            raise DamagedObject(
                f"{self._store.url}/{key}: says version {manifest.version}, digest "
                f"{manifest.digest}; its tensors give {digest}"
            )
        return manifest

    def _folders(self) -> list[int]:
        return [run_layout.version_of_folder(name) for name in self._store.list_folders("weights")]

    def _has_manifest(self, version: int) -> bool:
        key = run_layout.weights_manifest(version)
        return self._store.list_after(key, limit=1) == [key]

    def _name(self, version: int) -> str:
        return f"weights version {version} of {self._store.url}"
