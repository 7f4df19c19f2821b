"""Drawing tokens: which are kept, their log-probs, and that frequencies are right."""

import dataclasses

import jax
import numpy as np
import pytest
from scipy.stats import chi2

from trainer.inference_worker.engine.engine_api import SlotSampling
from trainer.inference_worker.engine.sampling import draw_tokens, sampler_of

VOCAB = 11
LOGITS = np.log(np.array([30, 20, 15, 10, 8, 6, 5, 3, 2, 1, 0.0001]) / 100).astype(np.float32)
DRAW = jax.jit(draw_tokens)
SLOTS = 4096
ALWAYS = 2**31 - 1
BAN = -np.inf


def draw_each(samplings, logits=LOGITS, position=3):
    """Tokens and both log-probs, one slot per sampling."""
    slots = len(samplings)
    logits = np.broadcast_to(logits, (slots, np.shape(logits)[-1]))
    at = np.full(slots, position, np.int32)
    return [np.asarray(x) for x in DRAW(logits, sampler_of(samplings, slots), at)]


def draw(position=3, slots=SLOTS, logits=LOGITS, **settings):
    return draw_each([SlotSampling(seed=s, **settings) for s in range(slots)], logits, position)


def log_softmax(x):
    x = np.asarray(x, np.float64)
    return x - np.log(np.exp(x - x.max()).sum()) - x.max()


def exact(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, biases=(), position=3):
    """Log-probs of the distribution that these settings mean, -inf where nothing is kept."""
    logits = LOGITS.astype(np.float64)
    for token, bias, until in biases:
        logits[token] += bias if position < until else 0
    scaled = log_softmax(logits / temperature)
    ranked = np.argsort(-scaled, kind="stable")
    kept = ranked[: top_k or VOCAB]
    share = np.exp(scaled[kept]) / np.exp(scaled[kept]).sum()
    kept = kept[np.cumsum(share) - share < top_p]
    kept = kept[scaled[kept] >= scaled.max() + np.log(min_p)] if min_p else kept
    found = np.full(VOCAB, -np.inf)
    found[kept] = log_softmax(scaled[kept])
    return found


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
        ({"min_p": 0.49}, 3),
        ({"min_p": 1.0}, 1),
        ({"min_p": 0.3, "top_k": 2}, 2),
        ({"min_p": 0.3, "temperature": 2.0}, 8),  # 0.3 squared is 0.09, of 30
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


MIXED = (
    {},
    {"temperature": 0.6},
    {"temperature": 2.0},
    {"top_k": 4},
    {"top_p": 0.8},
    {"min_p": 0.15},
    {"temperature": 1.5, "top_p": 0.9, "top_k": 8, "min_p": 0.1},
    {"biases": ((0, BAN, ALWAYS), (2, BAN, ALWAYS))},
    {"biases": ((1, BAN, 3), (3, BAN, 4))},  # before position 3, and at it
    {"temperature": 1.3, "top_k": 5, "biases": ((9, 4.0, ALWAYS), (0, -2.0, ALWAYS))},
)


def test_frequencies_and_log_probs_are_those_of_the_exact_distribution():
    """Chi-square, all settings in one batch, 20,000 draws of each."""
    samplings = [SlotSampling(seed=seed, **s) for s in MIXED for seed in range(4000)]
    drawn = [
        draw_each([dataclasses.replace(s, seed=s.seed + 4000 * i) for s in samplings])
        for i in range(5)
    ]
    tokens, behaviour, raw = (
        np.concatenate([c.reshape(len(MIXED), -1) for c in column], axis=1)
        for column in zip(*drawn, strict=True)
    )
    for row, settings in enumerate(MIXED):
        expected = exact(**settings)
        counts = np.bincount(tokens[row], minlength=VOCAB)
        assert (counts[~np.isfinite(expected)] == 0).all(), settings
        means = np.exp(expected) * tokens.shape[1]
        large = means > 5
        statistic = ((counts - means)[large] ** 2 / means[large]).sum()
        assert chi2.sf(statistic, large.sum() - 1) > 1e-4, settings
        np.testing.assert_allclose(behaviour[row], expected[tokens[row]], atol=2e-5)
        plain = log_softmax(LOGITS / settings.get("temperature", 1.0))
        np.testing.assert_allclose(raw[row], plain[tokens[row]], atol=2e-5)


def test_what_others_ask_for_changes_no_bit():
    """Alone, among plain slots, or among all kinds: a slot's three numbers are the same."""
    settings = [*MIXED, {"temperature": 0.0}, {"temperature": 0.0, "biases": ((0, BAN, ALWAYS),)}]
    rng = np.random.default_rng(0)
    logits = rng.normal(size=1000).astype(np.float32)
    for number, own in enumerate(settings):
        alike = draw_each([SlotSampling(seed=s, **own) for s in range(48)], logits)
        mixed = [
            SlotSampling(seed=s, **(own if s % 2 else settings[(number + s // 2) % len(settings)]))
            for s in range(48)
        ]
        for one, other in zip(alike, draw_each(mixed, logits), strict=True):
            np.testing.assert_array_equal(one[1::2], other[1::2])


def test_greedy_takes_the_best_that_is_not_banned():
    tokens, behaviour, raw = draw(temperature=0.0, biases=((0, BAN, ALWAYS),), slots=2)
    assert tokens.tolist() == [1, 1]
    np.testing.assert_allclose(behaviour, log_softmax(LOGITS[1:])[0], atol=1e-5)
    np.testing.assert_allclose(raw, log_softmax(LOGITS)[1], atol=1e-5)


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


def test_logits_that_are_no_numbers_give_log_probs_that_are_none():
    for bad in (np.nan, np.inf):
        tokens, behaviour, raw = draw(logits=np.full(VOCAB, bad, np.float32), slots=4)
        assert not np.isfinite(behaviour).any() and not np.isfinite(raw).any()
        assert ((tokens >= 0) & (tokens < VOCAB)).all()


def test_a_draw_depends_on_seed_and_position_alone():
    one = draw()[0]
    np.testing.assert_array_equal(one[:100], draw()[0][:100])
    assert (one != draw(position=4)[0]).mean() > 0.5
