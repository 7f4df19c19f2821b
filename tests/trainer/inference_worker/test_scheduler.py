"""Continuous batching, stepped by hand on the counting engine and a manual clock."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.clock import ManualClock
from infra.contracts.errors import InferenceError
from infra.contracts.records import FinishReason, GenerateRequest, Message, SamplingParams
from trainer.inference_worker.config import InferenceConfig
from trainer.inference_worker.engine.counting_engine import CountingEngine
from trainer.inference_worker.observer import Observer
from trainer.inference_worker.scheduler import Scheduler

END = 9


class Digits:
    """Ten tokens that are digits; 9 ends a response."""

    eos_ids = (END,)
    digest = "digits"
    vocab_size = 10

    def encode(self, text):
        return np.array([int(c) for c in text], np.int32)

    def encode_prompt(self, messages):
        if not messages[0].content.isdigit():
            raise ValueError("not digits")
        return np.array([int(c) for c in messages[0].content], np.int32)

    def decode(self, ids):
        return "".join(str(i) for i in ids)


def request(name="r", *, prompt="0", n=2, version=0, timeout=10.0, seeds=None, **sampling):
    return GenerateRequest(
        request_id=name,
        messages=(Message(role="text", content=prompt),),
        sampling=SamplingParams(n=n, **({"max_new_tokens": 3} | sampling)),
        seeds=tuple(range(n)) if seeds is None else seeds,
        min_version=version,
        timeout_secs=timeout,
    )


class Seen(Observer):
    def __init__(self):
        self.calls = []

    def behind(self, version):
        self.calls.append(("behind", version))

    def swapped(self, version):
        self.calls.append(("swapped", version))

    def first_token(self, version):
        self.calls.append(("first_token", version))


class Bench:
    """A scheduler and all that surrounds it."""

    def __init__(self, slots=4, version=0, **settings):
        self.clock = ManualClock()
        self.seen = Seen()
        self.engine = CountingEngine(
            slots, settings.get("max_len", 16), 10, settings.get("steps_per_call", 1)
        )
        config = InferenceConfig(slots=slots, **({"max_len": 16} | settings))
        self.scheduler = Scheduler(self.engine, Digits(), config, self.clock, self.seen)
        if version >= 0:
            self.offer(version)

    def offer(self, version):
        self.scheduler.offer_weights(version, f"digest-{version}", {})

    def submit(self, *args, **kwargs):
        return self.scheduler.submit(request(*args, **kwargs))

    def finished(self, *args, **kwargs):
        future = self.submit(*args, **kwargs)
        self.drain()
        return future.result(0)

    def drain(self):
        while self.scheduler.step():
            pass


def responses(future):
    return [s.response_ids.tolist() for s in future.result(0).samples]


def test_a_group_is_answered_in_seed_order_with_facts():
    bench = Bench()
    future = bench.submit(prompt="13", n=3)
    bench.drain()
    reply = future.result(0)
    assert responses(future) == [[3, 4, 5], [4, 5, 6], [5, 6, 7]]
    assert reply.prompt_ids.tolist() == [1, 3]
    assert reply.weights == ((0, "digest-0"),)
    assert (reply.engine, reply.dtype, reply.tokenizer_digest) == ("headrace", "float32", "digits")
    sample = reply.samples[1]
    assert sample.response_text == "456"
    assert sample.behaviour_logprobs.tolist() == [-4, -5, -6]
    assert sample.raw_logprobs.tolist() == [-8, -10, -12]
    assert sample.policy_versions.tolist() == [0, 0, 0]
    types = [
        a.dtype.name for a in (sample.response_ids, sample.raw_logprobs, sample.policy_versions)
    ]
    assert types == ["int32", "float32", "int32"]


@pytest.mark.parametrize(
    ("prompt", "sampling", "ids", "reason"),
    [
        ("2", {}, [2, 3, 4], FinishReason.LENGTH),
        ("7", {}, [7, 8, 9], FinishReason.STOP),  # the end token at the very limit is whole
        ("8", {}, [8, 9], FinishReason.STOP),
        ("2", {"stop": ("3",)}, [2, 3], FinishReason.STOP),
        ("2", {"stop": ("34",), "max_new_tokens": 9}, [2, 3, 4], FinishReason.STOP),
        ("2", {"stop": ("99", "2")}, [2], FinishReason.STOP),
        ("2", {"stop": ("5",)}, [2, 3, 4], FinishReason.LENGTH),
        ("2", {"stop_token_ids": (3,)}, [2, 3], FinishReason.STOP),
        ("8", {"ignore_eos": True, "max_new_tokens": 4}, [8, 9, 0, 1], FinishReason.LENGTH),
        ("8", {"ignore_eos": True, "stop_token_ids": (0,)}, [8, 9, 0], FinishReason.STOP),
        # The fake engine heeds no bias: what ends a response too early is no end.
        ("2", {"stop": ("2",), "min_new_tokens": 2}, [2, 3, 4], FinishReason.LENGTH),
        ("9", {"min_new_tokens": 2}, [9, 0, 1], FinishReason.LENGTH),
        ("9", {"min_new_tokens": 1}, [9], FinishReason.STOP),
        ("11111111111110", {"max_new_tokens": 9}, [0, 1], FinishReason.LENGTH),  # context full
    ],
)
def test_what_ends_a_response(prompt, sampling, ids, reason):
    bench = Bench()
    future = bench.submit(prompt=prompt, n=1, **sampling)
    bench.drain()
    sample = future.result(0).samples[0]
    assert (sample.response_ids.tolist(), sample.finish_reason) == (ids, reason)


def test_a_group_larger_than_the_slots_is_split_over_time_with_one_prefill():
    bench = Bench(slots=2)
    future = bench.submit(n=5)
    bench.drain()
    assert responses(future) == [[i, i + 1, i + 2] for i in range(5)]
    assert bench.engine.prefilled == [1]


def test_slots_are_filled_as_they_become_free():
    bench = Bench(slots=2)
    short, long = bench.submit("a", prompt="8", n=1), bench.submit("b", prompt="1", n=1)
    late = bench.submit("c", prompt="5", n=1)
    bench.scheduler.step()
    bench.scheduler.step()
    assert short.done() and not long.done()
    bench.scheduler.step()  # "c" takes the free slot while "b" still runs
    assert long.done() and bench.scheduler.load() == (1, 0)
    bench.drain()
    assert responses(late) == [[5, 6, 7]]
    assert bench.scheduler.totals.steps == 5


def test_waiting_groups_are_prefilled_together_oldest_first():
    bench = Bench(slots=4)
    for name in "abc":
        bench.submit(name, prompt="1" * (ord(name) - 96), n=2)
    bench.scheduler.step()
    assert bench.engine.prefilled == [1, 2]  # "c" has no slot yet, so no prefix either


@settings(max_examples=40, deadline=None)
@given(
    slots=st.integers(2, 7),
    groups=st.lists(st.tuples(st.integers(0, 8), st.integers(1, 6)), min_size=1, max_size=8),
    steps=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    per_call=st.integers(1, 5),
)
def test_answers_do_not_depend_on_slots_or_arrival(slots, groups, steps, per_call):
    bench = Bench(slots=slots, steps_per_call=per_call)
    futures = []
    for i, (prompt, n) in enumerate(groups):
        futures.append(bench.submit(str(i), prompt=str(prompt), n=n))
        for _ in range(steps[i]):
            bench.scheduler.step()
    bench.drain()
    for (prompt, n), future in zip(groups, futures, strict=True):
        expected = []
        for seed in range(n):
            counted = [(prompt + seed + t) % 10 for t in range(3)]
            expected.append(counted[: counted.index(END) + 1] if END in counted else counted)
        assert responses(future) == expected
    assert bench.scheduler.load() == (0, 0)


def test_a_repeat_joins_the_running_request():
    bench = Bench()
    first = bench.submit("same", timeout=5)
    second = bench.submit("same", timeout=50)
    assert first is second
    bench.clock.advance(20)  # the later deadline counts
    bench.drain()
    assert len(first.result(0).samples) == 2
    assert bench.scheduler.totals.requests == 1
    assert bench.submit("same") is not first


def test_the_same_id_with_other_contents_is_refused():
    bench = Bench()
    bench.submit("same")
    with pytest.raises(InferenceError, match="other contents") as caught:
        bench.submit("same", prompt="5")
    assert not caught.value.retryable


def test_the_deadline_frees_the_slots():
    bench = Bench(slots=2)
    late = bench.submit("late", timeout=5)
    bench.scheduler.step()
    assert bench.scheduler.load() == (2, 0)
    bench.clock.advance(6)
    assert not bench.scheduler.step()
    with pytest.raises(InferenceError, match="no answer within 5 s: 0 of 2 samples") as caught:
        late.result(0)
    assert caught.value.retryable
    assert bench.scheduler.load() == (0, 0)


def test_a_newer_min_version_waits_and_asks_for_weights_while_others_pass():
    bench = Bench()
    newer, older = bench.submit("new", version=2), bench.submit("old", version=0)
    assert bench.seen.calls == [("behind", 2)]
    bench.drain()
    assert bench.seen.calls[1:] == [("swapped", 0), ("first_token", 0)]
    assert older.done() and not newer.done()
    bench.offer(1)
    bench.drain()
    assert not newer.done()
    bench.offer(2)
    bench.drain()
    assert newer.result(0).weights == ((2, "digest-2"),)


def test_without_weights_a_late_request_says_what_it_waited_for():
    bench = Bench(version=-1)
    future = bench.submit(timeout=3)
    bench.clock.advance(4)
    bench.scheduler.step()
    with pytest.raises(InferenceError, match="needs version 0, the worker has -1"):
        future.result(0)


def test_at_a_boundary_every_rollout_has_one_version():
    bench = Bench(slots=2, swap="boundary")
    future = bench.submit(n=4)
    bench.scheduler.step()
    bench.offer(1)
    assert bench.scheduler.version == 0
    bench.drain()
    versions = [s.policy_versions.tolist() for s in future.result(0).samples]
    assert versions == [[0] * 3, [0] * 3, [1] * 3, [1] * 3]
    assert future.result(0).weights == ((0, "digest-0"), (1, "digest-1"))
    assert bench.engine.prefilled == [1, 1]  # the prefix of version 0 is not used under version 1


def test_in_flight_versions_are_per_token():
    bench = Bench(slots=2, swap="in_flight")
    future = bench.submit(n=2)
    bench.scheduler.step()
    bench.offer(1)
    bench.drain()
    assert [s.policy_versions.tolist() for s in future.result(0).samples] == [[0, 1, 1]] * 2
    assert future.result(0).weights == ((0, "digest-0"), (1, "digest-1"))


def test_with_several_steps_per_call_weights_change_between_calls():
    bench = Bench(slots=2, swap="in_flight", steps_per_call=2)
    future = bench.submit(n=2)
    bench.scheduler.step()
    bench.offer(1)
    bench.drain()
    assert [s.policy_versions.tolist() for s in future.result(0).samples] == [[0, 0, 1]] * 2


def test_older_weights_are_never_taken():
    bench = Bench(version=3)
    bench.scheduler.step()
    bench.offer(2)
    bench.scheduler.step()
    assert bench.scheduler.version == 3


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("x", "cannot be encoded: not digits"), ("1" * 16, "16 tokens; 1 to 15 fit")],
)
def test_wrong_prompts_are_not_retryable(prompt, message):
    with pytest.raises(InferenceError, match=message) as caught:
        Bench().submit(prompt=prompt)
    assert not caught.value.retryable


def test_a_full_queue_is_retryable():
    bench = Bench(max_queue=1)
    bench.submit("a")
    with pytest.raises(InferenceError, match="queue is full") as caught:
        bench.submit("b")
    assert caught.value.retryable


def test_stopping_fails_what_is_open_and_refuses_the_rest():
    bench = Bench()
    future = bench.submit()
    bench.scheduler.stop()
    bench.scheduler.run()
    with pytest.raises(InferenceError, match="stopping") as caught:
        future.result(0)
    assert caught.value.retryable
    with pytest.raises(InferenceError, match="stopping"):
        bench.submit("next")


def test_an_engine_that_fails_leaves_no_future_open():
    bench = Bench()
    future = bench.submit()

    def fail(state, slots):
        raise MemoryError("no room")

    bench.engine.generate = fail
    with pytest.raises(MemoryError):
        bench.scheduler.run()
    with pytest.raises(InferenceError, match="the engine failed: MemoryError: no room"):
        future.result(0)


def test_a_request_compares_by_value():
    assert request() == request() != replace(request(), min_version=4)


def test_a_request_whose_callers_have_all_gone_frees_its_slots():
    bench = Bench(slots=2)
    first, joined = bench.submit("r"), bench.submit("r")
    bench.scheduler.step()
    bench.scheduler.cancel("r", first)
    bench.scheduler.step()
    assert bench.scheduler.load() == (2, 0)  # one caller still waits
    bench.scheduler.cancel("r", joined)
    assert not bench.scheduler.step()
    assert bench.scheduler.load() == (0, 0)
    assert isinstance(first.exception(0), InferenceError)
    assert (bench.scheduler.totals.cancelled, bench.scheduler.totals.expired) == (1, 0)
    again = bench.submit("r")
    bench.scheduler.cancel("r", first)  # late news about the former request of that name
    bench.drain()
    assert responses(again) == [[0, 1, 2], [1, 2, 3]]


def test_a_repeat_just_after_the_last_caller_left_saves_the_request():
    bench = Bench()
    future = bench.submit("r")
    bench.scheduler.cancel("r", future)
    assert bench.submit("r") is future
    bench.drain()
    assert responses(future) == [[0, 1, 2], [1, 2, 3]]


def test_tokens_are_told_as_they_are_drawn_and_ids_may_stand_for_the_prompt():
    bench, seen = Bench(), []
    future = bench.scheduler.submit(
        request(n=2), prompt_ids=np.array([1, 7], np.int32), watch=seen.append
    )
    bench.scheduler.step()
    assert seen == [(0, 7, -7.0, -14.0, 0, True), (1, 8, -8.0, -16.0, 0, True)]
    bench.drain()
    assert [token for index, token, *_ in seen if index == 0] == responses(future)[0]
    assert future.result(0).prompt_ids.tolist() == [1, 7]


def test_what_is_forced_is_marked_and_has_no_log_prob():
    """The fake engine counts on from 2; within the marks 2 and 45 one token may be thought."""
    bench = Bench()
    marks = {"max_thinking_tokens": 1, "thinking_marks": ("2", "45")}
    (sample, _) = bench.finished(prompt="2", max_new_tokens=6, **marks).samples
    assert sample.response_ids.tolist() == [2, 3, 4, 5, 6, 7]
    assert sample.loss_mask.tolist() == [True, False, False, False, True, True]
    assert sample.behaviour_logprobs.tolist() == [-2, 0, 0, 0, -6, -7]
    plain = bench.finished("plain", prompt="2").samples[0]
    assert plain.loss_mask is None


class Diverging(CountingEngine):
    """Its third log-prob in a row is not a number."""

    def generate(self, decode_state, *, slots=None):
        state, result = super().generate(decode_state, slots=slots)
        result.data[1:, result.tokens % 10 == 4] = np.nan
        return state, result


def test_log_probs_that_are_no_numbers_are_an_error_that_says_so():
    bench = Bench(version=-1)
    config = InferenceConfig(slots=4, max_len=16)
    bench.scheduler = Scheduler(Diverging(4, 16, 10), Digits(), config, bench.clock, bench.seen)
    bench.offer(3)
    future, other = bench.submit(prompt="2"), bench.submit("other", prompt="5")
    bench.drain()
    with pytest.raises(InferenceError, match="model diverged: version 3 gives log-probs"):
        future.result(0)
    assert responses(other) == [[5, 6, 7], [6, 7, 8]]
    assert bench.scheduler.load() == (0, 0)
