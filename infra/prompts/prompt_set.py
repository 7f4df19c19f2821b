"""A prompt set: the training prompts in file order, and the held-out ones for evaluation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from infra.contracts import ids
from infra.contracts.errors import ConfigError
from infra.contracts.records import Prompt
from infra.prompts import addition, jsonl
from infra.prompts.split import is_held_out
from infra.run_config import PromptsConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """Prompts without duplicates; ``*_ids[i]`` is the prompt id of the i-th prompt."""

    name: str
    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    train_ids: tuple[str, ...]
    held_out_ids: frozenset[str]
    """Denied at admission."""
    duplicates: int
    """Rows that repeated the messages of an earlier one and were left out."""

    @property
    def digest(self) -> str:
        """Names the ordered training prompts: the same digest means the same admission order."""
        return ids.content_id("prompt set", *self.train_ids)


def load_prompt_set(config: PromptsConfig) -> PromptSet:
    """Read the prompts and split off the held-out share by hash of the prompt id.

    Raises:
        ConfigError: the source cannot be read, or nothing is left to train on.
    """
    if config.source == "addition":
        name, rows = f"addition/{config.style}", addition.all_problems(config.style)
        prompts = list(rows)[: config.limit or None]
    else:
        prompts = list(jsonl.read_prompts(config))
        name = prompts[0].source
    return split_prompts(name, prompts, config.held_out)


def split_prompts(name: str, prompts: Iterable[Prompt], held_out: float) -> PromptSet:
    """Drop duplicates (the first counts) and split; raises ``ConfigError`` if none can train."""
    unique: dict[str, Prompt] = {}
    rows = 0
    for rows, prompt in enumerate(prompts, start=1):  # noqa: B007 (the count is used below)
        unique.setdefault(ids.prompt_id(prompt.messages, prompt.source), prompt)
    denied = frozenset(key for key in unique if is_held_out(key, held_out))
    train = {key: prompt for key, prompt in unique.items() if key not in denied}
    if not train:
        raise ConfigError(
            f"prompt set {name}: all {len(unique)} prompts are held out (held_out = {held_out}); "
            "lower [prompts] held_out or give more prompts"
        )
    return PromptSet(
        name=name,
        train=tuple(train.values()),
        held_out=tuple(prompt for key, prompt in unique.items() if key in denied),
        train_ids=tuple(train),
        held_out_ids=denied,
        duplicates=rows - len(unique),
    )
