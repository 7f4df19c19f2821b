from __future__ import annotations

import pytest

from pipelines.launcher.compare_configs import differing_keys

BASE = {"run": {"name": "a", "seed": 0}, "optimizer": {"lr": 1.0}, "sampling": {"stop": ["\n"]}}


def changed(**sections):
    return {**BASE, **{name: {**BASE.get(name, {}), **table} for name, table in sections.items()}}


@pytest.mark.parametrize(
    ("wanted", "changes"),
    [
        (BASE, ()),
        (changed(stop={"updates": 9}), ()),
        (changed(endpoint={"port": 9}), ()),
        (changed(optimizer={"lr": 1}), ()),
        (changed(sampling={"stop": ("\n",)}), ()),
        (changed(run={"seed": 1}), ("run.seed: 0 -> 1",)),
        (changed(endpoint={"host": "b"}), ("endpoint.host: (not set) -> 'b'",)),
        (
            changed(run={"name": "b"}, sampling={"stop": []}),
            ("run.name: 'a' -> 'b'", "sampling.stop: ['\\n'] -> []"),
        ),
        ({"run": BASE["run"], "sampling": BASE["sampling"]}, ("optimizer.lr: 1.0 -> (not set)",)),
    ],
)
def test_differing_keys(wanted, changes):
    assert differing_keys(BASE, wanted) == changes


def test_a_long_value_is_cut():
    (change,) = differing_keys({"a": {"b": "x"}}, {"a": {"b": "y" * 500}})
    assert len(change) < 90
