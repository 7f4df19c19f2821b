"""One flipped bit in any kind of file: an error or the same content, never other content."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.contracts.errors import HeadraceError, StorageError
from infra.storage.local_store import LocalStore
from infra.storage.object_store import ObjectStore
from tests.infra.faults.checkpoint_writer import seen as seen_checkpoint
from tests.infra.faults.checkpoint_writer import train_to
from tests.infra.faults.writers import WRITERS
from trainer.incarnation import Incarnation

FLIPS = 60


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place // 8] ^= 1 << place % 8
    path.unlink()  # never through a mapping that a reader still holds
    path.write_bytes(data)


def places(path: Path, count: int) -> list[int]:
    bits = path.stat().st_size * 8
    return sorted(random.Random(path.suffix).sample(range(bits), min(count, bits)))


@pytest.mark.parametrize(
    ("writer", "pattern"),
    [
        ("shard", "rollouts/*/*.parquet"),
        ("shard", "rollouts/*/*.manifest.json"),
        ("step", "ledger/step-00000001.json"),
        ("publish", "weights/v00000001/*.safetensors"),
        ("publish", "weights/v00000001/MANIFEST.json"),
        ("publish", "weights/LATEST"),
    ],
)
def test_a_flipped_bit_is_never_read_as_other_content(
    writer: str, pattern: str, tmp_path: Path
) -> None:
    run, look = tmp_path / "run", WRITERS[writer].seen
    WRITERS[writer].before(LocalStore(run))
    right = look(LocalStore(run))
    victim = min(run.glob(pattern))
    noticed = 0
    for place in places(victim, FLIPS):
        flip(victim, place)
        noticed += not same_or_refused(look, LocalStore(run), right, writer == "shard")
        flip(victim, place)
        shutil.rmtree(run / "quarantine", ignore_errors=True)
    assert look(LocalStore(run)) == right
    assert noticed >= FLIPS * 0.8, "the rest is padding, or names that nobody reads"


def same_or_refused(
    look: Callable[[ObjectStore], object], store: LocalStore, right: object, skips: bool
) -> bool:
    """False if it was noticed: by an error, or by leaving a quarantined shard out."""
    try:
        found = look(store)
    except StorageError:
        return False
    if skips and found == []:
        return False
    assert found == right
    return True


def test_a_flipped_bit_in_the_trainers_name_never_lets_it_go_on_as_another(tmp_path: Path) -> None:
    mine = Incarnation(LocalStore(tmp_path), "mine")
    path = tmp_path / "control" / "trainer.json"
    for place in range(path.stat().st_size * 8):
        flip(path, place)
        try:
            mine.check()
        except HeadraceError:
            pass
        else:
            assert b'"incarnation": "mine"' in path.read_bytes()
        flip(path, place)
    mine.check()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax's own
def test_a_flipped_bit_in_a_checkpoint_is_an_error_that_names_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_to(str(run), 1)
    right = seen_checkpoint(str(run))
    noticed = {}
    for path in sorted(p for p in run.glob("checkpoints/1/**/*") if p.is_file()):
        data = path.read_bytes()
        for place in places(path, 6):
            flip(path, place)
            try:
                assert seen_checkpoint(str(run)) == right
            except StorageError as e:
                assert "checkpoints/1" in str(e)
                noticed[len(data)] = True
            path.write_bytes(data)
    assert noticed[max(noticed)] and max(noticed) > 4000, "the arrays themselves"
