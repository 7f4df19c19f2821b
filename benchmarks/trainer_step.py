"""One training step of ours, timed alone in a process of its own (``bench trainer`` starts it).

    in   {"prompts": [[id, ...]], "answers": [[id, ...]], "advantages": [...], "repeats": 3,
          "layout": "packed" | "padded"}
    out  {"secs": [...], "rss_bytes": ..., "row_tokens": ..., "products_secs": ...}

``packed`` is what the trainer does. ``padded`` puts each sequence into a row of the longest one's
length, with its own copy of the prompt. ``products_secs`` is the step's matrix products alone,
forward and backward, at the same shapes: the limit of a step that does nothing else.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from trainer.batch import Batch
from trainer.compile_cache import enable_compile_cache
from trainer.config import ModelSection, OptimizerConfig
from trainer.credit import TrainingSequence
from trainer.model.config import ModelConfig
from trainer.model.pretrained import cache_folder, load_model, resolve_model
from trainer.model.transformer import Params
from trainer.objective.grpo import Grpo
from trainer.optimizer import build_optimizer
from trainer.packing import PackingConfig, pack
from trainer.state import new_state
from trainer.step import StepSettings, build_train_step


def main() -> None:
    work = json.load(sys.stdin)
    cache = cache_folder(os.environ)
    enable_compile_cache(cache)
    model, params = load_model(resolve_model(ModelSection(source="smollm2-135m"), cache), 0)
    optimizer = OptimizerConfig(lr=1e-6)
    step = build_train_step(StepSettings(model=model, objective=Grpo(), optimizer=optimizer))
    batch = {"packed": packed, "padded": padded}[work["layout"]](sequences(work), model)
    state = new_state(params, build_optimizer(optimizer), 0)
    secs = []
    for _ in range(work["repeats"] + 1):  # the first one compiles
        started = time.perf_counter()
        state, metrics = step(state, batch)
        assert np.isfinite(jax.device_get(metrics.loss))
        secs.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = {
        "secs": secs[1:],
        "rss_bytes": peak,
        "row_tokens": int(batch.tokens[0].size * batch.micro_batches),
        "products_secs": products_secs(state.params, batch, work["repeats"]),
    }
    print(json.dumps(found), flush=True)


def sequences(work: dict) -> list[TrainingSequence]:
    return [
        TrainingSequence(
            prompt_ids=np.array(prompt, np.int32),
            response_ids=np.array(answer, np.int32),
            loss_mask=np.ones(len(answer), bool),
            raw_logprobs=np.full(len(answer), -2.0, np.float32),
            behaviour_logprobs=np.full(len(answer), -2.0, np.float32),
            temperature=1.0,
            advantage=advantage,
            scale=1.0,
            max_new_tokens=len(answer),
        )
        for prompt, answer, advantage in zip(
            work["prompts"], work["answers"], work["advantages"], strict=True
        )
    ]


def packed(rows: list[TrainingSequence], model: ModelConfig) -> Batch:
    tokens = float(sum(s.response_ids.size for s in rows))
    config = PackingConfig(attention_tokens=6 * model.dim)
    return pack(rows, config, denominator=tokens, step=1)


def padded(rows: list[TrainingSequence], model: ModelConfig) -> Batch:
    """One sequence a row, all in one micro-batch."""
    width = max(s.prompt_ids.size + s.response_ids.size for s in rows)
    config = PackingConfig(row_tokens=width, micro_batch_tokens=1 << 20)
    tokens = float(sum(s.response_ids.size for s in rows))
    alone = [pack([s], config, denominator=tokens, step=1) for s in rows]
    joined = {}
    for name in ("tokens", "positions", "segments", "prefixes"):
        joined[name] = np.concatenate([getattr(b, name)[..., :width] for b in alone], axis=1)
    per_target = [n for n, v in vars(alone[0]).items() if np.ndim(v) == 2]
    for name in per_target:
        parts = [getattr(b, name)[:, b.loss_mask[0]] for b in alone]
        if name == "sources":
            parts = [part + i * width for i, part in enumerate(parts)]
        if name in ("sequences", "owners"):
            parts = [np.full_like(part, i) for i, part in enumerate(parts)]
        joined[name] = np.concatenate(parts, axis=1)
    return alone[0].replace(**joined)


def products_secs(params: Params, batch: Batch, repeats: int) -> float:
    """Median seconds of y = x W', dx = dy W and dW = dy' x for every matrix of every layer, and of
    the head at the targets."""
    tokens, targets = batch.tokens[0].size, batch.targets[0].size
    micro = int(batch.micro_batches)
    pairs = [(w, tokens) for layer in params["layers"] for w in jax.tree.leaves(layer)]
    pairs = [(w, n) for w, n in pairs if w.ndim == 2]
    pairs.append((params.get("head", params["embed"]), targets))
    keys = iter(jax.random.split(jax.random.key(0), 4 * len(pairs)))
    shapes = {(n, size) for w, n in pairs for size in w.shape}
    ready = {shape: jax.random.normal(next(keys), shape) for shape in sorted(shapes)}

    def products(matrices: list, inputs: dict) -> list:
        out = []
        for (_, n), w in zip(pairs, matrices, strict=True):
            x, dy = inputs[n, w.shape[1]], inputs[n, w.shape[0]]
            out += [jnp.sum(y[:1]) for y in (x @ w.T, dy @ w, dy.T @ x)]
        return out

    run = jax.jit(products)
    return micro * _median(lambda: run([w for w, _ in pairs], ready), repeats)


def _median(call: Callable[[], object], repeats: int) -> float:
    jax.block_until_ready(call())
    secs = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(call())
        secs.append(time.perf_counter() - started)
    return float(np.median(secs))


if __name__ == "__main__":
    main()
