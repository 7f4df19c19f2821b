"""What each objective makes of the tiny task: pass rates after the same number of updates.

Every arm starts from the same warm start of its seed and trains in one process
(``single_process``), on rollouts that are ``lag`` versions old. ``corrected`` arms have the
behaviour correction of the recipe, ``bare`` ones have it switched off (``never``); objectives whose
own ratio is taken against mu have no bare arm. Reported: the greedy pass rate on held-out problems
before and after, and the sampled pass rate of the training prompts along the way.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.single_process import SingleProcess
from infra.config import nearest, read_toml
from infra.contracts.errors import ConfigError
from trainer.config import parse_trainer
from trainer.model.pretrained import cache_folder, resolve_model
from trainer.objective.recipes import RECIPES
from trainer.sft import warm_start

LEFT_OUT = ("sft", "distill")
"""They need demonstrations, or a teacher."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One run."""

    name: str
    lag: int
    corrected: bool
    seed: int
    before: float
    after: float
    curve: tuple[float, ...]
    """Sampled pass rate on the training prompts, each update."""


def main(argv: list[str]) -> int:
    """Train all arms and print a table, or with ``--json`` one object."""
    every = [name for name in RECIPES if name not in LEFT_OUT]
    parser = argparse.ArgumentParser(prog="headrace bench objectives", description=__doc__)
    parser.add_argument("--names", default=",".join(every), help="separated by commas")
    parser.add_argument("--lags", default="0,1,4")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--problems", type=int, default=256, help="held-out ones")
    parser.add_argument("--lr", type=float, help="learning rate; default: the example's")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    names = args.names.split(",")
    for name in names:
        if name not in RECIPES:
            raise ConfigError(f"--names {name}: no such objective; {nearest(name, RECIPES)}")
    try:
        lags, seeds = ([int(x) for x in text.split(",")] for text in (args.lags, args.seeds))
    except ValueError as e:
        raise ConfigError(f"--lags and --seeds: give whole numbers separated by commas: {e}") from e
    arms = []
    for arm in _arms(names, lags, seeds, args.updates, args.problems, args.lr):
        arms.append(arm)
        print(_line(arm), file=sys.stderr, flush=True)
    table = _table(arms)
    print(json.dumps({"table": table, "arms": [asdict(a) for a in arms]}) if args.json else
          "\n".join(_row(row) for row in table))  # fmt: skip
    return 0


def _arms(
    names: Sequence[str],
    lags: Sequence[int],
    seeds: Sequence[int],
    updates: int,
    problems: int,
    lr: float | None,
) -> Iterator[Arm]:
    config, cache = "examples/tiny.toml", cache_folder(os.environ)
    engine_of: SingleProcess | None = None
    for seed in seeds:
        tree = read_toml(config)
        tree["run"]["seed"] = seed
        if lr is not None:
            tree["optimizer"]["lr"] = lr
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            parsed = parse_trainer(tree, config)
            warm_start(parsed, resolve_model(parsed.own.model, cache), folder, cache, _say)
            for name in names:
                for lag in lags:
                    for corrected in _corrections(name, lag):
                        process = SingleProcess(
                            tree | _sections(tree, name, lag, corrected),
                            config,
                            cache,
                            folder=folder,
                            lag=lag,
                            before=engine_of,
                        )
                        engine_of = process
                        before = process.evaluate(0, problems)
                        curve = [process.update(v)["pass_rate"] for v in range(updates)]
                        yield Arm(
                            name=name,
                            lag=lag,
                            corrected=corrected,
                            seed=seed,
                            before=before,
                            after=process.evaluate(updates, problems),
                            curve=tuple(curve),
                        )


def _corrections(name: str, lag: int) -> tuple[bool, ...]:
    """Which arms there are: without a correction only where one would be due."""
    return (True, False) if lag and RECIPES[name].correction in ("auto", "on") else (True,)


def _sections(tree: dict, name: str, lag: int, corrected: bool) -> dict:
    wish = "auto" if corrected else "never"
    return {
        "objective": {"name": name, "behaviour_correction": wish},
        "admission": tree["admission"] | {"max_lag": lag},
    }


def _table(arms: Sequence[Arm]) -> list[dict]:
    """Median over seeds."""
    keys = dict.fromkeys((a.name, a.lag, a.corrected) for a in arms)
    rows = []
    for name, lag, corrected in keys:
        found = [a for a in arms if (a.name, a.lag, a.corrected) == (name, lag, corrected)]
        row = {"name": name, "lag": lag, "corrected": corrected, "seeds": len(found)}
        for part in ("before", "after"):
            row[part] = round(statistics.median(getattr(a, part) for a in found), 3)
        row["worst"] = round(min(a.after for a in found), 3)
        rows.append(row)
    return rows


def _row(row: dict) -> str:
    correction = "corrected" if row["corrected"] else "bare"
    return (
        f"{row['name']:<14} lag {row['lag']}  {correction:<9}  "
        f"{row['before']:.1%} -> {row['after']:.1%}  (worst of {row['seeds']}: {row['worst']:.1%})"
    )


def _line(arm: Arm) -> str:
    return _row(asdict(arm) | {"seeds": 1, "worst": arm.after}) + f"  seed {arm.seed}"


def _say(text: str) -> None:
    print(text, file=sys.stderr)
