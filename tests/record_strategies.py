"""Hypothesis strategies for every record, from the type hints, and for whole valid groups."""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np

from infra.contracts.records import Decision, Group, Rollout, SamplingParams, Score
from tests.builders import make_group, make_prompt

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
ARRAY_DTYPES = ("bool", "int8", "int32", "int64", "uint32", "float16", "float32", "float64", ">i4")


@st.composite
def arrays(draw: st.DrawFn, dtypes: tuple[str, ...] = ARRAY_DTYPES) -> np.ndarray:
    """Any bit pattern (also NaN with a payload) of any storable type, in up to two dimensions."""
    dtype = np.dtype(draw(st.sampled_from(dtypes)))
    shape = tuple(draw(st.lists(st.integers(0, 3), min_size=1, max_size=2)))
    size = int(np.prod(shape)) * dtype.itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    if dtype.kind == "b":
        data = bytes(byte & 1 for byte in data)
    return np.frombuffer(data, dtype).reshape(shape)


SAMPLING = st.builds(
    SamplingParams,
    n=st.integers(1, 64),
    max_new_tokens=st.integers(1, 4096),
    temperature=st.floats(0, 2),
    top_p=st.floats(0.001, 1),
    top_k=st.integers(0, 100),
    stop=st.lists(TEXT.filter(bool), max_size=2).map(tuple),
    min_p=st.floats(0, 1),
    stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=2).map(tuple),
    ignore_eos=st.booleans(),
    logit_bias=st.lists(
        st.tuples(st.integers(0, 99), st.floats(-100, 100)), max_size=2, unique_by=lambda b: b[0]
    ).map(tuple),
)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Any value that a field with this type hint may hold."""
    plain = {
        str: TEXT,
        int: st.integers(-(2**62), 2**62),
        float: FINITE,
        bool: st.booleans(),
        np.ndarray: arrays(),
        SamplingParams: SAMPLING,
        object: st.recursive(
            st.none() | st.booleans() | st.integers() | FINITE | TEXT,
            lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
            max_leaves=4,
        ),
    }
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in plain:
        return plain[hint]
    if dataclasses.is_dataclass(hint):
        return records(hint)
    if isinstance(hint, type) and issubclass(hint, enum.StrEnum):
        return st.sampled_from(hint)
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(values(args[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, args))
    if origin is dict:
        return st.dictionaries(TEXT, values(args[1]), max_size=2)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(st.none() if a is type(None) else values(a) for a in args))
    raise TypeError(hint)


def records(cls: type) -> st.SearchStrategy[Any]:
    """Any record of this class, well-typed but otherwise senseless."""
    hints = typing.get_type_hints(cls)
    hints.pop("schema_version", None)
    return st.deferred(lambda: st.builds(cls, **{name: values(h) for name, h in hints.items()}))


FLOAT32 = st.floats(allow_nan=False, width=32)
TOKEN_COLUMN_DTYPES = ("bool", "int8", "int32", "uint32", "float16", "float32", "float64")


@st.composite
def groups(draw: st.DrawFn, *, finite: bool = False) -> Group:
    """A group whose parts belong together, with everything optional varied."""
    decision = draw(st.none() | st.sampled_from(Decision))
    n = draw(st.integers(0 if decision is not Decision.ACCEPTED else 1, 3))
    rewards = draw(st.lists(FINITE, min_size=n, max_size=n))
    group = make_group(
        draw(st.integers(0, 2047)), decision=decision, n=n, rewards=rewards, tokens=0
    )
    prompt = make_prompt(group.admission_index, answer=draw(st.none() | TEXT), source=draw(TEXT))
    judged = tuple(
        replace(judgement, scores=tuple(draw(st.lists(records(Score), max_size=2))))
        for judgement in group.judgements
        if decision is Decision.ACCEPTED or draw(st.booleans())
    )
    return replace(
        group,
        prompt=replace(
            prompt,
            tests=tuple(draw(st.lists(TEXT, max_size=2))),
            metadata=draw(st.dictionaries(TEXT, TEXT, max_size=2)),
        ),
        rollouts=tuple(_varied(draw, r, finite) for r in group.rollouts),
        judgements=judged,
        timings=draw(st.dictionaries(TEXT, FINITE, max_size=2)),
        error=draw(TEXT),
    )


def _varied(draw: st.DrawFn, rollout: Rollout, finite: bool) -> Rollout:
    if draw(st.integers(0, 4)) == 0:  # a foreign rollout: text alone
        names = ("prompt_ids", "response_ids", "loss_mask", "behaviour_logprobs")
        names += ("raw_logprobs", "policy_versions")
        return replace(
            rollout, **dict.fromkeys(names), weights=(), spans=(), response_text=draw(TEXT)
        )
    length = draw(st.integers(0, 4))
    logprobs = np.array(
        draw(
            st.lists(
                FLOAT32 if not finite else st.floats(-100, 0, width=32),
                min_size=length,
                max_size=length,
            )
        ),
        np.float32,
    )
    columns = draw(
        st.dictionaries(TEXT, st.sampled_from(TOKEN_COLUMN_DTYPES).map(np.dtype), max_size=2)
    )
    return replace(
        rollout,
        prompt_ids=np.arange(draw(st.integers(0, 3)), dtype=np.int32),
        response_ids=np.arange(length, dtype=np.int32),
        loss_mask=np.array([draw(st.booleans()) for _ in range(length)], bool),
        behaviour_logprobs=logprobs,
        raw_logprobs=logprobs[::-1].copy(),
        policy_versions=np.full(length, draw(st.integers(0, 5)), np.int32),
        spans=((0, length, "model", "stop"),) if draw(st.booleans()) else (),
        token_columns={name: np.arange(length).astype(dtype) for name, dtype in columns.items()},
        response_text=draw(TEXT),
        sampling=draw(SAMPLING),
    )
