"""``headrace import FOLDER``: read a Hugging Face folder as a run would, and say how to use it.

Configuration, tensors and tokenizer are read and held against each other, so that a folder this
code cannot train or serve is refused here and not an hour into a run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from infra.contracts.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ImportReport:
    """What a folder holds."""

    folder: str
    family: str
    parameters: int
    layers: int
    context: int
    """Tokens of a sequence."""
    vocabulary: int
    """Rows of the embedding; at least the tokenizer's tokens."""
    tokens: int
    """Of the tokenizer."""
    chat_template: bool

    def to_text(self) -> str:
        chat = "with" if self.chat_template else "without"
        return (
            f"{self.folder}: {self.family}, {self.parameters:,} parameters, {self.layers} layers, "
            f"{self.context} tokens of context, {self.tokens} tokens {chat} a chat template\n\n"
            f'[model]\nsource = "folder"\npath = {json.dumps(self.folder)}'
        )


def main(argv: Sequence[str]) -> int:
    """Check the folder. Raises ``ConfigError`` for one that cannot be used."""
    parser = argparse.ArgumentParser(
        prog="headrace import", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("folder", help="config.json, *.safetensors, tokenizer.json")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    report = examine(Path(args.folder))
    print(json.dumps(asdict(report)) if args.json else report.to_text())
    return 0


def examine(folder: Path) -> ImportReport:
    """Load everything once. Raises ``ConfigError`` with the first thing that is wrong."""
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder}: no config.json there; give a local Hugging Face folder (config.json, "
            "*.safetensors, tokenizer.json)"
        )
    # JAX is loaded only now: --help and a wrong path answer at once.
    from infra.text.tokenizer import load_tokenizer
    from trainer.model.params_io import count_params
    from trainer.model.pretrained import load_model

    config, _ = load_model(folder, seed=0)
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab_size > config.vocab:
        raise ConfigError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, the model's embedding "
            f"{config.vocab} rows; give the tokenizer that the model was trained with"
        )
    return ImportReport(
        folder=str(folder),
        family=config.family,
        parameters=count_params(config),
        layers=config.layers,
        context=config.max_len,
        vocabulary=config.vocab,
        tokens=tokenizer.vocab_size,
        chat_template=tokenizer.has_chat_template,
    )
