"""Every command of the one command line exists, explains itself and refuses nonsense."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from infra.commands import COMMANDS

ROOT = Path(__file__).parents[2]


def headrace(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "infra.commands", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(command):
    done = headrace(command, "--help")
    assert done.returncode == 0, done.stderr
    assert f"headrace {command}" in done.stdout


def test_unknown_command_names_the_nearest():
    done = headrace("trian")
    assert done.returncode == 2
    assert done.stderr.strip() == "headrace: no command 'trian'; did you mean 'train'?"
