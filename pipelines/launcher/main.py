"""``headrace run CONFIG.toml``: start every role of a run on this machine and watch it."""

from __future__ import annotations

import argparse

_EXAMPLES = """examples:
  headrace run examples/tiny.toml                          start, or go on with, runs/tiny
  headrace run examples/demo.toml --set stop.updates=10    change a key
  headrace run my.toml --dry-run                           check everything, start nothing
  headrace run runs/tiny --set stop.updates=200            go on with the run of a folder
  headrace run my.toml --run-dir gs://bucket/my-run        keep the run in a bucket
"""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="headrace run",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", metavar="CONFIG", help="TOML file, or the location of a run")
    parser.add_argument(
        "--run-dir", metavar="DIR", help="folder or gs://bucket/path; default: runs/<run.name>"
    )
    parser.add_argument(
        "--set",
        metavar="section.key=value",
        action="append",
        default=[],
        help="override one key; may be repeated",
    )
    parser.add_argument("--dry-run", action="store_true", help="check and show the plan only")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON at the end")
    args = parser.parse_args(argv)

    from pipelines.launcher.launch import launch

    return launch(args.config, args.run_dir, args.set, dry_run=args.dry_run, as_json=args.json)
