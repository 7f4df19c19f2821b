"""Every record that crosses a room boundary, declared once.

Facts and judgements are kept apart: a ``Rollout`` says what was sampled, a ``Judgement`` what a
recipe thought of it, so re-scoring is a small batch job. Times and durations are outside every
digest and every equality. Records with arrays compare by identity; compare their encodings.

Data flow: Prompt -> GroupTask -> (GenerateRequest -> GenerateReply) -> Group(rollouts)
-> Group(judgements) -> Group(decision) -> shard.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from infra.contracts.sampling_params import SamplingParams

SCHEMA_VERSION = 1


class Verdict(StrEnum):
    """What a scorer found. ``gold_invalid`` and ``infra_error`` make a rollout untrainable."""

    PASS = "pass"
    FAIL = "fail"
    NO_ANSWER = "no_answer"
    ANSWER_UNPARSED = "answer_unparsed"
    ANSWER_LIMIT = "answer_limit"
    TIMEOUT = "timeout"
    GOLD_INVALID = "gold_invalid"
    INFRA_ERROR = "infra_error"


class FinishReason(StrEnum):
    """Why a model span ended."""

    STOP = "stop"
    """End-of-sequence token, or a stop string."""
    LENGTH = "length"
    """``max_new_tokens`` or the engine's context was reached: the rollout is truncated."""
    SEGMENT = "segment"
    """Not ended: cut between two tokens, to be continued (``infra.inference.segments``)."""
    ERROR = "error"
    """The engine failed; ids up to here are facts, the rollout is untrainable."""


class Decision(StrEnum):
    """What became of a group; also the folder it is committed to."""

    ACCEPTED = "rollouts"
    REJECTED = "rejects"
    FAILED = "failures"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn. Role ``text`` (alone in its prompt) is given to the model as it is, untemplated."""

    role: str
    """``system``, ``user``, ``assistant``, ``tool`` or ``text``."""
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A task. ``prompt_id`` covers messages and source; ``revision`` also the rest."""

    messages: tuple[Message, ...]
    source: str
    """Name of the prompt set; part of the id, so equal rows of two sets stay apart."""
    answer: str | None = None
    """Reference answer; None where the scorer needs none."""
    tests: tuple[str, ...] = ()
    """Reference tests for code scorers."""
    metadata: dict[str, str] = field(default_factory=dict)
    """Any other column, as strings. Part of the revision, not of the id."""
    attachments: tuple[tuple[str, str, str], ...] = ()
    """Reserved: (digest, media type, uri). Refused by name while not implemented."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTask:
    """One admission: the message from the controller to the pipeline, for all n samples."""

    run: str
    group_id: str
    admission_index: int
    prompt_id: str
    prompt_revision: str
    prompt: Prompt
    sampling: SamplingParams
    seed: int
    """Seed of the group; sample i uses ``ids.sample_seed(seed, i)``."""
    min_version: int
    """The published policy version at admission; a worker below it pulls first."""
    attempt: int
    """1 for the first publication; grows with each re-issue under the same ids."""
    epoch: int
    """Fencing epoch of the controller that published it."""
    expires_at: float
    """Unix time after which the pipeline discards the message (its lease is over)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """What the pipeline asks an inference worker: all samples of one group."""

    request_id: str
    """Idempotency key: a repeat while the first is running joins it."""
    messages: tuple[Message, ...]
    sampling: SamplingParams
    seeds: tuple[int, ...]
    """One per sample; ``len(seeds) == sampling.n``."""
    min_version: int
    timeout_secs: float
    """The worker gives up (typed error) when this has passed."""
    segment_tokens: int = 0
    """0: whole responses only. Else at most so many new tokens of each, and what is cut short (by
    this, the deadline, an abort, a worker that stops) is answered as far as it came."""
    so_far: tuple[tuple[int, ...], ...] = ()
    """Each sample's response ids from earlier segments, to go on behind; empty: all begin."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One sampled response, as the engine saw it. All arrays have length T.

    They are None as a whole where a foreign engine cannot give them all: text alone.
    """

    response_ids: np.ndarray | None
    """int32[T]; of a later segment its own tokens only."""
    response_text: str
    """Of all tokens, earlier segments' included: characters may lie across a cut."""
    behaviour_logprobs: np.ndarray | None
    """float32[T], of the distribution really sampled from (after top-p/top-k)."""
    raw_logprobs: np.ndarray | None
    """float32[T], temperature only."""
    policy_versions: np.ndarray | None
    """int32[T], the version that sampled each token."""
    finish_reason: FinishReason
    loss_mask: np.ndarray | None = None
    """bool[T], false where a token was forced, not sampled: both log-probs are 0 there. None: all
    were sampled."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerateReply:
    """What the worker answers; ``samples`` in seed order."""

    request_id: str
    prompt_ids: np.ndarray | None
    """int32[P], the tokenised prompt: the truth from here on. None with samples of text alone."""
    samples: tuple[Sample, ...]
    weights: tuple[tuple[int, str], ...]
    """(version, manifest digest) of every version that took part; empty where nobody knows."""
    engine: str
    """Name and version of the engine."""
    dtype: str
    """Compute type of the weights in the engine, e.g. ``float32``."""
    tokenizer_digest: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """One sampled trajectory: facts only."""

    rollout_id: str
    run: str
    prompt_id: str
    prompt_revision: str
    group_id: str
    admission_index: int
    sample_index: int
    sequence_index: int = 0
    """One trajectory may be several sequences that share a reward."""
    seed: int
    prompt_ids: np.ndarray | None
    """int32[P]; None only for foreign rollouts that have text alone."""
    response_ids: np.ndarray | None
    """int32[T]"""
    response_text: str
    loss_mask: np.ndarray | None
    """bool[T], true where the policy sampled."""
    behaviour_logprobs: np.ndarray | None
    """float32[T]; 0 and never read where ``loss_mask`` is false."""
    raw_logprobs: np.ndarray | None
    """float32[T]"""
    policy_versions: np.ndarray | None
    """int32[T]"""
    weights: tuple[tuple[int, str], ...] = ()
    """(version, manifest digest) of the policies that sampled it."""
    spans: tuple[tuple[int, int, str, str], ...] = ()
    """(start, end, ``model|tool|user``, finish reason)."""
    token_columns: dict[str, np.ndarray] = field(default_factory=dict)
    """Further per-token arrays of length T: reference or teacher log-probs, values, routing."""
    finish_reason: FinishReason
    sampling: SamplingParams
    engine: str = ""
    engine_dtype: str = ""
    tokenizer_digest: str = ""

    @property
    def min_version(self) -> int:
        """Oldest policy version in the rollout (what lag is measured from)."""
        assert self.policy_versions is not None, "a foreign rollout has no versions"
        return int(self.policy_versions.min()) if self.policy_versions.size else self.weights[0][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One scorer's finding about one rollout."""

    scorer: str
    """Name and version, e.g. ``exact_answer@1``."""
    settings_digest: str
    verdict: Verdict
    value: float
    """The scorer's number; what it means is the scorer's to say."""
    components: dict[str, float] = field(default_factory=dict)
    """Parts that were summed into ``value``; kept for re-weighting."""
    explanation: str = ""
    """Why, in words (which extraction was used, what was compared). Capped by the scorer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What a recipe concludes about one rollout; joined by ``rollout_id``, never by position."""

    rollout_id: str
    scores: tuple[Score, ...]
    reward: float
    """The number the trainer learns from (rounded to float32)."""
    task_reward: float
    """The reward before shaping (penalties); filters look at this one."""
    trainable: bool
    weight: float = 1.0
    """Loss weight of this rollout."""
    recipe_digest: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """The n rollouts of one admission, and what was decided. Lies whole in one shard."""

    run: str
    group_id: str
    admission_index: int
    prompt_id: str
    prompt_revision: str
    prompt: Prompt
    attempt: int
    min_version: int
    """``min_version`` of the admission; the rollouts' own versions are >= it."""
    rollouts: tuple[Rollout, ...] = ()
    judgements: tuple[Judgement, ...] = ()
    decision: Decision | None = None
    """None while on its way."""
    reason: str = ""
    """Why it was rejected or failed: a short stable word, e.g. ``zero_variance``."""
    error: str = ""
    """Detail of a failure: stage, error type and message."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds per stage, outside every digest."""


Json = dict[str, Any]
"""A decoded JSON object at a boundary; turned into a record at once."""
