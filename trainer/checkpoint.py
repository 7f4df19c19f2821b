"""Checkpoints of everything that is needed to go on, as one Orbax step folder.

``checkpoints/<version>/{state, progress}``: the state pytree (parameters, optimizer, rng, step)
and the progress (feed watermark, counters). A folder has its final name only when it is complete.
Saving copies the state and writes in the background; the newest complete one counts, and old ones
are deleted only after that. Orbax does not check the bytes of large arrays, so the progress holds a
checksum of everything.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import google_crc32c
import jax
import numpy as np
import orbax.checkpoint as ocp

from infra.contracts.errors import StorageError
from infra.storage import run_layout
from trainer.state import TrainState

_CHECKSUM = "crc32c"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a run has done so far, besides what the state pytree holds."""

    version: int = 0
    """Feed watermark: every ledger step up to here is in the state, none beyond."""
    tokens: int = 0
    """Trainable tokens learned from."""
    groups: int = 0
    diverged: bool = False
    """A replay gave other weights than those published; the next version's parent says so."""


class Checkpoints:
    """The checkpoints of one run. Close it before the process ends.

    Args:
        folder: where they lie; a local folder or a URL that Orbax knows.
        keep: how many complete ones stay.
    """

    def __init__(self, folder: str, keep: int) -> None:
        # Orbax tells its life story at INFO and warns of every default; neither helps a user.
        logging.getLogger("absl").setLevel(logging.ERROR)
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        self._folder = folder
        self._manager = ocp.CheckpointManager(folder, options=options)

    def save(self, state: TrainState, progress: Progress) -> None:
        """Begin to save ``progress.version``; a version that is there already stays as it is."""
        if progress.version in self._manager.all_steps():
            return
        said = asdict(progress)
        said[_CHECKSUM] = _checksum(state, said)
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(_fields(state)), progress=ocp.args.JsonSave(said)
        )
        with self._naming(progress.version):
            self._manager.save(progress.version, args=args, force=True)

    def latest(self) -> int | None:
        """Version of the newest complete checkpoint, durable by now; None if there is none."""
        self._manager.wait_until_finished()
        return self._manager.latest_step()

    def durable(self) -> int | None:
        """Like ``latest``, but without waiting for one that is being written."""
        steps = self._manager.all_steps()
        if self._manager.is_saving_in_progress():
            steps = steps[:-1]
        return max(steps, default=None)

    def restore(self, like: TrainState) -> tuple[TrainState, Progress] | None:
        """Read the newest checkpoint; None if there is none.

        Args:
            like: shapes and dtypes (``jax.eval_shape`` of a new state).
        """
        version = self.latest()
        if version is None:
            return None
        args = ocp.args.Composite(
            state=ocp.args.StandardRestore(_fields(like)), progress=ocp.args.JsonRestore()
        )
        with self._naming(version):
            found = self._manager.restore(version, args=args)
            saved = TrainState(**found.state)
            checksum = found.progress.pop(_CHECKSUM, None)  # older checkpoints have none
            if checksum not in (None, _checksum(saved, found.progress)):
                raise ValueError("its content does not match its checksum")
            progress = Progress(**found.progress)
        # Fresh buffers: what Orbax hands out may alias memory of its own, and the step donates.
        state = jax.tree.map(lambda leaf: leaf.copy(), saved)
        return state, progress

    def wait(self) -> None:
        """Return when everything that was begun is durable."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Finish what was begun and release the folder."""
        self._manager.close()

    def _naming(self, version: int) -> _Naming:
        return _Naming(f"{self._folder}/{version}")


class _Naming:
    """Turns whatever Orbax raises into one line that names the checkpoint."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):  # a flipped bit raises nearly anything
            raise StorageError(
                f"checkpoint {self._name}: {error}; delete that folder to go on from the one before"
            ) from error


def _fields(state: TrainState) -> dict[str, Any]:
    """What is there, by name: a checkpoint without a critic is one from before there were any."""
    named = {field.name: getattr(state, field.name) for field in fields(state)}
    return {name: value for name, value in named.items() if value is not None}


def _checksum(state: TrainState, progress: Mapping[str, object]) -> int:
    """CRC-32C of everything, in place: 1.6 GB of parameters and moments take about 0.2 s."""
    crc = google_crc32c.value(json.dumps(progress, sort_keys=True).encode())
    for leaf in jax.tree.leaves(state):
        data = np.ascontiguousarray(np.asarray(leaf)).reshape(-1).view(np.uint8)
        crc = google_crc32c.extend(crc, data)
    return crc


def checkpoint_folder(run_url: str) -> str:
    """Where a run's checkpoints lie (Orbax wants absolute paths)."""
    root = run_url if "://" in run_url else str(Path(run_url).absolute())
    return f"{root}/{run_layout.CHECKPOINTS}"
