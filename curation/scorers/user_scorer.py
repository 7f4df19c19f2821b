"""The user's own scorer, named ``module:attr`` or ``path/my.py:attr``, in a killable child.

A function ``(response_text: str, answer: str | None, metadata: dict) -> float | bool``, or a
``Scorer``. Its digest covers the source file, so an edit is a new recipe. An exception gives
``infra_error`` (untrainable, never a silent 0), a deadline passed gives ``timeout`` (reward 0).
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import sys
from dataclasses import asdict, dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from curation.scorer import make_score
from curation.scorers.child_process import ChildFailed, ChildProcess, ChildTimeout
from infra.contracts.errors import ConfigError
from infra.contracts.ids import content_id
from infra.contracts.json_codec import from_json, to_json
from infra.contracts.records import Prompt, Rollout, Score, Verdict


@dataclass(frozen=True, kw_only=True)
class UserScorerSettings:
    """Settings table of a user scorer."""

    deadline_secs: float = 5.0
    """Wall time of one call; the child is killed when it passes."""
    start_secs: float = 60.0
    """Time the child may take to import your module."""
    pass_at: float = 1.0
    """Values from here on have the verdict ``pass`` (True always has)."""
    shaping: bool = False

    def __post_init__(self) -> None:
        if self.deadline_secs <= 0 or self.start_secs <= 0:
            raise ValueError("deadline_secs and start_secs must be positive")


@dataclass(frozen=True, kw_only=True)
class UserScorer:
    """Sends each rollout to the child; see the module's docstring."""

    spec: str
    source_digest: str
    settings: UserScorerSettings
    child: ChildProcess = field(compare=False, repr=False)
    version: str = ""

    @property
    def name(self) -> str:
        """File or module and attribute, without the machine's folders."""
        place, _, attr = self.spec.rpartition(":")
        return f"{Path(place).name}:{attr}"

    @property
    def shaping(self) -> bool:
        return self.settings.shaping

    @functools.cached_property
    def settings_digest(self) -> str:
        settings = json.dumps(asdict(self.settings), sort_keys=True)
        return content_id("user scorer", self.name, self.source_digest, settings)

    def score(self, rollout: Rollout, prompt: Prompt) -> Score:
        """Judge one rollout in the child, within ``deadline_secs``."""
        try:
            kind = self.child.start()["kind"]
            request = _as_record(rollout, prompt) if kind == "scorer" else _as_text(rollout, prompt)
            answer = self.child.call(request, self.settings.deadline_secs)
        except ChildTimeout:
            text = f"no answer within {self.settings.deadline_secs:g} s; the scorer was killed"
            return make_score(self, Verdict.TIMEOUT, 0.0, text)
        except ChildFailed as e:
            return make_score(self, Verdict.INFRA_ERROR, 0.0, str(e))
        if "error" in answer:
            return make_score(self, Verdict.INFRA_ERROR, 0.0, str(answer["error"]))
        return self._from_score(answer["score"]) if "score" in answer else self._from_value(answer)

    def _from_score(self, tree: dict[str, Any]) -> Score:
        given = from_json(Score, json.dumps(tree))
        if not math.isfinite(given.value):
            return make_score(self, Verdict.INFRA_ERROR, 0.0, f"returned {given.value}")
        return make_score(self, given.verdict, given.value, given.explanation, given.components)

    def _from_value(self, answer: dict[str, Any]) -> Score:
        value = float(answer["value"])
        if not math.isfinite(value):
            text = f"returned {value}; a reward is a finite number"
            return make_score(self, Verdict.INFRA_ERROR, 0.0, text)
        passed = bool(answer["value"]) if answer["is_bool"] else value >= self.settings.pass_at
        return make_score(self, Verdict.PASS if passed else Verdict.FAIL, value, "user scorer")


def is_user_spec(name: str) -> bool:
    """True for ``module:attr`` and ``path.py:attr``; registry names have no colon."""
    return ":" in name


def open_user_scorer(spec: str, settings: UserScorerSettings) -> UserScorer:
    """Find the source and start the child, so that a mistake is seen before any generation.

    Raises:
        ConfigError: no such file, module or attribute, or it cannot be imported.
    """
    digest = hashlib.sha256(find_source(spec).read_bytes()).hexdigest()[:32]
    # -P: a folder infra/ or curation/ where the user stands must not be imported as ours.
    argv = ("-P", "-m", "curation.scorers.scorer_child", spec)
    child = ChildProcess(argv, start_secs=settings.start_secs)
    try:
        child.start()
    except ChildFailed as e:
        raise ConfigError(f"scorer '{spec}': cannot be loaded: {e}") from e
    return UserScorer(
        spec=spec, source_digest=digest, settings=settings, child=child, version=digest[:8]
    )


def find_source(spec: str) -> Path:
    """Return the file that defines a user scorer, without running it."""
    place, _, attr = spec.rpartition(":")
    if not (place and attr.isidentifier()):
        raise ConfigError(f"scorer '{spec}': give module:attr or path/my.py:attr")
    path = Path(place) if place.endswith(".py") else _module_file(place)
    if not path.is_file():
        raise ConfigError(f"scorer '{spec}': no such file or module; a path is relative to here")
    return path


def _module_file(module: str) -> Path:
    """Look a module up from the current folder on, as the child will; parents are not run."""
    folders: list[str] | None = [os.getcwd(), *sys.path]
    parts = module.split(".")
    found = None
    for end in range(1, len(parts) + 1):
        found = folders and PathFinder.find_spec(".".join(parts[:end]), folders)
        folders = list(found.submodule_search_locations or ()) if found else None
    return Path(found.origin if found and found.origin else module)


def _as_text(rollout: Rollout, prompt: Prompt) -> dict[str, Any]:
    return {
        "text": rollout.response_text,
        "answer": prompt.answer,
        "metadata": dict(prompt.metadata),
    }


def _as_record(rollout: Rollout, prompt: Prompt) -> dict[str, Any]:
    return {"rollout": json.loads(to_json(rollout)), "prompt": json.loads(to_json(prompt))}
