"""The child process that runs one user scorer: JSON lines in, JSON lines out, nothing pickled.

``python -m curation.scorers.scorer_child SPEC`` answers the greeting
``{"kind": "function"}`` (or ``scorer``), then one line per request. The user's own prints go to
stderr, so they cannot break the protocol; the process ends when its stdin does, even while the
user's code is running. The parent kills it when a deadline passes.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from infra.contracts.json_codec import from_json, to_json
from infra.contracts.records import Prompt, Rollout


def load(spec: str) -> Any:
    """Import what ``module:attr`` or ``path/my.py:attr`` names; a class is instantiated."""
    place, _, attr = spec.rpartition(":")
    if place.endswith(".py"):
        path = Path(place).resolve()
        sys.path.insert(0, str(path.parent))
        found = importlib.util.spec_from_file_location(path.stem, path)
        assert found and found.loader
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
    else:
        sys.path.insert(0, os.getcwd())
        module = importlib.import_module(place)
    target = getattr(module, attr)
    return target() if isinstance(target, type) else target


def answer(target: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Run the user's code on one request; its exceptions become text."""
    try:
        if hasattr(target, "score"):
            rollout = from_json(Rollout, json.dumps(request["rollout"]))
            prompt = from_json(Prompt, json.dumps(request["prompt"]))
            return {"score": json.loads(to_json(target.score(rollout, prompt)))}
        value = target(request["text"], request["answer"], request["metadata"])
    except Exception as e:
        return {"error": f"{type(e).__name__}: {e}"}
    if isinstance(value, bool) or type(value).__name__ == "bool_":
        return {"value": bool(value), "is_bool": True}
    try:
        return {"value": float(value), "is_bool": False}
    except (TypeError, ValueError):
        kind = type(value).__name__
        return {"error": f"returned {kind}; a scorer returns a number, True or False"}


def serve(target: Any, lines: Callable[[], bytes], out: BinaryIO) -> None:
    """Answer lines until the process is ended from outside (see ``_read_all``)."""
    while True:
        _write(out, answer(target, json.loads(lines())))


def _write(out: BinaryIO, message: dict[str, Any]) -> None:
    out.write(json.dumps(message).encode() + b"\n")
    out.flush()


def _read_all(source: BinaryIO, lines: queue.SimpleQueue[bytes]) -> None:
    for line in source:
        lines.put(line)
    os._exit(0)  # the parent is gone; the user's code may be running and must not outlive it


def main() -> None:
    out = os.fdopen(os.dup(1), "wb")
    source = os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    try:
        target = load(sys.argv[1])
        if not (callable(target) or hasattr(target, "score")):
            raise TypeError(f"{type(target).__name__} is neither a function nor a scorer")
    except Exception as e:
        _write(out, {"error": f"{type(e).__name__}: {e}"})
        return
    _write(out, {"kind": "scorer" if hasattr(target, "score") else "function"})
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_all, args=(source, lines), daemon=True).start()
    serve(target, lines.get, out)


if __name__ == "__main__":
    main()
