"""A trainer killed at any change of a file goes on and ends with the same parameters."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest

from tests.infra.faults.checkpoint_writer import names_below, seen, train_and_die, train_to
from tests.infra.faults.dying import DIED, run_child


@pytest.mark.slow
def test_killed_before_any_change_of_a_file(tmp_path: Path) -> None:
    base, undisturbed = tmp_path / "base", tmp_path / "undisturbed"
    train_to(str(base), 1)
    shutil.copytree(base, undisturbed)
    train_to(str(undisturbed), 2)
    (old, _), (new, ledger) = seen(str(base)), seen(str(undisturbed))
    for number in itertools.count(1):
        run = tmp_path / f"killed-{number}"
        shutil.copytree(base, run)
        status = run_child(train_and_die, str(run), 2, number)
        checkpoint, entries = seen(str(run))
        assert checkpoint in (old, new)
        assert entries in (ledger[:1], ledger) and (checkpoint == old or entries == ledger)
        train_to(str(run), 2)
        assert seen(str(run)) == (new, ledger)
        assert names_below(run) == names_below(undisturbed)
        if status == 0:
            break
        assert status == DIED
    assert number > 10
