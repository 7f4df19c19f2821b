"""Manifests and ledger entries: the markers that make data visible.

A reader looks only at these. ``created_at`` (Unix seconds) is outside every digest.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from infra.contracts.records import SCHEMA_VERSION, Decision

WEIGHTS_SCHEMA_VERSION = 2
"""2: pieces, block checksums, casts, deltas."""
BLOCK_BYTES = 4 << 20
"""How many bytes of a tensor (or piece) share a checksum: what a reader of a few rows reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEntry:
    """What a reader needs to know of a group without opening its shard."""

    group_id: str
    admission_index: int
    prompt_id: str
    rollouts: int
    oldest_version: int
    """Oldest policy version in any rollout; the admission's ``min_version`` if there is none."""
    newest_version: int
    reward_mean: float
    pass_rate: float
    """Share of rollouts whose first scorer said ``pass``."""
    tokens: int
    """Sampled tokens, all rollouts together."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardManifest:
    """Commits one shard: whole groups of one block, one decision, one recipe, one schema."""

    run: str
    decision: Decision
    block: int
    data_key: str
    data_digest: str
    """SHA-256 of the shard's content without timings; also the file's name."""
    size_bytes: int
    crc32c: int
    rows: int
    groups: tuple[GroupEntry, ...]
    recipe_digest: str
    capabilities: tuple[str, ...]
    """``scorable`` (text), ``trainable`` (ids and log-probs). The trainer refuses without it."""
    oldest_version: int
    newest_version: int
    created_at: float
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPiece:
    """Where one piece of a cut tensor lies; the fields are those of ``TensorEntry``."""

    part: int
    offset: int
    size_bytes: int
    crc32c: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Where one tensor lies, and its checksums."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    part: int
    """Index into ``WeightManifest.parts``, of a cut tensor that of its first piece; -1: not in this
    version, it is the base's, changed by its ``TensorDelta`` if it has one."""
    offset: int
    """Bytes from the beginning of the file."""
    size_bytes: int
    crc32c: int
    """Of the whole tensor, also where it is cut or must be rebuilt from a base."""
    blocks: tuple[int, ...] = ()
    """crc32c of all bytes up to the end of each block of ``BLOCK_BYTES`` but the last, whose is
    ``crc32c``: continued from one, the next must come out. Empty: it is one block."""
    axis: int = 0
    """Along which it is cut into ``pieces`` of equal shape."""
    pieces: tuple[TensorPiece, ...] = ()
    """Empty: it lies in one piece, at ``part`` and ``offset``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDelta:
    """How one piece of a tensor follows from the base's (see ``infra.weights.delta``)."""

    name: str
    piece: int
    part: int
    offset: int
    size_bytes: int
    crc32c: int
    """Of the stored bytes; the rebuilt piece has that of its ``TensorEntry``."""
    raw_bytes: int
    """Uncompressed; equal to ``size_bytes`` if it is stored as it is, else it is zstd."""
    changed: int
    """How many elements differ from the base."""
    far: int
    """How many of the gaps between them are too long for a byte."""
    wide: int
    """How many of the differences are too large for a byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPart:
    key: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseVersion:
    """The full version that a delta version changes."""

    version: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """Commits one policy version."""

    run: str
    version: int
    digest: str
    """Hash over every tensor's name, shape, dtype and crc32c: names the weights themselves."""
    parts: tuple[WeightPart, ...]
    tensors: tuple[TensorEntry, ...]
    parent: str
    """Digest of the version before; ``""`` for the first; ``replay`` after a diverged replay."""
    optimizer_step: int
    """Optimizer calls made so far (a version may be made of several)."""
    model_config: dict[str, object]
    tokenizer_digest: str
    incarnation: str
    """The trainer incarnation that published it."""
    created_at: float
    updated_at: float = 0.0
    """When the optimizer state was updated (Unix seconds, the trainer's clock); 0: not known."""
    epoch: int = 0
    """Running number of that incarnation; a lower one is fenced off. 0: not exclusive."""
    cast: str = ""
    """How the trainer's arrays were cast (``infra.weights.cast``); ``""``: as they were."""
    base: BaseVersion | None = None
    """None: a full version."""
    deltas: tuple[TensorDelta, ...] = ()
    schema_version: int = WEIGHTS_SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """What step ``step`` consumes, in order; written before its gradient. Yields version ``step``.

    Step N turns version N-1 into version N, so ``ledger/step-1`` is the first.
    """

    step: int
    groups: tuple[tuple[str, str], ...]
    """(group id, shard data digest) in training order: the copy that counts."""
    dropped: tuple[tuple[str, str], ...] = ()
    """(group id, reason) of waiting groups given up at this step."""
    lag_max: int
    """Largest lag among the consumed groups, measured against version ``step - 1``."""
    violations: int = 0
    """Groups beyond ``max_lag`` that were trained all the same (policy ``train``)."""
    incarnation: str
    settings_digest: str
    """Digest of objective, optimizer and packing settings, so a replay knows what it repeats."""
    created_at: float
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """One admitted group without a terminal record, as the controller last knew it."""

    admission_index: int
    group_id: str
    min_version: int
    attempt: int
    leased_until: float
    position: int = 0
    """Position in the prompt order; names the prompt when the group is published again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlState:
    """``control/state.json``: persisted by compare-and-swap before the controller acts."""

    run: str
    epoch: int
    """Fencing epoch; a controller whose epoch is not the stored one must stop."""
    next_index: int = 0
    """The next admission index; everything below it is admitted."""
    flights: tuple[Flight, ...] = ()
    """May still hold groups that have ended since; never misses one that has not."""
    cursors: dict[str, int] = field(default_factory=dict)
    """Prompt source name -> how many prompts were drawn from it."""
    refills: int = 0
    """Admissions beyond ``updates * groups_per_step`` that untrainable groups made necessary."""
    untrainable_streak: int = 0
    """Groups that ended untrainable since the last step."""
    steps_seen: int = 0
    """The newest ledger step the controller knew of; a newer one resets the streak."""
    retired: dict[str, int] = field(default_factory=dict)
    """Prompt id -> admission index from which on it is not admitted any more."""
    prompts_digest: str = ""
    """Digest of the ordered training prompt ids: a resumed run must have the same."""
    paused: bool = False
    draining: bool = False
    reissued: int = 0
    stop_reason: str = ""
    schema_version: int = SCHEMA_VERSION
