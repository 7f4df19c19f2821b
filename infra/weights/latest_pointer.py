"""``weights/LATEST``, the one pointer of a run; only grows, and fences off replaced publishers.

``{"digest":"1f..","epoch":2,"incarnation":"a3..","version":12,"seal":...}``: the epoch counts the
trainers a run has had (``trainer.incarnation``). Whoever finds a higher epoch there than its own
has been replaced and stops. Epoch 0 is no exclusive publisher (a tool, a test): it is not fenced
and leaves the epoch as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from infra.contracts.errors import Fenced
from infra.contracts.json_codec import from_json, to_marker
from infra.storage import run_layout
from infra.storage.object_store import ObjectStore, Token


@dataclass(frozen=True, kw_only=True)
class LatestPointer:
    """Which version is the newest, the digest its manifest must have, and whose turn it is."""

    version: int
    digest: str
    incarnation: str = ""
    epoch: int = 0


def read_latest(store: ObjectStore) -> LatestPointer | None:
    """Return what LATEST says, or None before the first publication."""
    return _read(store)[0]


def check_fence(store: ObjectStore, incarnation: str, epoch: int) -> LatestPointer | None:
    """Return what LATEST says. Raises ``Fenced`` if a newer incarnation has moved it."""
    pointer = _read(store)[0]
    _refuse_replaced(store, pointer, incarnation, epoch)
    return pointer


def advance_latest(store: ObjectStore, wanted: LatestPointer) -> None:
    """Move LATEST up to ``wanted``, or leave it if it is there or beyond; make it ours.

    Raises:
        Fenced: a newer incarnation has moved it.
    """
    while True:
        pointer, token = _read(store)
        _refuse_replaced(store, pointer, wanted.incarnation, wanted.epoch)
        target = wanted
        if pointer is not None:
            newest = pointer if pointer.version >= wanted.version else wanted
            owner = wanted if wanted.epoch else pointer
            target = replace(newest, incarnation=owner.incarnation, epoch=owner.epoch)
        if target == pointer or store.compare_and_swap(
            run_layout.WEIGHTS_LATEST, to_marker(target), token
        ):
            return


def claim_latest(store: ObjectStore, incarnation: str, epoch: int) -> None:
    """Make LATEST ours without moving it, so that whoever had it stops at its next publication."""
    pointer = check_fence(store, incarnation, epoch)
    if pointer is not None:
        advance_latest(store, replace(pointer, incarnation=incarnation, epoch=epoch))


def _read(store: ObjectStore) -> tuple[LatestPointer | None, Token | None]:
    found = store.read_with_token(run_layout.WEIGHTS_LATEST)
    if found is None:
        return None, None
    name = f"{store.url.rstrip('/')}/{run_layout.WEIGHTS_LATEST}"
    return from_json(LatestPointer, found[0], name=name), found[1]


def _refuse_replaced(
    store: ObjectStore, pointer: LatestPointer | None, incarnation: str, epoch: int
) -> None:
    if pointer is None or not epoch or (pointer.epoch, pointer.incarnation) == (epoch, incarnation):
        return
    if pointer.epoch < epoch:
        return
    raise Fenced(
        f"{store.url.rstrip('/')}/{run_layout.WEIGHTS_LATEST} belongs to trainer "
        f"{pointer.incarnation} (number {pointer.epoch}), not to trainer {incarnation} "
        f"(number {epoch}); this one stops, let the other one go on"
    )
