"""The one command line, ``headrace``: a table of names, nothing imported before it is needed.

Rooms are named here as text, so that this room imports none of them and ``headrace --help`` stays
fast. Each target is ``main(argv) -> exit code``.
"""

from __future__ import annotations

import importlib
import os
import sys

from infra.config import nearest
from infra.contracts.errors import ConfigError, HeadraceError

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("pipelines.launcher.main:main", "start every role of a run here and watch it"),
    "init": ("pipelines.launcher.init:main", "write a configuration for your own prompts"),
    "branch": ("pipelines.launcher.branch:main", "start a new run from a version of an old one"),
    "control": ("pipelines.controller.main:main", "admit prompts (the controller role)"),
    "rollouts": ("pipelines.stream_rollouts:main", "stream rollouts (the pipeline role)"),
    "serve": ("trainer.inference_worker.main:main", "answer generation requests (inference)"),
    "worker": ("infra.inference.worker_command:main", "look at, pause, abort or drain a worker"),
    "train": ("trainer.main:main", "consume shards, publish weights (the trainer role)"),
    "sft": ("trainer.sft:main", "supervised warm start for a small model"),
    "evaluate": ("pipelines.evaluate_policy:main", "pass@k of a version on held-out prompts"),
    "shards": ("infra.shards.command:main", "list and read a run's committed shards"),
    "weights": ("infra.weights.command:main", "list, check and export a run's versions"),
    "export": ("infra.weights.export_command:main", "write a version as a Hugging Face folder"),
    "import": ("trainer.import_model:main", "check a Hugging Face folder and say how to use it"),
    "audit": ("infra.ledger.command:main", "account for every admitted group of a run"),
    "bench": ("benchmarks.command:main", "measure, against a named peer, in one run"),
}

_ROOMS = frozenset(target.partition(".")[0] for target, _ in COMMANDS.values())


def main(argv: list[str] | None = None) -> int:
    """Run one command; known problems become one line on stderr and their exit code."""
    argv = sys.argv[1:] if argv is None else argv
    name = f"headrace {argv[0]}" if argv and argv[0] in COMMANDS else "headrace"
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except HeadraceError as e:
        print(f"{name}: {e}", file=sys.stderr)
        return e.exit_code
    except ModuleNotFoundError as e:
        package = (e.name or "").partition(".")[0]
        if package in _ROOMS:
            raise
        print(
            f"{name}: needs the package '{package}', which is not installed; "
            "pip install 'headrace[beam,jax]' brings what all commands need",
            file=sys.stderr,
        )
        return ConfigError.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `headrace shards RUN | head`
        # The interpreter flushes once more when it ends; let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        print("usage: headrace COMMAND ...   (headrace COMMAND --help tells more)\n")
        print("\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()))
        return 0
    if argv[0] in ("-V", "--version"):
        from importlib.metadata import version

        print(f"headrace {version('headrace')}")
        return 0
    if argv[0] not in COMMANDS:
        raise ConfigError(f"no command '{argv[0]}'; {nearest(argv[0], COMMANDS)}")
    module, _, function = COMMANDS[argv[0]][0].partition(":")
    return int(getattr(importlib.import_module(module), function)(argv[1:]) or 0)


if __name__ == "__main__":
    sys.exit(main())
