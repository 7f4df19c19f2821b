"""Weights of a Hugging Face folder: read from one file or several, and a model written back.

A folder of several files has ``model.safetensors.index.json``, which says where each tensor lies;
then files that it does not name are left alone. The index is written last.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import safetensors.numpy

from infra.contracts.errors import ConfigError
from infra.weights.export import TOKENIZER_FILES
from trainer.model.config import ModelConfig
from trainer.model.hf_config import to_hf

INDEX = "model.safetensors.index.json"
PART_BYTES = 4 << 30


def read_arrays(folder: Path) -> dict[str, np.ndarray]:
    """Return every tensor by its name, in the type that the file holds.

    Raises:
        ConfigError: no weights; a file is damaged, or lacks a tensor that the index promises.
    """
    places = _places(folder)
    files = places.values() if places is not None else _unlisted(folder)
    arrays: dict[str, np.ndarray] = {}
    for name in sorted(set(files)):
        try:
            arrays |= safetensors.numpy.load_file(folder / name)
        except (OSError, ValueError, KeyError, safetensors.SafetensorError) as e:
            raise ConfigError(f"{folder / name}: not a readable safetensors file: {e}") from e
    for tensor, name in (places or {}).items():
        if tensor not in arrays:
            raise ConfigError(f"{folder / name}: no {tensor}, which {INDEX} promises there")
    return arrays


def _places(folder: Path) -> Mapping[str, str] | None:
    """The index's {tensor: file}; None if the folder has no index."""
    path = folder / INDEX
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not all(Path(name).name == name for name in places.values()):
            raise ValueError("a file outside the folder")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise ConfigError(f"{path}: not an index of weights: {e}; fetch the folder again") from e
    return places


def _unlisted(folder: Path) -> list[str]:
    """All files; only ``model*`` if there are such (some folders repeat them in another form)."""
    found = list(folder.glob("model*.safetensors")) or list(folder.glob("*.safetensors"))
    if not found:
        raise ConfigError(f"{folder}: no *.safetensors file; give a folder with weights")
    return [path.name for path in found]


def save_model(
    folder: Path,
    config: ModelConfig,
    arrays: Mapping[str, np.ndarray],
    *,
    source: Path,
    part_bytes: int = PART_BYTES,
) -> None:
    """Write a new folder that ``load_model`` and transformers read.

    Args:
        arrays: what ``to_named`` gives, in any float type.
        source: the folder that the model came from: tokenizer, chat template and the ids of begin
            and end of text are taken from there.
        part_bytes: a file ends before the tensor that would make it larger.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; give a new folder to save the model in")
    folder.mkdir(parents=True, exist_ok=True)
    old = json.loads((source / "config.json").read_text(encoding="utf-8"))
    eos = old.get("eos_token_id")
    eos = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    facts = to_hf(config, bos=old.get("bos_token_id"), eos=eos)
    facts["dtype"] = max(arrays.values(), key=lambda array: array.nbytes).dtype.name
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    parts = _parts(arrays, part_bytes)
    width = f"-of-{len(parts):05d}"
    names = [f"model-{i + 1:05d}{width}.safetensors" for i in range(len(parts))]
    names = names if len(parts) > 1 else ["model.safetensors"]
    for name, part in zip(names, parts, strict=True):
        safetensors.numpy.save_file(part, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(0o644)  # save_file leaves 0600
    (folder / "config.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    if len(parts) > 1:
        size = sum(array.nbytes for array in arrays.values())
        places = {key: name for name, part in zip(names, parts, strict=True) for key in part}
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")


def _parts(arrays: Mapping[str, np.ndarray], part_bytes: int) -> list[dict[str, np.ndarray]]:
    parts, used = [{}], 0
    for name, array in arrays.items():
        if parts[-1] and used + array.nbytes > part_bytes:
            parts.append({})
            used = 0
        parts[-1][name] = np.ascontiguousarray(array)
        used += array.nbytes
    return parts
