from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load_file

from infra.contracts.errors import ConfigError, StorageError
from infra.storage.local_store import LocalStore
from infra.storage.memory_store import MemoryStore
from infra.weights.cast import cast_arrays, dequantised
from infra.weights.command import main
from infra.weights.delta import DeltaPolicy
from infra.weights.stored_weights import StoredWeights
from infra.weights.weight_store import TensorSlice

ROUNDING = 1 + 2.0**-15
"""What float32 division and rounding may add to half a step."""


def published(arrays, cast="int8"):
    store = MemoryStore()
    weights = StoredWeights(store, "r")
    manifest = weights.publish(0, cast_arrays(arrays, cast), cast=cast)
    return weights, manifest


@settings(max_examples=200, deadline=None)
@given(
    hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=2, max_dims=3, min_side=0, max_side=6),
        elements=st.floats(-(2.0**100), 2.0**100, width=32),
    )
)
def test_int8_is_within_half_a_step(x):
    cast = cast_arrays({"x": x}, "int8")
    q, s = cast["x"], cast["x.scale"]
    assert (q.dtype, s.dtype, s.shape) == (np.int8, np.float32, x.shape[:-1])
    error = np.abs(x.astype("f8") - q.astype("f8") * s.astype("f8")[..., None])
    assert (error <= s.astype("f8")[..., None] / 2 * ROUNDING).all()


def test_int8_through_the_store():
    rng = np.random.default_rng(0)
    arrays = {
        "embed": rng.standard_normal((700, 900), "f4").astype(ml_dtypes.bfloat16),
        "norm.scale": np.ones(3, "f4"),
        "norm": np.ones(3, "f4"),
        "ids": np.arange(4),
    }
    weights, manifest = published(arrays)
    assert manifest.cast == "int8"
    fetched = weights.fetch(0)
    assert fetched["embed"].dtype == np.int8
    back = dequantised(fetched, manifest)
    assert back.keys() == arrays.keys()
    scale = np.abs(arrays["embed"].astype("f4")).max(1, keepdims=True) / 127
    difference = np.abs(back["embed"] - arrays["embed"].astype("f4"))
    assert (difference <= scale / 2 * ROUNDING).all()
    rows = weights.fetch(
        0, [TensorSlice("embed", (5, 0), (7, 900)), TensorSlice("embed.scale", (5,), (7,))]
    )
    assert np.array_equal(dequantised(rows, manifest)["embed"], back["embed"][5:12])
    with pytest.raises(KeyError, match=r"fetch embed\.scale with it"):
        dequantised(weights.fetch(0, ["embed"]), manifest)


def test_what_needs_no_cast_is_not_copied():
    arrays = {"m": np.ones((2, 2), "f4"), "v": np.ones(2, "f4")}
    assert cast_arrays(arrays, "float32")["m"] is arrays["m"]
    narrow = cast_arrays(arrays, "bfloat16")
    assert narrow["m"].dtype == ml_dtypes.bfloat16 and narrow["v"] is arrays["v"]
    weights, manifest = published(arrays, "bfloat16")
    assert dequantised(weights.fetch(0), manifest)["m"].dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_diverged_model_is_not_quantised(bad):
    with pytest.raises(StorageError, match="tensor m holds NaN or infinity"):
        cast_arrays({"m": np.array([[1, bad]], "f4")}, "int8")


def test_bad_casts():
    with pytest.raises(ConfigError, match="choose one of float32, bfloat16, int8"):
        cast_arrays({}, "int4")
    with pytest.raises(StorageError, match=r"m.scale is there already"):
        cast_arrays({"m": np.ones((2, 2), "f4"), "m.scale": np.ones(2, "f4")}, "int8")


@pytest.mark.parametrize("form", ["int8", "delta", "cut"])
def test_every_form_is_exported_as_plain_floats(tmp_path, form):
    rng = np.random.default_rng(0)
    arrays = {"w": rng.standard_normal((8, 64), "f4"), "v": np.ones(4, "f4")}
    policy = DeltaPolicy(full_every=9)
    weights = StoredWeights(LocalStore(tmp_path / "run"), "r", deltas=policy)
    facts = {"model_config": {"hf": {"hidden_size": 4}}}
    if form == "int8":
        weights.publish(0, cast_arrays(arrays, "int8"), cast="int8", **facts)
    elif form == "cut":
        weights.publish(0, arrays, cuts={"w": (1, 2)}, **facts)
    else:
        weights.publish(0, {"w": arrays["w"] * 2, "v": arrays["v"]}, **facts)
        before = arrays["w"].copy()
        before[0, 0] = 9
        weights = StoredWeights(LocalStore(tmp_path / "two"), "r", deltas=policy)
        weights.publish(0, arrays | {"w": before}, **facts)
        assert weights.publish(1, arrays, **facts).base.version == 0
    run = tmp_path / ("two" if form == "delta" else "run")
    assert main([str(run), "export", str(tmp_path / "out")]) == 0
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert loaded.keys() == arrays.keys() and loaded["w"].dtype == np.float32
    assert np.allclose(loaded["w"], arrays["w"], atol=0.02 if form == "int8" else 0)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "float32"
