"""Following versions in a real store, onto the counting engine."""

import numpy as np
import pytest

from infra.clock import ManualClock
from infra.contracts.errors import ConfigError
from infra.storage.memory_store import MemoryStore
from infra.weights.stored_weights import StoredWeights
from trainer.inference_worker.weight_follower import WeightFollower


class Bench:
    def __init__(self):
        self.weights = StoredWeights(MemoryStore(), "test", clock=ManualClock())
        self.offers = []
        self.follower = WeightFollower(
            self.weights,
            lambda arrays: {name: array.tolist() for name, array in arrays.items()},
            lambda *offer: self.offers.append(offer),
            "tokenizer",
        )

    def publish(self, version, tokenizer="tokenizer"):
        arrays = {"w": np.full(2, version, np.float32)}
        return self.weights.publish(version, arrays, tokenizer_digest=tokenizer)


def test_the_newest_is_taken_once():
    bench = Bench()
    assert not bench.follower.poll()
    bench.publish(0)
    newest = bench.publish(1)
    assert bench.follower.poll() and not bench.follower.poll()
    assert bench.offers == [(1, newest.digest, {"w": [1.0, 1.0]})]


def test_a_pinned_version_is_served_and_must_exist():
    bench = Bench()
    first = bench.publish(0)
    bench.publish(1)
    bench.follower.pin(0)
    assert bench.offers == [(0, first.digest, {"w": [0.0, 0.0]})]
    with pytest.raises(ConfigError, match=r"no version 9; committed: \[0, 1\]"):
        bench.follower.pin(9)


def test_weights_of_another_tokenizer_are_refused():
    bench = Bench()
    bench.publish(0, tokenizer="other")
    with pytest.raises(ConfigError, match="made with tokenizer other"):
        bench.follower.poll()
