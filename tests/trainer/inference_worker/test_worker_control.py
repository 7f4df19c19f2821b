"""Pausing, aborting, cutting and continuing, stepped by hand on the counting engine."""

import dataclasses

import pytest

from infra.contracts.errors import InferenceError
from infra.contracts.records import FinishReason
from infra.inference.segments import Segments
from tests.trainer.inference_worker.test_scheduler import Bench, request, responses

STEADY = {"seeds": (1,), "n": 1}
"""With seed 1 the counting engine counts on from wherever it begins."""


def segment(name="r", tokens=2, **changes):
    asked = request(name, **({"prompt": "0", "max_new_tokens": 7} | STEADY | changes))
    return Segments(asked, tokens)


def ids(reply):
    return [sample.response_ids.tolist() for sample in reply.samples]


def test_a_segment_ends_at_its_limit_and_the_next_goes_on_behind_it():
    bench, segments = Bench(), segment(tokens=3)
    parts = []
    while not segments.done:
        future = bench.scheduler.submit(segments.next_request())
        bench.drain()
        parts.append((future.result(0).request_id, *ids(future.result(0))))
        assert future.result(0).samples[0].response_text == "1234567"[: 3 * len(parts)]
        segments.add(future.result(0))
    assert parts == [("r", [1, 2, 3]), ("r/2", [4, 5, 6]), ("r/3", [7])]
    assert bench.engine.prefilled == [1, 4, 7]
    joined = segments.reply()
    assert (joined.request_id, joined.weights) == ("r", ((0, "digest-0"),))
    sample = joined.samples[0]
    assert sample.response_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert sample.behaviour_logprobs.tolist() == [-1, -2, -3, -4, -5, -6, -7]
    assert (sample.response_text, sample.finish_reason) == ("1234567", FinishReason.LENGTH)
    totals = bench.scheduler.totals
    assert (totals.segments, totals.rollouts, totals.requests) == (2, 1, 3)


def test_only_unended_samples_are_asked_for_again():
    bench = Bench()
    segments = segment(
        n=2, seeds=(1, 5), prompt="2", tokens=3, max_new_tokens=6
    )  # 3 4 5 ... and 7 8 9: ended
    future = bench.scheduler.submit(segments.next_request())
    bench.drain()
    segments.add(future.result(0))
    again = segments.next_request()
    assert (again.seeds, again.sampling.n, again.so_far) == ((1,), 1, ((3, 4, 5),))
    future = bench.scheduler.submit(again)
    bench.drain()
    segments.add(future.result(0))
    assert ids(segments.reply()) == [[3, 4, 5, 6, 7, 8], [7, 8, 9]]


@pytest.mark.parametrize("stop", ["45", "5"])
def test_a_stop_string_across_a_cut_is_found(stop):
    bench, segments = Bench(), segment(prompt="2", stop=(stop,), tokens=2)  # 3 4 | 5
    while not segments.done:
        future = bench.scheduler.submit(segments.next_request())
        bench.drain()
        segments.add(future.result(0))
    assert ids(segments.reply()) == [[3, 4, 5]]
    assert segments.reply().samples[0].finish_reason is FinishReason.STOP


def test_pausing_in_place_holds_what_runs_and_turns_away_what_comes():
    bench = Bench()
    future = bench.submit(**STEADY)
    bench.scheduler.step()
    bench.scheduler.pause("in_place")
    assert not bench.scheduler.step()
    with pytest.raises(InferenceError, match="paused") as caught:
        bench.submit("other")
    assert caught.value.retryable
    assert bench.submit(**STEADY) is future  # a repeat joins all the same
    bench.scheduler.resume()
    bench.drain()
    assert responses(future) == [[1, 2, 3]]
    assert bench.engine.prefilled == [1]


def test_a_pause_that_finishes_starts_nothing():
    bench = Bench(slots=2)
    futures = [bench.submit(name, n=1) for name in "abc"]
    bench.scheduler.step()
    bench.scheduler.pause("finish")
    bench.drain()
    assert [future.done() for future in futures] == [True, True, False]
    bench.scheduler.resume()
    bench.drain()
    assert futures[2].done()


def test_a_pause_that_aborts_answers_who_takes_segments_as_far_as_it_came():
    bench = Bench(slots=2)
    taking = bench.scheduler.submit(segment("a", tokens=9).next_request())
    other = bench.submit("b", **STEADY)
    bench.scheduler.step()
    waiting = bench.scheduler.submit(segment("c", tokens=9).next_request())
    bench.scheduler.pause("abort")
    assert not bench.scheduler.step()
    assert ids(taking.result(0)) == [[1]]
    assert taking.result(0).samples[0].finish_reason is FinishReason.SEGMENT
    for future in (other, waiting):  # the latter has nothing to show
        with pytest.raises(InferenceError, match="aborted") as caught:
            future.result(0)
        assert caught.value.retryable
    assert bench.scheduler.load() == (0, 0)
    assert (bench.scheduler.totals.aborted, bench.scheduler.totals.segments) == (2, 1)


@pytest.mark.parametrize("how", ["finish", "in_place", "abort"])
def test_a_paused_worker_follows_weights_as_far_as_its_swaps_allow(how):
    for swap in ("boundary", "in_flight"):
        bench = Bench(swap=swap)
        bench.submit(**STEADY)
        bench.scheduler.step()
        bench.scheduler.pause(how)
        bench.offer(1)
        bench.drain()
        held = how == "in_place" and swap == "boundary"
        assert bench.scheduler.version == (0 if held else 1)
        assert not bench.scheduler._ready()  # it sleeps, it does not spin


def test_abort_names_a_request_with_its_segments_or_all():
    bench = Bench()
    asked = segment("r").next_request(), request("r/2"), request("rr"), request("x")
    futures = [bench.scheduler.submit(r) for r in asked]
    bench.scheduler.step()
    assert bench.scheduler.abort("r") == 2
    bench.scheduler.step()
    assert [f.done() for f in futures] == [True, True, False, False]
    assert bench.scheduler.abort("nobody") == 0
    assert bench.scheduler.abort() == 2
    assert not bench.scheduler.step()
    assert all(f.done() for f in futures)


def test_at_its_deadline_who_takes_segments_has_what_there_is():
    bench = Bench()
    future = bench.scheduler.submit(segment(tokens=9, timeout=5).next_request())
    bench.scheduler.step()
    bench.clock.advance(6)
    assert not bench.scheduler.step()
    assert ids(future.result(0)) == [[1]]
    assert bench.scheduler.totals.expired == 0


def test_a_worker_that_stops_cuts_segments_and_lets_the_rest_finish():
    bench = Bench()
    taking = bench.scheduler.submit(segment("a", tokens=9).next_request())
    whole = bench.submit("b", **STEADY)
    bench.scheduler.step()
    assert bench.scheduler.cut_segments() == 1
    bench.drain()
    assert (ids(taking.result(0)), responses(whole)) == ([[1]], [[1, 2, 3]])


def test_segments_of_two_versions_are_named_per_token():
    bench, segments = Bench(), segment(tokens=2, max_new_tokens=4)
    for version in (0, 1):
        bench.offer(version)
        future = bench.scheduler.submit(segments.next_request())
        bench.drain()
        segments.add(future.result(0))
    joined = segments.reply()
    assert joined.samples[0].policy_versions.tolist() == [0, 0, 1, 1]
    assert joined.weights == ((0, "digest-0"), (1, "digest-1"))


def test_digests_are_kept_only_as_long_as_a_reply_may_name_them():
    bench = Bench(swap="in_flight", slots=2, max_len=64)
    future = bench.submit(n=1, max_new_tokens=40, seeds=(1,), prompt="0")
    for version in range(1, 30):
        bench.scheduler.step()
        bench.offer(version)
    assert len(bench.scheduler._digests) <= 10  # the digit 9 has ended the response
    bench.drain()
    assert future.result(0).weights == tuple((v, f"digest-{v}") for v in range(9))
    for version in range(30, 60):
        bench.offer(version)
        bench.scheduler.step()
    assert bench.scheduler._digests == {59: "digest-59"}
    assert bench.scheduler.digest == "digest-59"


def test_after_a_swap_keys_and_values_are_made_again_if_asked():
    bench = Bench(swap="in_flight", kv_after_swap="recompute")
    future = bench.submit(**STEADY)
    bench.scheduler.step()
    bench.scheduler.step()
    bench.offer(1)
    bench.drain()
    assert bench.engine.prefilled == [1, 3]
    assert responses(future) == [[1, 2, 3]]
    assert bench.scheduler.totals.recomputed == 1


@pytest.mark.parametrize(
    ("so_far", "message"), [((1,) * 7, "with at most 6"), ((1,) * 14, "with at most 6")]
)
def test_what_leaves_nothing_to_draw_is_refused(so_far, message):
    asked = request(max_new_tokens=7, **STEADY)
    with pytest.raises(InferenceError, match=message) as caught:
        Bench().scheduler.submit(dataclasses.replace(asked, so_far=(so_far,)))
    assert not caught.value.retryable
