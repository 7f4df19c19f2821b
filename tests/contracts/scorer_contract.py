"""What every task scorer must keep; subclass, give ``scorer`` and ``cases``, and pytest runs it."""

from __future__ import annotations

import dataclasses
import itertools

from curation.scorer import score_safely
from infra.contracts.json_codec import from_json, to_json
from infra.contracts.records import Prompt, Rollout, Score
from tests.builders import make_prompt, make_rollout

JUNK = ("\n\n", " ", "\nI hope this helps!", "\n<think>", "\n\u202e\U0001f600", "\n}{")


def rollout_of(text: str, index: int = 0) -> Rollout:
    return dataclasses.replace(make_rollout(index), response_text=text)


def prompt_of(gold: str | None) -> Prompt:
    return dataclasses.replace(make_prompt(), answer=gold)


class ScorerContract:
    """``cases``: (response that is right, response that is wrong, gold) triples."""

    cases: tuple[tuple[str, str, str], ...]

    def test_golds_pass_and_wrong_answers_do_not(self, scorer):
        for right, wrong, gold in self.cases:
            assert scorer.score(rollout_of(right), prompt_of(gold)).verdict == "pass"
            assert scorer.score(rollout_of(wrong), prompt_of(gold)).verdict != "pass"

    def test_junk_after_a_wrong_answer_never_makes_it_right(self, scorer):
        for _, wrong, gold in self.cases:
            for junk in JUNK:
                score = scorer.score(rollout_of(wrong + junk), prompt_of(gold))
                assert score.verdict != "pass"
                assert score.value <= 0

    def test_order_does_not_matter(self, scorer):
        """A score depends on its own rollout only, and repeating it changes nothing."""
        texts = [text for right, wrong, _ in self.cases for text in (right, wrong)][:4]
        gold = prompt_of(self.cases[0][2])
        alone = {text: to_json(scorer.score(rollout_of(text), gold)) for text in texts}
        for order in itertools.permutations(texts):
            assert {t: to_json(scorer.score(rollout_of(t), gold)) for t in order} == alone

    def test_hostile_text_gives_a_storable_score(self, scorer):
        for text in ("", "\x00", "\ud800", "9" * 5000, "{" * 5000, "\\boxed{" * 2000, "a:" * 5000):
            score = score_safely(scorer, rollout_of(text), prompt_of(self.cases[0][2]))
            assert from_json(Score, to_json(score)) == score
            assert len(score.explanation) < 1000

    def test_identity(self, scorer):
        score = scorer.score(rollout_of(self.cases[0][0]), prompt_of(self.cases[0][2]))
        assert score.scorer == f"{scorer.name}@{scorer.version}"
        assert score.settings_digest == scorer.settings_digest
