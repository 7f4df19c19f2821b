"""The proof: a model from scratch learns, through every room, as real processes."""

from __future__ import annotations

import pytest

from tests.end_to_end.running import start, summary


@pytest.mark.slow
def test_the_tiny_example_learns(tmp_path):
    """tiny.toml, shortened: pass rate on held-out prompts rises, every group is accounted for."""
    run_dir = tmp_path / "tiny"
    process = start("examples/tiny.toml", run_dir, "stop.updates=40")
    assert process.wait(timeout=400) == 0, (tmp_path / "tiny.log").read_text()[-4000:]

    result = summary(run_dir)
    assert result["updates"] == 40
    assert result["pass_rate_after"] >= result["pass_rate_before"] + 0.1
    counts = result["audit"]
    assert counts["lost"] == counts["twice"] == counts["in_flight"] == 0
    ends = ("trained", "rejected", "failed", "dropped", "waiting")
    assert counts["admitted"] == sum(counts[name] for name in ends)
    assert counts["max_lag_seen"] <= 1
    assert (run_dir / "report.html").stat().st_size > 10_000
