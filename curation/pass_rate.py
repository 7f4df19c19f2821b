"""Pass rates with their uncertainty: the Wilson interval and the unbiased pass@k estimator."""

from __future__ import annotations

import math
from collections.abc import Sequence

Z_95 = 1.959963984540054
"""Two-sided 95 % quantile of the standard normal."""


def wilson_interval(passed: int, total: int, z: float = Z_95) -> tuple[float, float]:
    """Wilson score interval of a proportion (Wilson 1927), which holds near 0 and 1.

    Args:
        passed: Successes, 0 <= passed <= total.
        total: Trials; 0 gives the whole interval (0, 1).
        z: Normal quantile; the default is for 95 %.

    >>> [round(x, 3) for x in wilson_interval(5, 10)]
    [0.237, 0.763]
    """
    if not 0 <= passed <= total:
        raise ValueError(f"passed = {passed} of total = {total}")
    if total == 0:
        return 0.0, 1.0
    share, spread = passed / total, z * z / total
    centre = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / total + spread / total / 4)
    low = 0.0 if passed == 0 else max(0.0, centre - half)
    return low, 1.0 if passed == total else min(1.0, centre + half)


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of k samples passes.

    ``1 - C(n - c, k) / C(n, k)`` (Chen et al. 2021, arXiv 2107.03374), as an exact quotient.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not (0 <= passed <= samples and 1 <= k <= samples):
        raise ValueError(f"samples = {samples}, passed = {passed}, k = {k}: need k <= samples")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def mean_pass_at_k(counts: Sequence[tuple[int, int]], k: int) -> float:
    """Mean of ``pass_at_k`` over problems; ``counts`` holds (samples, passed) of each."""
    if not counts:
        raise ValueError("no problems; at least one is needed")
    return sum(pass_at_k(samples, passed, k) for samples, passed in counts) / len(counts)
