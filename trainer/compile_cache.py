"""Keep compiled programs across processes: a restart then takes seconds, not a minute."""

from __future__ import annotations

from pathlib import Path

import jax


def enable_compile_cache(cache: Path) -> None:
    """Let JAX store compiled programs under ``<cache>/jax``."""
    jax.config.update("jax_compilation_cache_dir", str(cache / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
