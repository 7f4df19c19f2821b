"""Checkpoints of a run in a bucket: Orbax writes them on this machine, complete ones are copied.

The copies are the truth. A trainer starts from the newest one, on any machine; a checkpoint that
was never copied is forgotten. Copying goes on beside training.
"""

from __future__ import annotations

import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from infra.storage import run_layout
from infra.storage.folder_copy import (
    copied_folder,
    delete_folder,
    download_folder,
    upload_folder,
)
from infra.storage.local_store import LocalStore
from infra.storage.object_store import ObjectStore
from trainer.checkpoint import Checkpoints, Progress, checkpoint_folder
from trainer.state import TrainState


def open_checkpoints(store: ObjectStore, keep: int, scratch: Path) -> AnyCheckpoints:
    """The checkpoints of a run: in its own folder, or in ``scratch`` and copied to its store."""
    if isinstance(store, LocalStore):
        return Checkpoints(checkpoint_folder(store.url), keep)
    return CopiedCheckpoints(store, keep, scratch)


class CopiedCheckpoints:
    """Like ``Checkpoints``, for any store.

    Args:
        store: the run.
        keep: how many copies stay.
        scratch: a folder of this machine, of this run alone; needs room for ``keep + 1``.
    """

    def __init__(self, store: ObjectStore, keep: int, scratch: Path) -> None:
        self._store, self._keep, self._scratch = store, keep, scratch
        self._copied = self._complete()
        self._prepare()
        self._local = Checkpoints(str(scratch.absolute()), keep)
        self._pool = ThreadPoolExecutor(1, "checkpoint-copy")
        self._copying: Future[int | None] | None = None

    def save(self, state: TrainState, progress: Progress) -> None:
        """Begin to save; see ``Checkpoints.save``."""
        self._local.save(state, progress)

    def durable(self) -> int | None:
        """Version of the newest complete copy. Begins to copy what has become complete here.

        Raises:
            StorageError: the last copy failed.
        """
        if self._copying is None or self._copying.done():
            self._take_note()
            newest = self._local.durable()
            if newest is not None and newest not in self._copied:
                self._copying = self._pool.submit(self._copy, newest)
        return max(self._copied, default=None)

    def restore(self, like: TrainState) -> tuple[TrainState, Progress] | None:
        """Read the newest copy; None if there is none. See ``Checkpoints.restore``."""
        return self._local.restore(like)

    def wait(self) -> None:
        """Return when everything that was begun is copied."""
        self._local.wait()
        while self.durable() != self._local.durable() and self._copying is not None:
            self._take_note()

    def close(self) -> None:
        """Finish what was begun and release the folder."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()
            self._local.close()

    def _copy(self, version: int) -> int | None:
        try:
            upload_folder(self._store, _prefix(version), self._scratch / str(version))
        except FileNotFoundError:  # newer ones came so fast that Orbax has deleted it
            return None
        for old in sorted({*self._complete(), version})[: -self._keep]:
            delete_folder(self._store, _prefix(old))
        return version

    def _take_note(self) -> None:
        """Wait for the copy under way; raises what it ended with, once."""
        done, self._copying = self._copying, None
        version = done.result() if done else None
        if version is not None:
            self._copied.add(version)

    def _complete(self) -> set[int]:
        names = self._store.list_folders(run_layout.CHECKPOINTS)
        versions = {int(name) for name in names if name.isdigit()}
        return {v for v in versions if copied_folder(self._store, _prefix(v)) is not None}

    def _prepare(self) -> None:
        """Make the scratch folder hold the newest copy and nothing else."""
        newest = max(self._copied, default=None)
        if self._scratch.is_dir():
            for path in self._scratch.iterdir():
                if path.name != str(newest):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        if newest is not None:
            download_folder(self._store, _prefix(newest), self._scratch / str(newest))


AnyCheckpoints = Checkpoints | CopiedCheckpoints


def _prefix(version: int) -> str:
    return f"{run_layout.CHECKPOINTS}/{version}"
