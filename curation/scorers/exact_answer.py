"""Exact answer: extract a candidate by declared methods, compare with the gold as text or number.

Text first; with ``numeric`` also as exact fractions (1,000 = 1000.0 = 1e3), never as floats. The
method that found the candidate stands in the explanation and as component ``extraction`` (its place
in the list), so that re-scoring can explain a change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from curation.scorer import SettingsDigest, make_score
from curation.text.answers import METHODS, extract
from curation.text.numbers import TooLarge, parse_number
from infra.contracts.records import Prompt, Rollout, Score, Verdict

MAX_RESPONSE_CHARS = 1_000_000
MAX_ANSWER_CHARS = 4_096


@dataclass(frozen=True, kw_only=True)
class ExactAnswer(SettingsDigest):
    """1 when the extracted answer equals ``prompt.answer``, else 0."""

    name: ClassVar[str] = "exact_answer"
    version: ClassVar[int] = 1
    shaping: ClassVar[bool] = False

    extraction: tuple[str, ...] = ("boxed", "answer_line", "last_line")
    """Tried in order; the first that finds something decides."""
    numeric: bool = True
    """Numbers also match by value."""
    ignore_case: bool = False

    def __post_init__(self) -> None:
        unknown = [name for name in self.extraction if name not in METHODS]
        if unknown or not self.extraction:
            given = ", ".join(unknown) or "nothing"
            raise ValueError(f"extraction names {given}; known: {', '.join(METHODS)}")

    def score(self, rollout: Rollout, prompt: Prompt) -> Score:
        """Judge one rollout; verdicts other than ``pass`` carry the value 0."""
        gold = (prompt.answer or "").strip()
        if not gold:
            return make_score(self, Verdict.GOLD_INVALID, 0.0, "the prompt has no reference answer")
        if len(gold) > MAX_ANSWER_CHARS:
            return make_score(self, Verdict.GOLD_INVALID, 0.0, "the reference answer is too long")
        if len(rollout.response_text) > MAX_RESPONSE_CHARS:
            limit = f"the response has more than {MAX_RESPONSE_CHARS} characters"
            return make_score(self, Verdict.ANSWER_LIMIT, 0.0, limit)
        found = extract(rollout.response_text, self.extraction)
        if not found.method:
            tried = ", ".join(self.extraction)
            return make_score(self, Verdict.NO_ANSWER, 0.0, f"extraction={tried}: nothing found")
        verdict, how = self._compare(found.candidate, gold)
        return make_score(
            self,
            verdict,
            1.0 if verdict is Verdict.PASS else 0.0,
            f"extraction={found.method}: {found.candidate[:80]!r} against {gold[:80]!r}: {how}",
            {"extraction": float(self.extraction.index(found.method))},
        )

    def _compare(self, candidate: str, gold: str) -> tuple[Verdict, str]:
        """Return the verdict and the tier that reached it."""
        if len(candidate) > MAX_ANSWER_CHARS:
            return Verdict.ANSWER_LIMIT, f"answer longer than {MAX_ANSWER_CHARS} characters"
        if self._text(candidate) == self._text(gold):
            return Verdict.PASS, "equal text"
        if not self.numeric:
            return Verdict.FAIL, "other text"
        try:
            expected = parse_number(gold)
        except TooLarge as e:
            return Verdict.GOLD_INVALID, f"reference answer: {e}"
        if expected is None:
            return Verdict.FAIL, "other text"
        try:
            value = parse_number(candidate)
        except TooLarge as e:
            return Verdict.ANSWER_LIMIT, str(e)
        if value is None:
            return Verdict.ANSWER_UNPARSED, "not a number"
        same = value == expected
        return (Verdict.PASS, "equal number") if same else (Verdict.FAIL, "other number")

    def _text(self, text: str) -> str:
        text = " ".join(text.split())
        return text.casefold() if self.ignore_case else text
