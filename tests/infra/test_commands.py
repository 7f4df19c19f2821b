from __future__ import annotations

import subprocess
import sys

import pytest

from infra import commands
from infra.commands import COMMANDS, main


def headrace(*argv: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "infra.commands", *argv]
    return subprocess.run(command, check=False, text=True, capture_output=True, **options)


@pytest.mark.parametrize("argv", [[], ["-h"], ["--help"]])
def test_help_names_every_command(argv, capsys):
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out and text in out for name, (_, text) in COMMANDS.items())


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("headrace 0.")


@pytest.mark.parametrize(
    "name, hint", [("weigths", "did you mean 'weights'?"), ("zzz", "known: audit, ")]
)
def test_unknown_commands_name_the_nearest(name, hint, capsys):
    assert main([name]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"headrace: no command '{name}'; ") and hint in err
    assert err.count("\n") == 1


TARGETS = """
from infra.contracts.errors import Fenced, InferenceError, Preempted, StorageError

def returns_none(argv): print(argv)
def returns_three(argv): return 3
def storage(argv): raise StorageError("ledger/step-1: cannot read")
def inference(argv): raise InferenceError("no worker")
def fenced(argv): raise Fenced("another trainer lives")
def preempted(argv): raise Preempted("saved")
def interrupted(argv): raise KeyboardInterrupt
def lacks_package(argv): import no_such_package.inside
def lacks_room_module(argv): import trainer.no_such_module
def many_lines(argv): print("x\\n" * 1_000_000)
def bug(argv): raise ZeroDivisionError("a bug")
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Return a function that points the command ``shards`` at one of the targets above."""
    (tmp_path / "targets_of_test_commands.py").write_text(TARGETS)
    monkeypatch.syspath_prepend(tmp_path)

    def point(function: str) -> None:
        target = (f"targets_of_test_commands:{function}", "")
        monkeypatch.setitem(commands.COMMANDS, "shards", target)

    return point


@pytest.mark.parametrize(
    "function, code, err",
    [
        ("returns_none", 0, ""),
        ("returns_three", 3, ""),
        ("storage", 3, "headrace shards: ledger/step-1: cannot read\n"),
        ("inference", 4, "headrace shards: no worker\n"),
        ("fenced", 75, "headrace shards: another trainer lives\n"),
        ("preempted", 76, "headrace shards: saved\n"),
        ("interrupted", 130, ""),
        ("lacks_package", 2, "headrace shards: needs the package 'no_such_package', which"),
    ],
)
def test_outcomes(command, capsys, function, code, err):
    command(function)
    assert main(["shards", "RUN", "--flag"]) == code
    out, got = capsys.readouterr()
    assert got.startswith(err) and got.count("\n") == (1 if err else 0)
    assert out == ("['RUN', '--flag']\n" if function == "returns_none" else "")


@pytest.mark.parametrize(
    "function, error", [("bug", ZeroDivisionError), ("lacks_room_module", ModuleNotFoundError)]
)
def test_bugs_show_their_traceback(command, function, error):
    command(function)
    with pytest.raises(error):
        main(["shards"])


def test_a_reader_that_leaves_is_no_error(tmp_path):
    """``headrace ... | head``: nothing on stderr, whether the text fills the pipe or not."""
    (tmp_path / "targets_of_test_commands.py").write_text(TARGETS)
    script = (
        "import sys; from infra import commands; "
        "commands.COMMANDS['shards'] = ('targets_of_test_commands:many_lines', ''); "
        "sys.exit(commands.main(sys.argv[1:]))"
    )
    for argv in (["shards"], ["--help"], ["weights", "--help"]):
        process = subprocess.Popen(
            [sys.executable, "-c", script, *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PYTHONPATH": f"{tmp_path}:{':'.join(sys.path)}"},
        )
        process.stdout.close()
        assert process.stderr.read() == b""
        process.stderr.close()
        assert process.wait() == 0


def test_help_imports_nothing_heavy():
    script = (
        "import sys; from infra.commands import main; main(['--help']); "
        "heavy = {'numpy', 'jax', 'apache_beam', 'pyarrow'} & sys.modules.keys(); "
        "sys.exit(' '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_as_a_module():
    assert headrace("--help").returncode == 0
    wrong = headrace("nope")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
