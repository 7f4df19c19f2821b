from __future__ import annotations

import tomllib
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.config import apply_overrides, nearest, parse_section, read_toml, to_toml
from infra.contracts.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Section:
    name: str
    steps: int = 1
    lr: float = 0.5
    on: bool = False
    kind: Literal["a", "b"] = "a"
    items: tuple[str, ...] = ()
    rates: tuple[float, ...] = ()
    table: dict[str, Any] | None = None
    weights: dict[str, float] | None = None
    maybe: float | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps = {self.steps}; at least 1")


@pytest.mark.parametrize(
    "table, field, value",
    [
        ({}, "steps", 1),
        ({"steps": 7}, "steps", 7),
        ({"lr": 2}, "lr", 2.0),
        ({"lr": 2.5}, "lr", 2.5),
        ({"on": True}, "on", True),
        ({"kind": "b"}, "kind", "b"),
        ({"items": ["x", "y"]}, "items", ("x", "y")),
        ({"rates": [1, 2.5]}, "rates", (1.0, 2.5)),
        ({"table": {"x": [1]}}, "table", {"x": [1]}),
        ({"weights": {"x": 1}}, "weights", {"x": 1.0}),
        ({"maybe": 3}, "maybe", 3.0),
    ],
)
def test_values_arrive_as_their_type(table, field, value):
    got = getattr(parse_section(Section, {"name": "n", **table}, "f [s]"), field)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    "table, words",
    [
        ({"stepz": 1}, "unknown key 'stepz'; did you mean 'steps'?"),
        ({"qqqq": 1}, "unknown key 'qqqq'; known: items, kind, "),
        ({"steps": 1.0}, "steps = 1.0: expected a whole number, got float"),
        ({"steps": True}, "steps = True: expected a whole number, got bool"),
        ({"steps": "1"}, "expected a whole number, got str"),
        ({"on": 1}, "expected true or false, got int"),
        ({"lr": "fast"}, "lr = 'fast': expected a number, got str"),
        ({"lr": True}, "expected a number, got bool"),
        ({"kind": "c"}, "kind = 'c': must be one of 'a', 'b'"),
        ({"kind": []}, "must be one of 'a', 'b'"),
        ({"items": "x"}, "items = 'x': expected a list"),
        ({"items": [1]}, "expected text, got int"),
        ({"table": 1}, "table = 1: expected a table"),
        ({"weights": {"x": "y"}}, "weights = {'x': 'y'}: expected"),
        ({"maybe": "x"}, "maybe = 'x': expected a number"),
        ({"name": 3}, "name = 3: expected text, got int"),
        ({"steps": 0}, "steps = 0; at least 1"),
    ],
)
def test_what_is_wrong_is_said(table, words):
    with pytest.raises(ConfigError) as e:
        parse_section(Section, {"name": "n", **table}, "run.toml [s]")
    assert str(e.value).startswith("run.toml [s]: ") and words in str(e.value)
    assert "\n" not in str(e.value)


def test_all_problems_come_in_one_error():
    with pytest.raises(ConfigError) as e:
        parse_section(Section, {"stepz": 1, "lr": "x", "kind": "c"}, "f")
    for words in ("unknown key 'stepz'", "lr = 'x'", "kind = 'c'", "'name' is missing"):
        assert words in str(e.value)


@pytest.mark.parametrize(
    "override, value",
    [
        ("a.x=1", 1),
        ("a.x=1e-5", 1e-5),
        ("a.x=true", True),
        ('a.x="1"', "1"),
        ("a.x=hello world", "hello world"),
        ("a.x=[1, 2]", [1, 2]),
        ("a.x={y = 1}", {"y": 1}),
        ("a.x=", ""),
        ("a.x=k=v", "k=v"),
        (" a . x = 3", 3),
        ("a.x=runs/demo", "runs/demo"),
    ],
)
def test_overrides(override, value):
    tree = {"a": {"x": 0, "y": 5}, "b": {"z": 1}}
    got = apply_overrides(tree, [override])
    assert got == {"a": {"x": value, "y": 5}, "b": {"z": 1}}
    assert tree["a"] == {"x": 0, "y": 5}, "the tree itself stays"


def test_overrides_apply_in_order_and_make_sections():
    assert apply_overrides({}, ["a.x=1", "a.x=2", "b.y=3"]) == {"a": {"x": 2}, "b": {"y": 3}}


@pytest.mark.parametrize("override", ["a", "a.x", "x=1", ".x=1", "a.=1", "=1", "", "top.x=1"])
def test_broken_overrides_are_named(override):
    with pytest.raises(ConfigError, match="--set ") as e:
        apply_overrides({"top": 3}, [override])
    assert override in str(e.value)


@pytest.mark.parametrize(
    "content, words",
    [
        (None, "no such file; give the path of a TOML configuration"),
        (b"[a\n", "cannot be read as TOML: .*line 1"),
        (b"a = \xff\xfe", "cannot be read as TOML"),
        (b"[a]\nx = 1\nx = 2\n", "cannot be read as TOML: .*line 3"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, content, words):
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as e:
        read_toml(path)
    assert str(path) in str(e.value)


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read as TOML"):
        read_toml(tmp_path)


@pytest.mark.parametrize(
    "name, said",
    [("wieghts", "did you mean 'weights'?"), ("zzz", "known: audit, weights")],
)
def test_nearest(name, said):
    assert nearest(name, ["weights", "audit"]) == said


PLAIN = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)


@settings(deadline=None)
@given(st.dictionaries(NAMES, st.dictionaries(NAMES, PLAIN, max_size=4), max_size=3))
def test_what_is_written_is_read_back(tree):
    assert tomllib.loads(to_toml(tree)) == tree


def test_absent_values_are_left_out():
    assert tomllib.loads(to_toml({"a": {"x": None, "y": 1, "z": ("p", "q")}})) == {
        "a": {"y": 1, "z": ["p", "q"]}
    }
