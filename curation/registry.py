"""The names a recipe may use. To add a scorer or a filter: one file, and one line here."""

from __future__ import annotations

from curation.filters.truncated import Truncated
from curation.filters.zero_variance import ZeroVariance
from curation.scorers.exact_answer import ExactAnswer
from curation.scorers.length_penalty import LengthPenalty

SCORERS = {cls.name: cls for cls in (ExactAnswer, LengthPenalty)}

FILTERS = {cls.name: cls for cls in (ZeroVariance, Truncated)}
