"""Fifty readers, one publisher, 200 versions of which four stay: nothing torn, nothing older."""

from __future__ import annotations

import json
import multiprocessing
from collections import Counter
from pathlib import Path

from tests.infra.faults.dying import PRELOAD
from tests.infra.faults.fleet import publish_all, read_all

PROCESSES, THREADS = 5, 10


def test_fifty_readers_never_hold_two_versions_and_never_go_back(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    run, reports = str(tmp_path / "run"), [tmp_path / f"{i}.json" for i in range(PROCESSES)]
    work = [(read_all, (run, THREADS, str(report))) for report in reports]
    children = [context.Process(target=target, args=args) for target, args in work]
    children.append(context.Process(target=publish_all, args=(run,)))
    for child in children:
        child.start()
    for child in children:
        child.join(100)
    assert [child.exitcode for child in children] == [0] * len(children)
    found = [json.loads(report.read_text()) for report in reports]
    assert [problem for report in found for problem in report.pop("problems")] == []
    assert sum(map(Counter, found), Counter())["fetched"] > PROCESSES * THREADS
