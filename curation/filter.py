"""A filter decides about a scored group: a reason to reject it, or ``""`` to keep it.

Like scorers, filters are frozen dataclasses whose fields are their settings. They look at
``task_reward`` (before shaping) and only at trainable rollouts. Rejects are data: the group is
committed to ``rejects/`` with its reason. All pass ``tests/contracts/filter_contract.py``.
"""

from __future__ import annotations

from typing import Protocol

from infra.contracts.records import Group


class Filter(Protocol):
    """Decides about whole groups; never changes them."""

    name: str
    version: int

    @property
    def settings_digest(self) -> str:
        """Names everything that could change a decision besides name and version."""

    def decide(self, group: Group) -> str:
        """Return ``""`` to keep the group, or a short stable word that says why not."""
