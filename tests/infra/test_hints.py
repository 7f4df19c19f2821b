from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile

import pytest

from infra.contracts.errors import ConfigError
from infra.hints import FOLDER_VARIABLE, HintListener, send_hint


@pytest.fixture
def folder(monkeypatch):
    """A short path: pytest's own may be too long for a unix socket."""
    with tempfile.TemporaryDirectory(prefix="hr") as path:
        monkeypatch.setenv(FOLDER_VARIABLE, path)
        yield path


def test_hints_arrive_in_order(folder):
    with HintListener("trainer") as listener:
        assert listener.wait(0.0) == []
        assert send_hint("trainer", kind="shard", key="a") == 1
        assert send_hint("trainer", kind="shard", key="b") == 1
        assert listener.wait(5.0) == [{"kind": "shard", "key": "a"}, {"kind": "shard", "key": "b"}]
        assert listener.wait(0.0) == []


def test_every_listener_of_the_role_is_woken(folder):
    with HintListener("worker") as one, HintListener("worker") as two, HintListener("other") as o:
        assert send_hint("worker", version=3) == 2
        assert one.wait(5.0) == two.wait(5.0) == [{"version": 3}]
        assert o.wait(0.0) == []


def test_without_the_variable_nothing_happens(monkeypatch):
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    assert send_hint("trainer", a=1) == 0
    with HintListener("trainer") as listener:
        assert listener.wait(0.0) == [] and listener.wait(-1.0) == []


def test_nobody_there(folder, monkeypatch):
    assert send_hint("trainer") == 0
    monkeypatch.setenv(FOLDER_VARIABLE, f"{folder}/none")
    assert send_hint("trainer") == 0
    with HintListener("trainer") as listener:
        assert send_hint("trainer") == 1 and listener.wait(5.0) == [{}]


def test_a_killed_listener_is_forgotten(folder):
    script = (
        "import os, signal; from infra.hints import HintListener; "
        "HintListener('trainer'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    dead = subprocess.run([sys.executable, "-c", script], check=False)
    assert dead.returncode == -signal.SIGKILL and len(os.listdir(folder)) == 1
    with HintListener("trainer") as listener:
        assert send_hint("trainer") == 1
        assert listener.wait(5.0) == [{}]
    assert os.listdir(folder) == []


def test_a_full_queue_does_not_block_or_raise(folder):
    with HintListener("trainer") as listener:
        sent = sum(send_hint("trainer", text="x" * 1000) for _ in range(2000))
        assert 0 < sent < 2000
        assert len(listener.wait(5.0)) == sent


def test_a_foreign_datagram_still_wakes(folder):
    with HintListener("trainer") as listener:
        path = os.path.join(folder, os.listdir(folder)[0])
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
            stranger.sendto(b"\xff not json", path)
            stranger.sendto(b"[1]", path)
        assert listener.wait(5.0) == [{}, {}]


def test_a_hint_from_another_process(folder):
    script = "from infra.hints import send_hint; assert send_hint('trainer', pid=1) == 1"
    with HintListener("trainer") as listener:
        subprocess.run([sys.executable, "-c", script], check=True)
        assert listener.wait(5.0) == [{"pid": 1}]


def test_too_large_a_hint_is_refused(folder):
    with pytest.raises(ValueError, match="a hint of"):
        send_hint("trainer", text="x" * 70_000)


def test_too_long_a_folder_is_named(folder, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, f"{folder}/{'x' * 100}")
    with pytest.raises(ConfigError, match="give a folder with a shorter path"):
        HintListener("trainer")
