from __future__ import annotations

import time

import pytest

from infra.clock import ManualClock, SystemClock


def test_manual_clock_moves_only_by_hand():
    clock = ManualClock(10.0)
    assert clock.now() == clock.now() == 10.0
    clock.wait(2.5)
    clock.advance(1.0)
    clock.wait(-3.0)
    assert clock.now() == 13.5
    with pytest.raises(ValueError, match="does not go back"):
        clock.advance(-1.0)


def test_system_clock():
    clock = SystemClock()
    before = time.time()
    clock.wait(0.0)
    clock.wait(-1.0)
    assert before <= clock.now() <= time.time()
