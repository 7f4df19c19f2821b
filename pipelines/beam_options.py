"""Beam's own options: what is left of a command line, checked, because Beam only warns."""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Iterator, Sequence

from infra.config import nearest
from infra.contracts.errors import ConfigError


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Import Beam without its warnings about cloud libraries that are not installed."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def beam_flags(argv: Sequence[str], runner: str, *, streaming: bool) -> list[str]:
    """Return the flags for ``PipelineOptions``: the runner named, everything else as given.

    Raises:
        ConfigError: a flag that Beam does not know, with the nearest it does, or no one runner.
    """
    from pipelines.options import refuse_runner

    flags = list(argv)
    parser = _parser()
    known, unknown = parser.parse_known_args(flags)
    if unknown:
        names = [name for action in parser._actions for name in action.option_strings]
        hint = nearest(unknown[0].partition("=")[0], names) if unknown[0][0] == "-" else ""
        hint = hint if hint.startswith("did you") else "options go to Apache Beam"
        raise ConfigError(f"unknown option '{unknown[0]}'; {hint}")
    if known.runner:
        problems = refuse_runner(known.runner)
        if problems:
            raise ConfigError(problems[0])
    else:
        flags.append(f"--runner={runner}")
    if streaming and "--streaming" not in flags:
        flags.append("--streaming")
    return flags


def _parser() -> argparse.ArgumentParser:
    from apache_beam.options import pipeline_options
    from apache_beam.options.pipeline_options import PipelineOptions

    parser = pipeline_options._BeamArgumentParser(add_help=False, allow_abbrev=False)
    for cls in sorted(PipelineOptions.__subclasses__(), key=lambda cls: cls.__name__):
        if cls.__module__.startswith("apache_beam.") and "_add_argparse_args" in vars(cls):
            with contextlib.suppress(argparse.ArgumentError):  # two classes, one flag
                cls._add_argparse_args(parser)
    return parser
