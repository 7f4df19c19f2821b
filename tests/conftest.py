"""Order: the longest tests first, so that no worker of pytest-xdist is left alone with them."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: "end_to_end" not in item.nodeid)
