"""Follows the run's weights: LATEST -> tensors, checked -> device, beside the old -> scheduler."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import jax
import numpy as np

from infra.contracts.errors import ConfigError
from infra.contracts.manifests import WeightManifest
from infra.weights.weight_store import WeightStore
from trainer.inference_worker.engine_api import Params


class Wake(Protocol):
    """Something that ends a wait early, such as ``infra.hints.HintListener``."""

    def wait(self, timeout_secs: float) -> object:
        """Return at a hint, at the latest after ``timeout_secs``."""


class WeightFollower:
    """One thread's work; whoever needs the newest version soon sends the wake-up hint."""

    def __init__(
        self,
        weights: WeightStore,
        load: Callable[[dict[str, np.ndarray]], Params],
        offer: Callable[[int, str, Params], None],
        tokenizer_digest: str,
    ) -> None:
        """``load`` is the engine's ``load_params``, ``offer`` the scheduler's ``offer_weights``."""
        self._weights = weights
        self._load = load
        self._offer = offer
        self._tokenizer_digest = tokenizer_digest
        self.version = -1
        """The newest version handed over."""

    def poll(self) -> bool:
        """Load and hand over the newest version if there is a newer one.

        Raises:
            ConfigError: it was made with another tokenizer.
            DamagedObject: its bytes are not what its manifest says.
        """
        manifest = self._weights.latest()
        if manifest is None or manifest.version <= self.version:
            return False
        try:
            self._take(manifest)
        except KeyError:  # retired between the look and the read: a newer one is there
            return False
        return True

    def pin(self, version: int) -> None:
        """Load and hand over exactly this version. Raises ``ConfigError`` if there is none."""
        try:
            self._take(self._weights.manifest(version))
        except KeyError as e:
            known = self._weights.versions()
            raise ConfigError(f"there is no version {version}; committed: {known}") from e

    def _take(self, manifest: WeightManifest) -> None:
        if manifest.tokenizer_digest not in ("", self._tokenizer_digest):
            raise ConfigError(
                f"version {manifest.version} was made with tokenizer {manifest.tokenizer_digest}, "
                f"this worker has {self._tokenizer_digest}; give both the same [model]"
            )
        # Wait for the copy here, so that the engine's thread never does.
        params = jax.block_until_ready(self._load(self._weights.fetch(manifest.version)))
        self._offer(manifest.version, manifest.digest, params)
        self.version = manifest.version

    def run(self, wake: Wake, stopped: threading.Event, poll_secs: float) -> None:
        """Poll at every hint and every ``poll_secs`` until ``stopped``."""
        while not stopped.is_set():
            if not self.poll():
                wake.wait(poll_secs)
