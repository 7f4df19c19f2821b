"""``headrace shards``: lists, shows without harm to the terminal, checks every byte."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from infra.contracts.errors import ConfigError
from infra.contracts.records import Decision
from infra.shards import command
from infra.shards.shard_text import printable, quoted
from infra.storage.local_store import LocalStore
from tests.builders import make_group, make_group_id, make_rollout
from tests.infra.shards.stores import write

EVIL = "ok\x1b[2J\x07\u202e\r\nnext"


@pytest.fixture
def run(tmp_path: Path) -> str:
    store = LocalStore(tmp_path)
    group = make_group(0)
    evil = replace(group.rollouts[0], response_text=EVIL)
    write(store, replace(group, rollouts=(evil, group.rollouts[1])), make_group(1))
    write(store, make_group(2, decision=Decision.REJECTED))
    write(store, make_group(3, decision=Decision.FAILED))
    return str(tmp_path)


def test_shards_are_listed(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([run]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["decision", "block", "shard", "groups"]
    assert [line.split()[0] for line in lines[1:]] == ["failures", "rejects", "rollouts"]
    assert lines[3].split()[3:] == ["2", "4", "0..0", "0.500", "0.500", "12"]
    assert command.main([run, "--decision", "rejects", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    (manifest,) = listed["shards"]
    assert listed["quarantined"] == []
    assert manifest["decision"] == "rejects" and len(manifest["groups"]) == 1


def test_a_group_is_shown_with_scores_and_nothing_reaches_the_terminal_raw(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([run, "show", make_group_id(0)[:10]]) == 0
    shown = capsys.readouterr().out
    assert "    | ok\\x1b[2J\\x07\\u202e\\r\n    | next\n" in shown
    assert "exact_answer@1 pass 1: last number compared" in shown
    assert "reference answer: 1" in shown and "reward 0 (task 0)" in shown
    assert all(c.isprintable() or c == "\n" for c in shown)


def test_one_rollout_is_shown_by_its_own_id(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = make_rollout(1, 1).rollout_id
    assert command.main([run, "show", wanted[:12], "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["rollout_id"] == wanted and row["response_ids"] == [111, 112, 113]
    assert row["scores"][0]["components"] == {"exact": 0.0}
    assert command.main([run, "show", wanted]) == 0
    assert "rollout 0" not in capsys.readouterr().out


def test_a_failure_is_shown_with_its_error(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([run, "show", make_group_id(3)]) == 0
    assert "error: ConnectionError: no worker" in capsys.readouterr().out


def test_an_unknown_id_is_an_error(run: str) -> None:
    with pytest.raises(ConfigError, match="begins with 'zz'"):
        command.main([run, "show", "zz"])


@pytest.mark.parametrize("arguments", [["show"], ["list", "ab"], ["--decision", "nonsense"]])
def test_a_wrong_command_line_is_refused(run: str, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main([run, *arguments])
    assert caught.value.code == 2


def test_verify_reads_every_byte_and_list_shows_what_is_quarantined(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([run, "verify"]) == 0
    assert capsys.readouterr().out == "3 shards read, 0 damaged, 0 quarantined\n"
    victim = next(Path(run, "rollouts", "00000000").glob("*.parquet"))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    assert command.main([run, "verify"]) == 1
    shown = capsys.readouterr().out
    assert victim.name in shown and "3 shards read, 1 damaged, 1 quarantined" in shown
    assert command.main([run, "verify", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["shards"] == 3
    assert command.main([run]) == 0
    key = f"rollouts/00000000/{victim.name}"
    assert capsys.readouterr().out.splitlines()[-1] == f"quarantined  {key}"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ünïcode 数", "plain ünïcode 数"),
        ("\x00\x1b\x7f\x9b", "\\x00\\x1b\\x7f\\x9b"),
        ("\u2028\u202e\ufeff", "\\u2028\\u202e\\ufeff"),
        ("tab\tback\\slash", "tab\\tback\\slash"),
    ],
)
def test_text_is_made_printable(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_quotations_keep_line_breaks() -> None:
    assert quoted("a\n\nb", "> ") == ["> a", "> ", "> b"]
