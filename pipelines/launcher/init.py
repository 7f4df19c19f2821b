"""``headrace init --prompts my.jsonl --scorer my.py:score``: write a configuration."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infra.config import to_toml
from infra.contracts.errors import ConfigError
from pipelines.launcher.inspect_prompts import PromptFile, inspect_prompts

CHARS_PER_TOKEN = 3
"""A cautious figure for English text and code, to size the engine's cache."""
TEMPLATE_TOKENS = 64
MOST_TOKENS = 4096
COMMENTS = {
    "run": "names the run, and its folder: runs/<name>",
    "prompts": "what is asked; the columns were guessed from the file\n"
    "template = text around the question, e.g. \"{question}\\nEnd with '#### ' and the number.\"",
    "sampling": "how each prompt is answered: n rollouts make a group",
    "recipe": "how rollouts are judged. Your own scorer is a function\n"
    "(response_text: str, answer: str | None, metadata: dict) -> float | bool\n"
    "zero_variance rejects a group that all solve, or none: it teaches nothing",
    "admission": "one step makes one policy version out of exactly so many groups;\n"
    "max_lag = 1 generates the next step's rollouts while training",
    "pipeline": "the streaming Beam pipeline's processes on this machine",
    "endpoint": "the inference worker; port 0: any free one",
    "inference": "rollouts decoded together, and tokens of prompt and response",
    "model": 'version 0: a preset, or source = "folder" with path = a Hugging Face folder',
    "objective": "the loss: cispo, grpo, aipo, dapo, gspo ...; docs/objectives.md has all",
    "optimizer": "AdamW",
    "checkpoint": "whichever of the two comes first",
    "evaluation": "held-out pass rates, before and after",
    "stop": "whichever comes first; the only section a resumed run may change",
}


def main(argv: list[str]) -> int:
    """Write the configuration and say what to do next. Raises ``ConfigError``."""
    parser = argparse.ArgumentParser(prog="headrace init", description=__doc__)
    parser.add_argument("--prompts", required=True, metavar="FILE.jsonl")
    parser.add_argument(
        "--scorer", default="exact_answer", help="my.py:score, module:attr, or a built-in's name"
    )
    parser.add_argument("--model", default="smollm2-135m", help="a preset, or a model folder")
    parser.add_argument("--question", default="", help="column with the prompt")
    parser.add_argument("--answer", help='column with the reference answer; "" for none')
    parser.add_argument("--out", metavar="FILE.toml", help="default: the prompts' name .toml")
    args = parser.parse_args(argv)
    out = Path(args.out or Path(args.prompts).with_suffix(".toml").name)
    if out.exists():
        raise ConfigError(f"{out}: it exists; give another --out, or delete it")
    found = inspect_prompts(args.prompts, args.question, args.answer)
    if args.scorer == "exact_answer" and not found.answer:
        raise ConfigError(
            f"{args.prompts}: no column looks like the reference answer, which exact_answer "
            "needs; name it with --answer, or give your own --scorer my.py:score"
        )
    tree = configuration(out.stem, args.prompts, found, args.scorer, args.model)
    _check(tree, str(out))
    out.write_text(as_toml(tree), encoding="utf-8")
    answer = f"answer '{found.answer}'" if found.answer else "no answer"
    print(f"{args.prompts}: {found.rows} rows, question '{found.question}', {answer}")
    print(f"wrote {out}; next:\n  headrace run {out} --dry-run\n  headrace run {out}")
    return 0


def configuration(
    name: str, prompts: str, found: PromptFile, scorer: str, model: str
) -> dict[str, dict[str, Any]]:
    """Return every section that somebody with a task of their own may want to touch."""
    folder = Path(model).is_dir()
    new_tokens = 128
    needed = found.longest_chars // CHARS_PER_TOKEN + TEMPLATE_TOKENS + new_tokens
    max_len = min(1 << (needed - 1).bit_length(), MOST_TOKENS)
    return {
        "run": {"name": name, "seed": 0},
        "prompts": {
            "source": "jsonl",
            "path": prompts,
            "question": found.question,
            "answer": found.answer,
            "answer_after": found.answer_after,
            "role": "user",
            "template": "{question}",
            "held_out": found.held_out,
        },
        "sampling": {"n": 8, "max_new_tokens": new_tokens, "temperature": 1.0},
        "recipe": {"scorers": [scorer], "filters": ["zero_variance"]},
        "admission": {"groups_per_step": 8, "max_lag": 1, "lease_secs": 300.0},
        "pipeline": {"processes": 2},
        "endpoint": {"port": 0, "request_timeout_secs": 240.0},
        "inference": {"slots": 32, "max_len": max_len},
        "model": {"source": "folder", "path": model} if folder else {"source": model},
        "objective": {"name": "grpo", "advantage": "mean", "aggregation": "token_mean"},
        "optimizer": {"lr": 1e-5, "warmup_steps": 5},
        "checkpoint": {"every_steps": 5, "every_secs": 300.0},
        "evaluation": {"problems": 96, "samples": 4},
        "stop": {"updates": 20, "no_progress_secs": 1800.0},
    }


def as_toml(tree: Mapping[str, Mapping[str, Any]]) -> str:
    """Write the sections with a comment above each."""
    parts = [
        "# Written by headrace init. `headrace run FILE --dry-run` shows every key there is.\n"
    ]
    for section, table in tree.items():
        comment = "\n".join(f"# {line}" for line in COMMENTS[section].split("\n"))
        parts.append(f"{comment}\n{to_toml({section: table})}")
    return "\n".join(parts)


def _check(tree: dict[str, dict[str, Any]], where: str) -> None:
    """Refuse now what ``headrace run`` would refuse; fetches no model."""
    from infra.prompts.prompt_set import load_prompt_set
    from infra.run_config import parse_shared
    from pipelines.launcher.role_commands import RoleCommands
    from pipelines.launcher.run_plan import check_trainer
    from pipelines.options import parse_options

    load_prompt_set(parse_shared(tree, where).prompts)
    parse_options(tree, where)
    check_trainer(tree, where, RoleCommands(), prepare=False)
