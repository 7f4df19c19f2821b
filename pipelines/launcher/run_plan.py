"""Everything about a run that can be known, and refused, before anything starts."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infra.config import apply_overrides, to_toml
from infra.contracts.errors import HeadraceError
from infra.prompts.prompt_set import load_prompt_set
from infra.run_config import SHARED_SECTIONS, TRAINER_SECTIONS, SharedConfig, parse_shared
from infra.run_tree import is_run_location, read_tree
from infra.storage.open_store import local_folder
from pipelines.launcher.disk_estimate import DiskEstimate, estimate_disk, size
from pipelines.launcher.role_commands import RoleCommands
from pipelines.launcher.role_process import guarded
from pipelines.options import parse_options

Tree = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A validated run that has not started."""

    config: str
    """The file it was read from, for messages."""
    location: str
    """Of the run: a folder or a URL, as the roles are told."""
    folder: Path
    """Of this machine: for a local run the same; for one in a bucket, where logs lie."""
    tree: Tree
    """Every section with every key (see ``trainer.check`` for the objective's): what ``run.toml``
    will hold."""
    shared: SharedConfig
    processes: int
    """Pipeline processes."""
    parameters: int
    objective: str
    disk: DiskEstimate
    train_prompts: int
    held_out_prompts: int
    """How many of them are evaluated; 0: no evaluation."""
    warm_start: bool

    @property
    def remote(self) -> bool:
        """Whether the run lies elsewhere than in a folder of this machine."""
        return "://" in self.location

    def describe(self) -> str:
        """Return the plan for ``--dry-run``."""
        port = self.shared.endpoint.port or "a free port"
        roles = ["trainer", f"worker on {self.shared.endpoint.host}:{port}"]
        roles += ["controller with the embedded Pub/Sub broker on a free port"]
        roles += [f"{self.processes} pipeline process" + "es" * (self.processes > 1)]
        held_out = f"{self.held_out_prompts} held-out ones for evaluation"
        first = "warm start, then the" if self.warm_start else "the"
        return "\n".join(
            [
                f"# plan of {self.config}",
                f"location   {self.location}",
                f"roles      {', '.join(roles)}",
                f"model      {self.parameters:,} parameters",
                f"objective  {self.objective}",
                f"prompts    {self.train_prompts} to train on, {held_out}",
                f"disk       {self.disk}, free {size(free_bytes(self.folder))}"
                + (f" in {self.folder}" if self.remote else ""),
                f"order      {first} trainer and the worker, evaluation of version 0, "
                f"{self.shared.stop.updates} updates, evaluation of the last version",
            ]
        )


def plan_run(
    config: str,
    run_dir: str | None,
    overrides: Iterable[str],
    commands: RoleCommands,
) -> RunPlan:
    """Read and check everything: sections, prompts, scorers, model, in that order.

    Raises:
        ConfigError: one line that says what is wrong and what to do.
    """
    if is_run_location(config):
        run_dir = run_dir or config
    tree, config = read_tree(config)
    tree = apply_overrides(tree, overrides)
    shared = parse_shared(tree, config)
    options = parse_options(tree, config)
    prompts = load_prompt_set(shared.prompts)
    trainer = check_trainer(tree, config, commands, prepare=True)
    own = {name: trainer["sections"][name] for name in TRAINER_SECTIONS}
    resolved = {name: asdict(getattr(shared, name)) for name in SHARED_SECTIONS}
    resolved |= asdict(options) | own
    kept = own["checkpoint"]
    location = (run_dir or str(Path("runs") / shared.run.name)).rstrip("/")
    folder, remote = local_folder(location), location.startswith("gs:")
    disk = estimate_disk(
        shared,
        version_bytes=trainer["version_bytes"],
        checkpoint_bytes=trainer["checkpoint_bytes"],
        keep_versions=kept["keep_versions"],
        keep_checkpoints=kept["keep_checkpoints"],
        every_steps=kept["every_steps"],
    )
    return RunPlan(
        config=config,
        location=location if remote else str(folder),
        folder=folder,
        tree=resolved,
        shared=shared,
        processes=options.pipeline.processes,
        parameters=trainer["parameters"],
        objective=trainer["objective"],
        disk=disk.elsewhere() if remote else disk,
        train_prompts=len(prompts.train),
        held_out_prompts=min(len(prompts.held_out), options.evaluation.problems),
        warm_start=own["warm_start"]["target"] > 0,
    )


def check_trainer(
    tree: Mapping[str, Any], config: str, commands: RoleCommands, *, prepare: bool
) -> Tree:
    """Let the trainer judge its sections, in a child; with ``prepare`` it fetches its model.

    Raises:
        ConfigError: what the trainer said, with the user's own file name.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
        copy = Path(folder) / "resolved.toml"
        copy.write_text(to_toml(tree), encoding="utf-8")
        done = subprocess.run(
            guarded(commands.check(str(copy), prepare)), capture_output=True, text=True, check=False
        )
        said = done.stderr.strip().replace(str(copy), config)
    if done.returncode != 0:
        told = said.rpartition("headrace train: ")[2] or f"it failed with {done.returncode}"
        failure = HeadraceError("; ".join(line for line in told.splitlines() if line.strip()))
        failure.exit_code = done.returncode if done.returncode > 0 else 1
        raise failure
    return json.loads(done.stdout.strip().splitlines()[-1])


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk that holds, or will hold, the folder."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


def used_bytes(folder: Path) -> int:
    """Return what the folder holds already: a resumed run writes over its own part of the plan."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(place, name)).st_size
    return total
