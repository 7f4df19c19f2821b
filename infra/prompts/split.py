"""The held-out split: by hash of the prompt id, so that it survives reordering and growth."""

from __future__ import annotations

from infra.contracts.ids import content_id


def is_held_out(prompt_id: str, share: float) -> bool:
    """Tell whether the prompt's hash, seen as a number in [0, 1), is below ``share``."""
    return int(content_id("held out", prompt_id)[:13], 16) / 16**13 < share
