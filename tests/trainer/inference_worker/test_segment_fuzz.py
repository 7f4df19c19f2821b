"""Cut, aborted, paused and continued at random, on the real engine: what one plain run draws."""

import dataclasses
import random

import numpy as np
import pytest

from benchmarks.worker_load import WEIGHTS, Bench, Load, measure
from infra.contracts.errors import InferenceError
from infra.inference.segments import Segments

LOAD = Load(secs=3.0, callers=24, slots=4, max_queue=12, swap_secs=0.3, pause_secs=0.7)
CLOSEST = 2e-5
"""Log-probs after a prefill of what was drawn token by token before; the tokens are the same."""


@pytest.fixture(scope="module")
def bench():
    return Bench(LOAD)


@pytest.fixture(scope="module")
def catalogue(bench):
    return bench.catalogue()


class Request:
    """One of the catalogue, asked for until it is whole."""

    def __init__(self, name, index, catalogue, segment_tokens):
        request = dataclasses.replace(catalogue.requests[index], request_id=name)
        self.name, self.index = name, index
        self.segments, self.future = Segments(request, segment_tokens), None

    def go_on(self, scheduler):
        """Ask for the next segment if the last one has come; whether it is whole."""
        if self.future is not None and self.future.done():
            try:
                self.segments.add(self.future.result())
            except InferenceError as e:
                assert e.retryable
            self.future = None
        if self.segments.done:
            return True
        if self.future is None and not scheduler.paused:
            self.future = scheduler.submit(self.segments.next_request())
        return False


def disturb(scheduler, drawn, requests):
    """Something that a worker's life brings."""
    what = drawn.random()
    if what < 0.1:
        scheduler.pause(drawn.choice(["in_place", "finish", "abort"]))
    elif what < 0.4:
        scheduler.resume()
    elif what < 0.5:
        scheduler.abort(drawn.choice(requests).name)
    elif what < 0.53:
        scheduler.abort()
    elif what < 0.56:
        scheduler.cut_segments()


def check(reply, known):
    for sample, whole in zip(reply.samples, known.samples, strict=True):
        assert sample.response_ids.tolist() == whole.response_ids.tolist()
        assert (sample.response_text, sample.finish_reason) == (
            whole.response_text,
            whole.finish_reason,
        )
        for column in ("behaviour_logprobs", "raw_logprobs"):
            gap = np.abs(getattr(sample, column) - getattr(whole, column)).max()
            assert gap <= CLOSEST


@pytest.mark.parametrize("seed", range(6))
def test_interrupted_at_random_it_draws_what_the_plain_loop_draws(bench, catalogue, seed):
    drawn, scheduler = random.Random(seed), bench.scheduler
    requests = [
        Request(f"fuzz-{seed}-{i}", i, catalogue, drawn.choice((1, 2, 3, 7, 2**30)))
        for i in drawn.sample(range(len(catalogue.requests)), 12)
    ]
    while not all([request.go_on(scheduler) for request in requests]):
        disturb(scheduler, drawn, requests)
        scheduler.step()
    scheduler.resume()
    last = catalogue.answers[WEIGHTS - 1]
    for request in requests:
        check(request.segments.reply(), last[request.index])
    assert scheduler.load() == (0, 0)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_recomputed_keys_are_those_of_the_new_weights(bench, catalogue, kv):
    """In flight from set 0 to set 1: the later tokens are those of set 1 alone after the same
    earlier ones, if keys and values are made again; else they are of both."""
    scheduler = bench.scheduler
    settings = scheduler._settings
    scheduler._settings = dataclasses.replace(settings, swap="in_flight", kv_after_swap=kv)
    try:
        while bench.version % WEIGHTS:
            bench.offer()
        index = max(
            range(len(catalogue.requests)),
            key=lambda i: (
                catalogue.requests[i].sampling.max_new_tokens
                * (catalogue.requests[i].sampling.temperature > 0)
            ),
        )
        request = dataclasses.replace(catalogue.requests[index], request_id=f"swap {kv}")
        future = scheduler.submit(request)
        for _ in range(5):
            scheduler.step()
        bench.offer()
        while scheduler.step():
            pass
        sample = future.result(0).samples[0]
        assert set(sample.policy_versions.tolist()) == {bench.version - 1, bench.version}
        so_far = tuple(tuple(s.response_ids[:5].tolist()) for s in future.result(0).samples)
        again = scheduler.submit(dataclasses.replace(request, request_id="again", so_far=so_far))
        while scheduler.step():
            pass
        fresh = again.result(0).samples[0]
        gap = np.abs(fresh.raw_logprobs[:1] - sample.raw_logprobs[5:6]).max()
        assert (gap <= CLOSEST) == (kv == "recompute")
    finally:
        scheduler._settings = settings


def test_a_short_load_loses_and_mixes_nothing(bench, catalogue):  # the last: it stops the worker
    found = measure(LOAD, bench, catalogue)
    assert found["problems"] == []
    assert found["answered"] > 16 and found["swaps"] > 3 and found["left_over"] == 0
