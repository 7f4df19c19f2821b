"""Drawing tokens: which are kept, their log-probs, and that frequencies are right."""

import functools

import jax
import numpy as np
import pytest

from trainer.inference_worker.engine.sampling import Sampler, draw_tokens

VOCAB = 11
LOGITS = np.log(np.array([30, 20, 15, 10, 8, 6, 5, 3, 2, 1, 0.0001]) / 100).astype(np.float32)
DRAW = jax.jit(draw_tokens)
SLOTS = 4096


def draw(temperature=1.0, top_p=1.0, top_k=0, position=3, slots=SLOTS, logits=LOGITS):
    sampler = Sampler(
        seed=np.arange(slots, dtype=np.uint32),
        temperature=np.full(slots, temperature, np.float32),
        top_p=np.full(slots, top_p, np.float32),
        top_k=np.full(slots, top_k, np.int32),
    )
    logits = np.broadcast_to(logits, (slots, len(logits)))
    return [np.asarray(x) for x in DRAW(logits, sampler, np.full(slots, position, np.int32))]


def log_softmax(x):
    x = np.asarray(x, np.float64)
    return x - np.log(np.exp(x - x.max()).sum()) - x.max()


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, 11),
        ({"temperature": 2.0}, 11),
        ({"top_k": 3}, 3),
        ({"top_k": 50}, 11),
        ({"top_p": 0.49}, 2),
        ({"top_p": 0.51}, 3),
        ({"top_p": 1e-6}, 1),
        ({"top_k": 2, "top_p": 0.55}, 1),  # 30 of 50 reaches 0.55 once two are left
        ({"temperature": 0.5, "top_p": 0.5}, 1),
        ({"temperature": 0.0, "top_k": 4}, 1),
    ],
)
def test_kept_tokens_and_both_log_probs(settings, kept):
    tokens, behaviour, raw = draw(**settings)
    temperature = settings.get("temperature", 1.0) or 1.0
    expected_raw = log_softmax(LOGITS / temperature)
    renormalised = log_softmax((LOGITS / temperature)[:kept])
    greedy = settings.get("temperature") == 0
    assert tokens.max() < kept
    np.testing.assert_allclose(raw, expected_raw[tokens], atol=1e-5)
    expected = expected_raw[tokens] if greedy else renormalised[tokens]
    np.testing.assert_allclose(behaviour, expected, atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"temperature": 2.0}, {"top_k": 4}])
def test_frequencies_are_the_distribution(settings):
    tokens = np.concatenate([draw(position=p, **settings)[0] for p in range(8)])
    kept = settings.get("top_k") or VOCAB
    probs = np.exp(log_softmax((LOGITS / settings.get("temperature", 1.0))[:kept]))
    counts = np.bincount(tokens, minlength=kept)
    expected = probs * len(tokens)
    chi2 = ((counts - expected) ** 2 / np.maximum(expected, 1e-9))[expected > 5].sum()
    assert chi2 < 35  # 10 degrees of freedom: 1e-4


@pytest.mark.parametrize("vocab", [1, 3, 1000])
def test_any_vocabulary_size_stays_in_range(vocab):
    tokens, behaviour, _ = draw(logits=np.zeros(vocab, np.float32), slots=512)
    assert tokens.min() >= 0 and tokens.max() < vocab
    np.testing.assert_allclose(behaviour, -np.log(vocab), atol=1e-5)
    if vocab > 1:
        assert len(np.unique(tokens)) > 1


def test_impossible_tokens_are_never_drawn():
    logits = np.where(np.arange(300) % 2, -np.inf, 0.0).astype(np.float32)
    assert (draw(logits=logits)[0] % 2 == 0).all()


def test_a_draw_depends_on_seed_and_position_alone():
    one = draw()[0]
    np.testing.assert_array_equal(one[:100], draw()[0][:100])
    assert (one != draw(position=4)[0]).mean() > 0.5
    mixed = functools.partial(draw, top_k=0)
    np.testing.assert_array_equal(one, mixed()[0])
