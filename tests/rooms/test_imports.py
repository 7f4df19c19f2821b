"""The import table of docs/design.md section 1: directions by syntax, weight by running."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("infra", "curation", "transforms", "pipelines", "trainer")
MAY_IMPORT = {
    "infra": set(),
    "curation": {"infra"},
    "transforms": {"curation", "infra"},
    "pipelines": {"transforms", "curation", "infra"},
    "trainer": {"infra"},
    "benchmarks": set(ROOMS),
}
NEVER = {
    "infra": {"apache_beam", "jax", "flax", "optax", "orbax"},
    "curation": {"apache_beam", "jax", "flax", "optax", "orbax"},
    "transforms": {"jax", "flax", "optax", "orbax"},
    "pipelines": {"jax", "flax", "optax", "orbax"},
    "trainer": {"apache_beam"},
    "benchmarks": set(),
}
BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}


def modules(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def imports_of(path: Path) -> set[str]:
    """Top-level names of everything a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports_follow_the_arrows(room):
    wrong = {}
    for path in modules(room):
        bad = {
            name
            for name in imports_of(path)
            if (name in ROOMS and name != room and name not in MAY_IMPORT[room])
            or name in NEVER[room]
        }
        if bad:
            wrong[str(path.relative_to(ROOT))] = sorted(bad)
    assert not wrong


@pytest.mark.parametrize("room", [*ROOMS, "benchmarks"])
def test_files_and_functions_stay_small_and_well_named(room):
    wrong = []
    for path in modules(room):
        text, name = path.read_text(), str(path.relative_to(ROOT))
        if text.count("\n") > 300:
            wrong.append(f"{name}: {text.count(chr(10))} lines, at most 300")
        if BANNED_NAMES & {path.stem, *path.parts}:
            wrong.append(f"{name}: a name that says nothing")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 60:
                wrong.append(f"{name}: {node.name} has {node.end_lineno - node.lineno + 1} lines")
    assert not wrong


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_resolve_inside_the_repository(room):
    """`pipelines`, `trainer` and `transforms` are also names on PyPI."""
    spec = importlib.util.find_spec(room)
    assert spec and Path(spec.origin).parent == ROOT / room


def loaded_after(code: str) -> set[str]:
    """Top-level packages in sys.modules of a fresh interpreter that ran ``code``."""
    listing = "print(*{m.split('.')[0] for m in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\n{listing}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=True,
    )
    return set(done.stdout.splitlines()[-1].split())


def import_all(room: str) -> str:
    names = [
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for p in modules(room)
    ]
    return "\n".join(f"import {name}" for name in names)


@pytest.mark.parametrize(
    ("room", "heavy"),
    [
        ("infra", {"apache_beam", "jax", "flax"}),
        ("curation", {"apache_beam", "jax", "flax"}),
        ("transforms", {"jax", "flax"}),
        ("pipelines", {"jax", "flax"}),
        ("trainer", {"apache_beam"}),
    ],
)
def test_no_room_loads_what_it_must_not(room, heavy):
    assert not loaded_after(import_all(room)) & heavy


def test_the_command_line_is_light():
    """`headrace --help` and the launcher's own modules start without Beam, JAX or pyarrow."""
    code = "from infra.commands import main\nmain(['--help'])"
    assert not loaded_after(code) & {"apache_beam", "jax", "pyarrow", "rich", "numpy"}
