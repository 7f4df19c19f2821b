"""The command line of every role: data, so that tests can put small programs in their place."""

from __future__ import annotations

import sys
from dataclasses import dataclass

HEADRACE = (sys.executable, "-P", "-m", "infra.commands")
"""``-P``: a folder ``trainer/`` or ``pipelines/`` where the user stands must not be imported."""


@dataclass(frozen=True, kw_only=True)
class RoleCommands:
    """How the launcher starts each role and each one-off job."""

    headrace: tuple[str, ...] = HEADRACE
    """The words before the command's name."""

    def check(self, config: str, prepare: bool) -> tuple[str, ...]:
        words = ("train", config, "--check", "--json")
        return (*self.headrace, *words, *(("--prepare",) if prepare else ()))

    def warm_start(self, run: str, out: str) -> tuple[str, ...]:
        return (*self.headrace, "sft", run, "--out", out)

    def trainer(self, run: str) -> tuple[str, ...]:
        return (*self.headrace, "train", run)

    def worker(self, run: str, port: int) -> tuple[str, ...]:
        return (*self.headrace, "serve", run, "--port", str(port))

    def controller(self, run: str, port: int) -> tuple[str, ...]:
        return (*self.headrace, "control", run, "--port", str(port))

    def pipeline(self, run: str, endpoint: str, process: int) -> tuple[str, ...]:
        words = ("rollouts", run, "--endpoint", endpoint, "--process", str(process))
        return (*self.headrace, *words)

    def evaluate(self, run: str, endpoint: str, version: int) -> tuple[str, ...]:
        words = ("evaluate", run, "--endpoint", endpoint, "--version", str(version), "--json")
        return (*self.headrace, *words)
