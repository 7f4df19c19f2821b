"""The forced end of thinking: the device and the host follow one rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infra.contracts.errors import InferenceError
from infra.contracts.sampling_params import SamplingParams
from trainer.inference_worker.engine.thinking import (
    Thinker,
    columns_of,
    follow,
    forced_tokens,
)
from trainer.inference_worker.sampling_rules import rules_for

FIRST, LAST = (1, 2), (3, 4, 5)


def write(budget, prompt, wishes):
    """What a slot writes that would draw ``wishes``, by the host's rule, with what is forced."""
    thinker = Thinker(budget, FIRST, LAST)
    thinker.read(prompt)
    ids, marks = [], []
    for wish in wishes:
        slot = thinker.slot
        over = slot.thought - slot.budget
        token = LAST[over] if over >= 0 and slot.thought >= 0 else wish
        ids.append(token)
        marks.append(thinker.take(token))
    return ids, marks


@pytest.mark.parametrize(
    ("budget", "prompt", "wishes", "written", "forced"),
    [
        (2, [], [1, 2, 8, 8, 8, 8, 8, 8], [1, 2, 8, 8, 3, 4, 5, 8], range(4, 7)),
        (2, [7, 1, 2], [8] * 6, [8, 8, 3, 4, 5, 8], range(2, 5)),  # the prompt opened it
        (2, [1, 2, 9, 9, 9, 9], [8] * 4, [3, 4, 5, 8], range(3)),  # and was over the budget
        (2, [1, 2, 9, 3, 4, 5], [8] * 4, [8] * 4, ()),  # and closed it
        (4, [], [1, 2, 8, 3, 4, 5, 8, 8, 8], [1, 2, 8, 3, 4, 5, 8, 8, 8], ()),
        (3, [], [1, 2, 3, 4, 8, 8, 8], [1, 2, 3, 4, 8, 3, 4], range(5, 7)),  # begun, not closed
        (2, [], [8, 2, 1, 8, 8, 8], [8, 2, 1, 8, 8, 8], ()),
        (1, [], [1, 2, 8, 8, 8, 8, 1, 2, 8, 8], [1, 2, 8, 3, 4, 5, 1, 2, 8, 3], (3, 4, 5, 9)),
    ],
)
def test_the_second_mark_is_written_after_the_budget(budget, prompt, wishes, written, forced):
    ids, marks = write(budget, prompt, wishes)
    assert ids == written
    assert [i for i, mark in enumerate(marks) if mark] == list(forced)


def test_device_and_host_agree_on_every_token():
    rng = np.random.default_rng(1)
    slots, steps = 64, 40
    budgets = rng.integers(0, 6, slots)
    thinkers = [Thinker(int(b), FIRST, LAST) if b else None for b in budgets]
    prompts = rng.integers(1, 6, (slots, 5))
    for thinker, prompt in zip(thinkers, prompts, strict=True):
        if thinker:
            thinker.read(prompt)
    state = columns_of([t.slot if t else Thinker(0, (), ()).slot for t in thinkers], slots)
    wishes = rng.choice(8, (steps, slots), p=[0.1, 0.3, 0.3, 0.1, 0.05, 0.05, 0.05, 0.05])

    @jax.jit
    def step(state, wish):
        forced, token = forced_tokens(state)
        token = jnp.where(forced, token, wish)
        return follow(state, token), forced, token

    count = 0
    for wish in wishes.astype(np.int32):
        state, forced, tokens = step(state, wish)
        for i, thinker in enumerate(thinkers):
            assert thinker is None or thinker.take(int(tokens[i])) == forced[i]
            assert thinker is not None or not forced[i]
        count += int(forced.sum())
    assert count > 100


class Words:
    eos_ids = (0,)
    vocab_size = 6

    def encode(self, text):
        if not text.isdigit():
            raise ValueError("not digits")
        return np.array([int(c) for c in text], np.int32)


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        ({"banned_token_ids": (6,)}, "token id 6 is outside the vocabulary; give ids below 6"),
        ({"stop_token_ids": (9,)}, "token id 9 is outside"),
        ({"banned_token_ids": (1, 2, 3, 4, 5), "min_new_tokens": 1}, "leave nothing to draw"),
        ({"max_thinking_tokens": 1, "thinking_marks": ("x", "1")}, "thinking_marks: not digits"),
        ({"max_thinking_tokens": 1, "thinking_marks": ("1", "2" * 17)}, "17 tokens; 1 to 16"),
    ],
)
def test_rules_that_do_not_fit_the_vocabulary_are_refused(sampling, says):
    with pytest.raises(InferenceError, match=says) as caught:
        rules_for(SamplingParams(**sampling), np.array([1], np.int32), Words())
    assert not caught.value.retryable
