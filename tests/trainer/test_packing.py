from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.sequences import make_sequences
from trainer.packing import PackingConfig, pack, scatter

configs = st.builds(
    PackingConfig,
    row_tokens=st.sampled_from([0, 0, 16, 32, 64]),
    micro_batch_tokens=st.sampled_from([1, 32, 64, 4096]),
)


def packed(sequences, config):
    return pack(sequences, config, denominator=1.0, step=1)


def context_of(batch, micro, source):
    """Tokens that a source attends to, in order, as the model sees them."""
    at = (micro, source // batch.shape[2])
    position = source % batch.shape[2]
    segments, prefixes = batch.segments[at], batch.prefixes[at]
    seen = [
        j
        for j in range(position + 1)
        if segments[j] and segments[j] in (segments[position], prefixes[position])
    ]
    assert batch.positions[at][seen].tolist() == list(range(len(seen)))
    return batch.tokens[at][seen].tolist()


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 6), st.integers(1, 6), configs)
def test_every_trainable_token_exactly_once_with_its_own_context(seed, groups, n, config):
    sequences = make_sequences(seed, groups, n)
    batch = packed(sequences, config)
    found = set()
    for at in range(batch.shape[0]):
        for m in np.flatnonzero(batch.loss_mask[at]):
            s = sequences[batch.sequences[at][m]]
            t = int(batch.offsets[at][m])
            key = (int(batch.sequences[at][m]), t)
            assert key not in found
            found.add(key)
            assert s.loss_mask[t]
            assert batch.targets[at][m] == s.response_ids[t]
            assert batch.raw_logprobs[at][m] == s.raw_logprobs[t]
            assert batch.behaviour_logprobs[at][m] == s.behaviour_logprobs[t]
            assert batch.advantages[at][m] == np.float32(s.advantage)
            assert batch.temperatures[at][m] == np.float32(s.temperature)
            expected = [*s.prompt_ids, *s.response_ids[:t]]
            assert context_of(batch, at, batch.sources[at][m]) == expected
    trainable = {(i, t) for i, s in enumerate(sequences) for t in np.flatnonzero(s.loss_mask)}
    assert found == trainable


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), configs)
def test_shapes_are_few_and_pads_are_marked(seed, config):
    batch = packed(make_sequences(seed, 5), config)
    micro, rows, length, targets = batch.shape
    assert length & (length - 1) == 0
    for size in (micro, targets):
        assert size & (size - 1) == 0 or (size % 3 == 0 and (size // 3) & (size // 3 - 1) == 0)
    assert rows == 1 or rows * length <= config.micro_batch_tokens
    assert 1 <= batch.micro_batches <= micro
    assert not batch.loss_mask[batch.micro_batches :].any()
    assert (batch.tokens[batch.segments == 0] == 0).all()


def test_a_prompt_stands_once_and_equal_responses_share_a_branch():
    one = make_sequences(0, 1, 1)[0]
    same = [
        dataclasses.replace(
            one,
            prompt_ids=np.arange(1, 11, dtype=np.int32),
            response_ids=np.array(response, np.int32),
            loss_mask=np.ones(3, bool),
            raw_logprobs=np.zeros(3, np.float32),
            behaviour_logprobs=np.zeros(3, np.float32),
            max_new_tokens=3,
        )
        for response in ([1, 2, 3], [1, 2, 4], [5, 6, 3], [5, 6, 3])
    ]
    batch = packed(same, PackingConfig())
    assert (batch.segments > 0).sum() == 10 + 2 + 2
    assert batch.loss_mask.sum() == 12


def test_shapes_do_not_depend_on_what_was_sampled():
    """Two steps of one run, same prompts' lengths and limits: one compilation."""
    shapes = set()
    for seed in range(20):
        rng = np.random.default_rng(seed)
        sequences = [
            dataclasses.replace(
                make_sequences(0, 1, 1)[0],
                prompt_ids=rng.integers(1, 1000, 17).astype(np.int32),
                response_ids=rng.integers(1, 1000, size).astype(np.int32),
                loss_mask=np.ones(size, bool),
                raw_logprobs=np.zeros(size, np.float32),
                behaviour_logprobs=np.zeros(size, np.float32),
                max_new_tokens=4,
            )
            for size in [4, *rng.integers(2, 5, 7)]
        ]
        shapes.add(packed(sequences, PackingConfig()).shape)
    assert len({(rows, length) for _, rows, length, _ in shapes}) == 1
    assert len(shapes) <= 2


def test_a_sequence_without_a_prompt_is_refused():
    lonely = dataclasses.replace(
        make_sequences(3, 1, 1, response=6)[0],
        prompt_ids=np.zeros(0, np.int32),
        response_ids=np.ones(2, np.int32),
        loss_mask=np.ones(2, bool),
    )
    with pytest.raises(ValueError, match="nothing predicts its first token"):
        packed([lonely], PackingConfig())


def test_scatter_is_the_way_back():
    sequences = make_sequences(1, 4, 4)
    batch = packed(sequences, PackingConfig(row_tokens=16, micro_batch_tokens=32))
    for s, values in zip(sequences, scatter(batch, batch.raw_logprobs, sequences), strict=True):
        np.testing.assert_array_equal(values[s.loss_mask], s.raw_logprobs[s.loss_mask])
        assert np.isnan(values[~s.loss_mask]).all()
