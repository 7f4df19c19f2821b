from __future__ import annotations

import pytest

from infra.run_config import StopConfig
from pipelines.launcher.stop_conditions import RunPosition, stop_reason

GOOD = (0.1, 0.9, 0.9, 0.9, 0.9, 0.9)


@pytest.mark.parametrize(
    ("stop", "position", "reason"),
    [
        ({}, {}, ""),
        ({"updates": 5}, {"version": 4}, ""),
        ({"updates": 5}, {"version": 5}, "updates_reached"),
        ({"wall_secs": 60.0}, {"wall_secs": 59.9}, ""),
        ({"wall_secs": 60.0}, {"wall_secs": 60.0}, "wall_secs"),
        ({}, {"wall_secs": 1e9}, ""),
        ({"target_pass_rate": 0.9}, {"pass_rates": GOOD}, "target_pass_rate"),
        ({"target_pass_rate": 0.91}, {"pass_rates": GOOD}, ""),
        ({"target_pass_rate": 0.5}, {"pass_rates": GOOD[-4:]}, ""),  # too few versions
        ({}, {"pass_rates": GOOD}, ""),
        (
            {"wall_secs": 1.0, "target_pass_rate": 0.9},
            {"wall_secs": 2.0, "pass_rates": GOOD},
            "target_pass_rate",
        ),
    ],
)
def test_stop_reason(stop, position, reason):
    at = RunPosition(**{"version": 0, "wall_secs": 0.0, "pass_rates": (), **position})
    assert stop_reason(StopConfig(**stop), at) == reason
