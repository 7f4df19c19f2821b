"""Sums to learn on a laptop, two styles.

``few_shot``: ``12+5=17\\n54+9=63\\n{x}+{y}=`` for x in 10..99, y in 0..9: 900 problems for a small
pretrained model. ``reversed``: ``ab+cd=`` zero-padded, the answer's least significant digit first
and a full stop, so that carries run in writing order: 10,000 problems for a model from nothing.

>>> problem("few_shot", 17, 8).answer, problem("reversed", 17, 8).answer
('25', '52.')
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

from infra.contracts.ids import prompt_id
from infra.contracts.records import Message, Prompt
from infra.prompts.split import is_held_out

Style = Literal["few_shot", "reversed"]

FEW_SHOT = "12+5=17\n54+9=63\n"
REVERSED_PROBLEMS = 100 * 100


def problem(style: Style, x: int, y: int) -> Prompt:
    """Return the prompt for ``x + y``; role ``text``: it is given to the model as it is."""
    if style == "few_shot":
        text, answer = f"{FEW_SHOT}{x}+{y}=", str(x + y)
    else:
        text, answer = f"{x:02d}+{y:02d}=", f"{x + y}"[::-1] + "."
    message = Message(role="text", content=text)
    return Prompt(messages=(message,), source=f"addition/{style}", answer=answer)


def all_problems(style: Style) -> Iterator[Prompt]:
    """Every problem of a style, in numerical order."""
    xs, ys = (range(10, 100), range(10)) if style == "few_shot" else (range(100), range(100))
    return (problem(style, x, y) for x in xs for y in ys)


def fresh_problems(seed: int, step: int, batch: int, held_out: float = 0.0) -> tuple[Prompt, ...]:
    """Draw ``batch`` random ``reversed`` problems for supervised step ``step``.

    The same arguments give the same problems; problems of the ``held_out`` share (the one of
    ``PromptsConfig``) are never drawn, so that a warm start does not see the evaluation.
    """
    bits = np.random.Philox(key=np.array([seed, step], dtype=np.uint64))
    found: list[Prompt] = []
    while len(found) < batch:
        for number in bits.random_raw(batch) % REVERSED_PROBLEMS:
            prompt = problem("reversed", *divmod(int(number), 100))
            if not is_held_out(prompt_id(prompt.messages, prompt.source), held_out):
                found.append(prompt)
    return tuple(found[:batch])
