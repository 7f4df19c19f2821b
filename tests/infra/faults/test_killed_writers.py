"""The fault table: whatever a writer is killed in, readers see the old state or the new one."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.storage.local_store import LocalStore
from tests.infra.faults.dying import DIED, Moment, moments_of, run_child
from tests.infra.faults.writers import WRITERS, dry_run, files_below, write_and_die


def table() -> Iterator[object]:
    for name in WRITERS:
        with tempfile.TemporaryDirectory() as folder:
            calls = dry_run(name, folder)
        for number, moment, call in moments_of(calls):
            yield pytest.param(name, number, moment, id=f"{name}: {moment} {number} {call}")


def check(name: str, folder: Path, number: int, moment: Moment) -> bool:
    """Kill, look, go on, compare. False if the writer was through before it could be killed."""
    writer = WRITERS[name]
    undisturbed, run = folder / f"undisturbed-{number}", folder / f"killed-{number}"
    for place in (undisturbed, run):
        writer.before(LocalStore(place))
    old = writer.seen(LocalStore(undisturbed))
    writer.write(LocalStore(undisturbed))
    new = writer.seen(LocalStore(undisturbed))
    assert old != new

    status = run_child(write_and_die, name, str(run), number, moment)
    assert writer.seen(LocalStore(run)) in (old, new)
    writer.write(LocalStore(run))
    assert writer.seen(LocalStore(run)) == new
    for place in (undisturbed, run):  # what a kill left beside an object, the next writer removes
        writer.then(LocalStore(place))
    assert files_below(run) == files_below(undisturbed)
    return status == DIED


@pytest.mark.parametrize(("name", "number", "moment"), list(table()))
def test_killed_in_a_store_call(name: str, number: int, moment: Moment, tmp_path: Path) -> None:
    assert check(name, tmp_path, number, moment)


@pytest.mark.parametrize("name", WRITERS)
def test_killed_before_any_change_of_a_file(name: str, tmp_path: Path) -> None:
    """Between the calls of a local store there are more moments: temporary files, links."""
    numbers = itertools.count(1)
    assert list(itertools.takewhile(lambda n: check(name, tmp_path, n, Moment.FILE), numbers))
