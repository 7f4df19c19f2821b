"""``headrace export RUN[@VERSION] --to FOLDER``: a version as a Hugging Face folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from infra.weights.command import main as weights


def main(argv: Sequence[str]) -> int:
    """``headrace weights RUN@VERSION export FOLDER``, under the name people look for."""
    parser = argparse.ArgumentParser(prog="headrace export", description=__doc__)
    parser.add_argument("run", metavar="RUN[@VERSION]", help="the run; default: its newest version")
    parser.add_argument("--to", required=True, metavar="FOLDER", help="absent or empty")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args(argv)
    return weights([args.run, "export", args.to, *(["--json"] if args.json else [])])
