"""Programs are compiled once per test session, not once per test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainer.compile_cache import enable_compile_cache


@pytest.fixture(scope="session", autouse=True)
def compile_cache(tmp_path_factory) -> Path:
    cache = Path(os.environ.get("HEADRACE_TEST_CACHE") or tmp_path_factory.mktemp("cache"))
    enable_compile_cache(cache)
    return cache
