"""Reads tensors of committed versions: stored pieces as they are, delta versions by rebuilding.

Every process verifies what it reads itself, once per version and block where files are mapped: what
another process on this host has verified is not known here, and the page cache it left makes the
second look cheap (538 MB in 0.07 s).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from infra.clock import Clock
from infra.contracts.errors import DamagedObject, StorageError
from infra.contracts.manifests import TensorDelta, TensorPiece, WeightManifest
from infra.shards.quarantine import quarantine
from infra.storage.object_store import ObjectStore
from infra.weights import delta, tensor_file
from infra.weights.boxes import Box, assemble, uses
from infra.weights.manifest_file import Place, pieces_of
from infra.weights.piece_reader import Blocks, Damage, covering, maps, read_blocks, whole

_REMEMBERED = 8
"""How many versions are remembered as verified; a worker looks at the newest one or two."""


class VersionReader:
    """Holds what it verified and the pieces of the last base. Not for several threads at once.

    Args:
        store: the run.
        clock: times verification.
        manifest_of: reads a version's manifest; ``KeyError`` if it is not committed any more.
    """

    def __init__(
        self, store: ObjectStore, clock: Clock, manifest_of: Callable[[int], WeightManifest]
    ) -> None:
        self._store, self._clock, self._manifest_of = store, clock, manifest_of
        self._verified: dict[tuple[int, str], set[tuple[str, int, int]]] = {}
        self._base: tuple[str, dict[Place, np.ndarray]] | None = None
        self.verify_secs = 0.0

    def read(self, manifest: WeightManifest, boxes: Sequence[Box]) -> dict[str, np.ndarray]:
        """The boxes by tensor name, verified.

        Raises:
            KeyError: the version or its base was retired meanwhile.
            DamagedObject: something is not what the manifest says; nothing is returned.
        """
        self.verify_secs = 0.0
        found = [(box, uses(box)) for box in boxes]
        each = [use for _, some in found for use in some]
        stored = [use for use in each if use.piece.part >= 0]
        blocks = [covering(use.place, use.piece, use.start, use.end) for use in stored]
        rows = {}
        for use, block, data in zip(stored, blocks, self._blocks(manifest, blocks), strict=True):
            rows[use.place] = data[use.start - block.start : use.end - block.start]
        if self._base and not manifest.base and self._base[0] != manifest.digest:
            sizes = {use.place: use.piece.size_bytes for use in stored}
            self.hold(manifest, {p: rows[p] for p, size in sizes.items() if len(rows[p]) == size})
        changed = {use.place: use for use in each if use.piece.part < 0}
        for place, data in self._rebuilt(manifest, changed).items():
            rows[place] = data[changed[place].start : changed[place].end]
        return {box.entry.name: assemble(box, some, rows) for box, some in found}

    def pieces(self, manifest: WeightManifest, places: Iterable[Place]) -> dict[Place, np.ndarray]:
        """Whole pieces as verified bytes; errors as for ``read``."""
        table = _table(manifest)
        stored = {place: table[place] for place in places}
        rebuilt = self._rebuilt(manifest, [p for p, piece in stored.items() if piece.part < 0])
        stored = {place: piece for place, piece in stored.items() if piece.part >= 0}
        blocks = [whole(place, piece) for place, piece in stored.items()]
        return dict(zip(stored, self._blocks(manifest, blocks), strict=True)) | rebuilt

    def base_pieces(
        self, manifest: WeightManifest, places: Iterable[Place]
    ) -> dict[Place, np.ndarray]:
        """Like ``pieces``, of a full version; they are held until another base comes."""
        places = list(places)
        held = self._base[1] if self._base and self._base[0] == manifest.digest else {}
        held |= self.pieces(manifest, [place for place in places if place not in held])
        self._base = (manifest.digest, held)
        return {place: held[place] for place in places}

    def hold(self, manifest: WeightManifest, pieces: dict[Place, np.ndarray]) -> None:
        """Keep these pieces of a full version as the base of deltas to come."""
        self._base = (manifest.digest, pieces)

    def forget(self, manifest: WeightManifest) -> None:
        """Verify this version again when it is read next, as if by a new process."""
        self._verified.pop((manifest.version, manifest.digest), None)
        self._base = None

    def check_headers(self, manifest: WeightManifest) -> None:
        """Raise ``DamagedObject`` if a part's header is not the one that its name is a hash of.

        Once per version where files are mapped, like the rest.
        """
        verified = self._verified.get((manifest.version, manifest.digest), set())
        if ("", -1, 0) in verified:
            return
        inside: dict[int, list[tuple[tuple, TensorPiece]]] = {}
        for entry in manifest.tensors:
            width = tensor_file.dtype_of(entry.dtype).itemsize
            for piece in pieces_of(entry):
                order = (piece.offset, piece.size_bytes > 0, -width, entry.name)
                inside.setdefault(piece.part, []).append((order, piece))
        for index, some in inside.items():
            if index < 0:
                continue
            part = manifest.parts[index]
            ordered = [piece for _, piece in sorted(some, key=lambda each: each[0])]
            header = TensorPiece(part=index, offset=0, size_bytes=ordered[0].offset, crc32c=0)
            try:
                data = read_blocks(self._store, manifest, [whole(("", 0), header)])[0]
            except Damage as e:
                raise self._failure(manifest, e) from e
            name = tensor_file.part_name(data.tobytes(), (piece.crc32c for piece in ordered))
            if not part.key.endswith(f"/{name}.safetensors"):
                raise self._failure(manifest, Damage(part.key, "its header is damaged"))
        verified.add(("", -1, 0))

    def _blocks(self, manifest: WeightManifest, wanted: Sequence[Blocks]) -> list[np.ndarray]:
        try:
            found = read_blocks(self._store, manifest, wanted)
        except Damage as e:
            raise self._failure(manifest, e) from e
        verified: set[tuple[str, int, int]] = set()
        if maps(self._store):
            verified = self._verified.setdefault((manifest.version, manifest.digest), verified)
        started = self._clock.now()
        for blocks, data in zip(wanted, found, strict=True):
            marks = {(*blocks.place, number) for number in range(blocks.first, blocks.last)}
            if marks <= verified:
                continue
            text = blocks.problem(data)
            if text:
                key = manifest.parts[blocks.piece.part].key
                damage = Damage(key, f"tensor {blocks.place[0]}: {text}")
                raise self._failure(manifest, damage)
            verified |= marks
        self.verify_secs += self._clock.now() - started
        while len(self._verified) > _REMEMBERED:
            del self._verified[next(iter(self._verified))]
        return found

    def _rebuilt(
        self, manifest: WeightManifest, places: Iterable[Place]
    ) -> dict[Place, np.ndarray]:
        """Whole pieces that this version takes from its base, changed where it has a delta."""
        places = list(places)
        if not places:
            return {}
        base = self._base_of(manifest)
        table, before = _table(manifest), _table(base)
        for place in places:
            if place not in before or before[place].size_bytes != table[place].size_bytes:
                raise self._broken(manifest, f"has no tensor {place[0]} like it")
        old = self.base_pieces(base, places)
        changes = {(change.name, change.piece): change for change in manifest.deltas}
        changed = [place for place in places if place in changes]
        stored = self._blocks(manifest, [_delta_blocks(changes[place]) for place in changed])
        new = dict(old)
        for place, data in zip(changed, stored, strict=True):
            new[place] = self._changed(manifest, changes[place], old[place], data)
        for place in places:
            crc = before[place].crc32c
            if place in changes:
                started = self._clock.now()
                crc = tensor_file.crc32c(new[place])
                self.verify_secs += self._clock.now() - started
            if crc != table[place].crc32c:
                text = f"{crc:08x}, not {table[place].crc32c:08x}"
                raise self._broken(manifest, f"gives tensor {place[0]} with crc32c {text}")
        return new

    def _changed(
        self, manifest: WeightManifest, change: TensorDelta, old: np.ndarray, data: np.ndarray
    ) -> np.ndarray:
        width = next(
            tensor_file.dtype_of(entry.dtype).itemsize
            for entry in manifest.tensors
            if entry.name == change.name
        )
        try:
            new = delta.rebuild(old.view(f"<u{width}"), change, data)
        except (ValueError, OSError) as e:
            text = f"tensor {change.name}: these bytes are no delta of it: {e}"
            damage = Damage(manifest.parts[change.part].key, text)
            raise self._failure(manifest, damage) from e
        new.flags.writeable = False
        return new

    def _base_of(self, manifest: WeightManifest) -> WeightManifest:
        named = manifest.base
        assert named is not None  # the manifest was checked when it was read
        try:
            base = self._manifest_of(named.version)
        except KeyError:
            self._manifest_of(manifest.version)  # retired meanwhile, together with its base
            raise KeyError(
                f"weights version {manifest.version} of {self._store.url} is a delta against "
                f"version {named.version}, which is not there; fetch a full version"
            ) from None
        if base.digest != named.digest or base.base is not None:
            raise self._broken(manifest, f"has digest {base.digest}, not {named.digest}")
        return base

    def _broken(self, manifest: WeightManifest, text: str) -> DamagedObject:
        base = manifest.base.version if manifest.base else None
        return DamagedObject(
            f"weights version {manifest.version} of {self._store.url}: its base, version {base}, "
            f"{text}; fetch a full version"
        )

    def _failure(self, manifest: WeightManifest, damage: Damage) -> StorageError:
        if damage.missing:
            self._manifest_of(manifest.version)  # KeyError: retired meanwhile, no damage
        text = f"weights version {manifest.version}: {damage.text}"
        return quarantine(self._store, damage.key, text)


def _table(manifest: WeightManifest) -> dict[Place, TensorPiece]:
    return {
        (entry.name, index): piece
        for entry in manifest.tensors
        for index, piece in enumerate(pieces_of(entry))
    }


def _delta_blocks(change: TensorDelta) -> Blocks:
    piece = TensorPiece(
        part=change.part,
        offset=change.offset,
        size_bytes=change.size_bytes,
        crc32c=change.crc32c,
    )
    return whole((change.name, -1 - change.piece), piece)
