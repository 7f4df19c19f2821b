"""Where the engine's arrays lie and in which precision: one device, or a mesh that shards a model.

On a mesh every device holds some heads (with their part of the cache), some of the MLP's hidden
units and some of the vocabulary: Megatron's split, as in ``partition_specs``. The compiler inserts
the sums over devices.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from infra.contracts.errors import ConfigError
from infra.weights.cast import SCALE, cast_arrays
from trainer.inference_worker.config import InferenceConfig
from trainer.model.config import ModelConfig
from trainer.model.kv_cache import Cache, PackedCache
from trainer.model.params_io import from_named
from trainer.model.transformer import Params, Quantised, partition_specs

TOP = ("embed", "norm", "head")
"""Never cast: the head is float32 on both sides."""


class Placement:
    """Puts parameters onto the devices, and keeps what is computed in place."""

    def __init__(self, config: ModelConfig, settings: InferenceConfig) -> None:
        """Raises ``ConfigError`` where the model cannot be split into ``settings.tensor`` parts."""
        self._config, self._dtype = config, settings.dtype
        self._mesh = _mesh(config, settings.tensor) if settings.tensor > 1 else None
        specs = partition_specs(config)
        self._specs = specs["layers"][0] | {key: specs[key] for key in TOP if key in specs}

    def params(self, arrays: dict[str, np.ndarray]) -> Params:
        """Named arrays on the devices, the layers' matrices in the settings' dtype."""
        return from_named(self._config, arrays, place=self._place)

    def _place(self, key: str, array: np.ndarray) -> jax.Array | Quantised:
        spec = self._specs[key]
        # Always a copy: ``device_put`` would keep the caller's aligned memory (a mapped file, say).
        if key in TOP or array.ndim < 2 or self._dtype == "float32":
            return self._put(np.array(array, np.float32), spec)
        if self._dtype == "bfloat16":
            return self._put(np.array(array, ml_dtypes.bfloat16), spec)
        cast = cast_arrays({key: np.asarray(array, np.float32)}, "int8")
        scale = self._put(cast[key + SCALE], PartitionSpec(*spec[:1]))
        return Quantised(self._put(cast[key], spec), scale)

    def _put(self, array: np.ndarray, spec: PartitionSpec) -> jax.Array:
        if self._mesh is None:
            return jax.device_put(array)
        if array.ndim == 2 and array.shape[0] % self._mesh.size and spec[0] == "tensor":
            spec = PartitionSpec()  # a vocabulary that does not divide lies whole everywhere
        return jax.device_put(array, NamedSharding(self._mesh, spec))

    def kept(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """``work`` whose caches come out as they went in; everything else lies on every device."""
        if self._mesh is None:
            return work

        @wraps(work)
        def placed(*args: Any) -> Any:
            return jax.lax.with_sharding_constraint(found := work(*args), self._shardings(found))

        return placed

    def put(self, tree: Any) -> Any:
        """The same for a value that is there."""
        return tree if self._mesh is None else jax.device_put(tree, self._shardings(tree))

    def _shardings(self, tree: Any) -> Any:
        def one(node: Any) -> Any:
            heads = {Cache: (None, "tensor"), PackedCache: ("tensor",)}.get(type(node), ())
            sharding = NamedSharding(self._mesh, PartitionSpec(*heads))
            return jax.tree.map(lambda _: sharding, node)

        return jax.tree.map(one, tree, is_leaf=lambda node: isinstance(node, Cache | PackedCache))


def _mesh(config: ModelConfig, tensor: int) -> Mesh:
    devices = jax.devices()
    if tensor > len(devices):
        raise ConfigError(
            f"[inference] tensor = {tensor}, but there are {len(devices)} devices; "
            f"at most {len(devices)}"
        )
    for name in ("kv_heads", "ffn"):
        if getattr(config, name) % tensor:
            raise ConfigError(
                f"[inference] tensor = {tensor} does not divide the model's {name} = "
                f"{getattr(config, name)}; choose a divisor of it"
            )
    grid = np.array(devices[:tensor]).reshape(1, tensor)
    return Mesh(grid, ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
