"""What one optimizer call is computed from: packed rows, and the tokens predicted in them.

A row holds several sequences that may share prompts (``packing`` lays them out). The language-model
head runs only where a token is predicted: ``sources`` names the position whose hidden state
predicts each target; targets of all rows of a micro-batch stand in one list, which leaves less
padding than a list per row. All shapes are static; ``micro_batches`` says how many of the leading
axis are real, so steps with more or fewer of them share one compilation.

Axes: K micro-batches, R rows, L positions of a row, M targets of a micro-batch.
"""

from __future__ import annotations

from typing import Any

import flax.struct

Array = Any
"""numpy on the host, JAX inside the step."""


@flax.struct.dataclass
class Batch:
    tokens: Array
    """int32[K,R,L]; 0 in padding."""
    positions: Array
    """int32[K,R,L], counted within a sequence, prompt first."""
    segments: Array
    """int32[K,R,L], 0 for padding."""
    prefixes: Array
    """int32[K,R,L]: the segment that precedes this one in its sequence, or 0."""
    sources: Array
    """int32[K,M]: position in the flattened rows (row * L + position) that predicts the target."""
    targets: Array
    """int32[K,M]: the sampled token."""
    loss_mask: Array
    """bool[K,M]: false for padding, whose other values are never read."""
    temperatures: Array
    """float32[K,M], from the record; > 0."""
    raw_logprobs: Array
    """float32[K,M]: log mu, temperature only; ratios are taken against this one."""
    behaviour_logprobs: Array
    """float32[K,M]: of the truncated distribution; says how much probability truncation kept."""
    old_logprobs: Array
    """float32[K,M]: log pi_old; read only where ``on_policy`` is false."""
    reference_logprobs: Array
    """float32[K,M]: log pi_ref; read only by objectives that have a reference."""
    advantages: Array
    """float32[K,M]"""
    scales: Array
    """float32[K,M]: the aggregation's numerator (see ``credit``)."""
    sequences: Array
    """int32[K,M]: which of the packed sequences the target belongs to; -1 for padding."""
    owners: Array
    """int32[K,M]: ``sequences`` numbered from 0 within the micro-batch; all of one lie in there."""
    offsets: Array
    """int32[K,M]: which token of that sequence's response it is."""
    denominator: Array
    """float32: the aggregation's global denominator."""
    micro_batches: Array
    """int32: how many of K are real."""
    step: Array
    """int32: the version this step yields; decides the learning rate."""
    on_policy: Array
    """bool: pi_old is pi_theta itself (the first optimizer call of a step)."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(K, R, L, M): what the step is compiled for."""
        return (*self.tokens.shape, self.targets.shape[-1])
