"""Programs are compiled once per test session, not once per test."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import pytest

from trainer.compile_cache import enable_compile_cache


@pytest.fixture(scope="session", autouse=True)
def compile_cache(tmp_path_factory) -> Path:
    cache = Path(os.environ.get("HEADRACE_TEST_CACHE") or tmp_path_factory.mktemp("cache"))
    enable_compile_cache(cache)
    return cache


@pytest.fixture(scope="module", autouse=True)
def quick_compilation(request):
    """Half of these tests' time is LLVM optimising programs that run once on tiny shapes.

    Tests marked slow, and those of whole processes (``end_to_end``), run what users run.
    """
    jax.config.update("jax_disable_most_optimizations", "slow" not in request.keywords)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
