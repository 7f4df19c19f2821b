"""One replica over several devices, simulated: the same tokens and log-probs as on one."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from infra.contracts.errors import ConfigError
from trainer.inference_worker.config import InferenceConfig
from trainer.inference_worker.engine.decoder_engine import DecoderEngine
from trainer.inference_worker.engine.engine_api import SlotSampling
from trainer.inference_worker.engine.placement import Placement
from trainer.model.config import ModelConfig
from trainer.model.params_io import to_named
from trainer.model.transformer import init_params

HERE = "tests.trainer.inference_worker.test_mesh"
CONFIG = ModelConfig(layers=2, dim=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=21)


def compare():
    """Decode with one device and with two; runs where two are simulated."""
    arrays = to_named(init_params(CONFIG, jax.random.key(0)))
    found = []
    for tensor in (1, 2):
        settings = InferenceConfig(slots=3, max_len=80, tensor=tensor)
        engine = DecoderEngine(CONFIG, settings)
        params = engine.load_params({name: 3 * array for name, array in arrays.items()})
        engine.update_params(params, 0)
        prefixes = engine.prefill_batch([np.arange(n, dtype=np.int32) for n in (3, 17)])
        samplings = [SlotSampling(seed=s, top_k=5 * (s % 2)) for s in range(3)]
        state = engine.init_decode_state()
        state = engine.bulk_insert([prefixes[i] for i in (0, 1, 1)], state, range(3), samplings)
        steps = []
        for _ in range(5):
            state, result = engine.generate(state)
            steps.append(result.convert_to_numpy().data)
        found.append(np.stack(steps))
        for leaf, axis in (
            (params["layers"][0]["q"], 0),
            (params["layers"][1]["down"], 1),
            (state.cache.keys[1][1], 1),
            (state.cache.values[0][0], 1),
        ):
            held = leaf.addressable_shards[0].data.shape
            assert held[axis] * tensor == leaf.shape[axis], (held, leaf.shape)
        assert engine._generate._cache_size() == 1
    np.testing.assert_array_equal(found[0][:, 0], found[1][:, 0])
    np.testing.assert_allclose(found[0], found[1], atol=1e-4)
    narrow = Placement(CONFIG, InferenceConfig(tensor=2, dtype="int8")).params(arrays)
    q = narrow["layers"][0]["q"]
    assert q.values.addressable_shards[0].data.shape == (16, 32)
    assert q.scale.addressable_shards[0].data.shape == (16,)
    odd = ModelConfig(layers=1, dim=8, heads=3, kv_heads=3, head_dim=8, ffn=48, vocab=21)
    with pytest.raises(ConfigError, match="tensor = 2 does not divide the model's kv_heads = 3"):
        Placement(odd, InferenceConfig(tensor=2))


def test_two_devices_decode_what_one_decodes():
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    subprocess.run(
        [sys.executable, "-c", f"from {HERE} import compare; compare()"],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parents[3],
        check=True,
        timeout=240,
    )


def test_more_devices_than_there_are_is_refused():
    there = len(jax.devices())
    with pytest.raises(ConfigError, match=rf"tensor = {there + 1}, but there are {there} devices"):
        Placement(CONFIG, InferenceConfig(tensor=there + 1))
