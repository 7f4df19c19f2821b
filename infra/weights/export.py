"""Write one published version as a Hugging Face model folder.

The parts of a plain version are safetensors files with Hugging Face names already, so they are
copied as they are. A version that is cut, a delta or int8 is put together and written anew, as
float. ``config.json`` comes from the manifest and is written last, so that a broken-off export does
not load.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from infra.contracts.errors import ConfigError
from infra.contracts.manifests import WeightManifest
from infra.storage.local_store import LocalStore
from infra.storage.object_store import ObjectStore
from infra.weights import tensor_file
from infra.weights.cast import dequantised
from infra.weights.stored_weights import PART_BYTES, StoredWeights

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)


def export_model(store: ObjectStore, manifest: WeightManifest, folder: Path) -> list[str]:
    """Verify, then write weights, tokenizer and configuration; return the names of the files.

    Args:
        store: where the run lies.
        manifest: ``model_config["hf"]`` becomes ``config.json``; ``model_config["folder"]``, if
            given, is where the tokenizer's files are copied from.
        folder: absent or empty.

    Raises:
        DamagedObject: the version is not what its manifest says; nothing is written.
        ConfigError: the folder holds something, or the manifest lacks the model's configuration.
    """
    facts = manifest.model_config.get("hf")
    if not isinstance(facts, Mapping):
        raise ConfigError(
            f"version {manifest.version} has no Hugging Face configuration in its manifest "
            "(model_config.hf); it cannot be exported"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty; give a new folder to export to")
    tokenizer = _tokenizer_files(manifest)
    weights = StoredWeights(store, manifest.run)
    arrays = weights.fetch(manifest.version)
    target = LocalStore(folder)
    if manifest.base is None and manifest.cast != "int8" and _is_uncut(manifest):
        names = _part_names(len(manifest.parts))
        for name, part in zip(names, manifest.parts, strict=True):
            target.create(name, store.view(part.key))
        placed = {entry.name: entry.part for entry in manifest.tensors}
    else:
        arrays = dequantised(arrays, manifest)
        groups = tensor_file.split(tensor_file.measure(arrays), PART_BYTES)
        names = _part_names(len(groups))
        for name, group in zip(names, groups, strict=True):
            target.create(name, tensor_file.contents(tensor_file.lay_out(group)[0], group))
        placed = {piece.name: index for index, group in enumerate(groups) for piece in group}
    files = list(names)
    texts = {path.name: path.read_bytes() for path in tokenizer}
    if len(names) > 1:
        texts["model.safetensors.index.json"] = _json(
            {
                "metadata": {"total_size": sum(array.nbytes for array in arrays.values())},
                "weight_map": {name: names[index] for name, index in sorted(placed.items())},
            }
        )
    texts["config.json"] = _json(_with_dtype(facts, arrays))
    for name, data in texts.items():
        target.create(name, data)
    return files + list(texts)


def _part_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def _tokenizer_files(manifest: WeightManifest) -> list[Path]:
    source = manifest.model_config.get("folder")
    if not source:
        return []
    found = [path for name in TOKENIZER_FILES if (path := Path(str(source)) / name).is_file()]
    if not found:
        raise ConfigError(
            f"{source}: no tokenizer files there, though version {manifest.version} names this "
            "folder as its model's; restore it (headrace run prepares it again) and export anew"
        )
    return found


def _is_uncut(manifest: WeightManifest) -> bool:
    return not any(entry.pieces for entry in manifest.tensors)


def _with_dtype(facts: Mapping[str, object], arrays: Mapping[str, np.ndarray]) -> dict[str, object]:
    """The configuration with the type the tensors really have: most bytes win."""
    sizes: Counter[str] = Counter()
    for array in arrays.values():
        sizes[array.dtype.name] += array.nbytes
    key = "torch_dtype" if "torch_dtype" in facts else "dtype"
    return {**facts, key: max(sizes, key=lambda name: (sizes[name], name))}


def _json(tree: object) -> bytes:
    return json.dumps(tree, indent=2, ensure_ascii=False).encode() + b"\n"
