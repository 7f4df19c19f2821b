"""The decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU; tied or untied head.

Flax builds and names the parameters (``Decoder``); everything that computes is a pure function of
a plain pytree, because ``nnx.jit`` costs 9.5 ms a call at 270 leaves and a plain dict 0.2 ms.
Matrices are stored as Hugging Face stores them, (out, in), and contracted over their second axis:
as fast as (in, out) on CPU, and publishing or loading weights then needs neither copy nor
transposition. The engine (``trainer.model.decode``) runs these same blocks with a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from trainer.model.config import ModelConfig, RopeScaling

Params = dict[str, Any]
"""{"embed": [V,D], "layers": [{...}], "norm": [D]} and, if untied, "head": [V,D]."""

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(q [B,L,H,Dh], k [B,L,KVH,Dh], v [B,L,KVH,Dh]) -> [B,L,H,Dh]; may keep k and v on the way."""

MASKED = -1e30
"""Finite, so that a row that may attend to nothing (padding) yields no NaN."""


Draw = Callable[[int, int], jax.Array]
"""(rows, columns) -> standard normal numbers. All come from one draw: 200 random operations would
take the compiler half a minute."""


class Layer(nnx.Module):
    """Parameters of one block."""

    def __init__(self, config: ModelConfig, draw: Draw) -> None:
        c, inner, kv = config, config.heads * config.head_dim, config.kv_heads * config.head_dim
        out_scale = (2 * c.layers) ** -0.5  # keeps the residual stream's variance at depth
        self.attn_norm = nnx.Param(jnp.ones(c.dim))
        self.q = nnx.Param(_matrix(draw, inner, c.dim))
        self.k = nnx.Param(_matrix(draw, kv, c.dim))
        self.v = nnx.Param(_matrix(draw, kv, c.dim))
        self.o = nnx.Param(_matrix(draw, c.dim, inner) * out_scale)
        if c.qkv_bias:
            self.q_bias = nnx.Param(jnp.zeros(inner))
            self.k_bias = nnx.Param(jnp.zeros(kv))
            self.v_bias = nnx.Param(jnp.zeros(kv))
        if c.qk_norm:
            self.q_norm = nnx.Param(jnp.ones(c.head_dim))
            self.k_norm = nnx.Param(jnp.ones(c.head_dim))
        self.mlp_norm = nnx.Param(jnp.ones(c.dim))
        self.gate = nnx.Param(_matrix(draw, c.ffn, c.dim))
        self.up = nnx.Param(_matrix(draw, c.ffn, c.dim))
        self.down = nnx.Param(_matrix(draw, c.dim, c.ffn) * out_scale)


class Decoder(nnx.Module):
    """Parameters of the whole model; ``init_params`` is what callers want."""

    def __init__(self, config: ModelConfig, draw: Draw) -> None:
        self.embed = nnx.Param(0.02 * draw(config.vocab, config.dim))
        self.layers = nnx.List([Layer(config, draw) for _ in range(config.layers)])
        self.norm = nnx.Param(jnp.ones(config.dim))
        if not config.tied:
            self.head = nnx.Param(_matrix(draw, config.vocab, config.dim))


def _matrix(draw: Draw, rows: int, columns: int) -> jax.Array:
    return draw(rows, columns) * columns**-0.5


def init_params(config: ModelConfig, key: jax.Array) -> Params:
    """Draw fresh float32 parameters. Pure: may be jitted or given to ``jax.eval_shape``."""
    numbers, used = jax.random.normal(key, (_matrix_entries(config),)), 0

    def draw(rows: int, columns: int) -> jax.Array:
        nonlocal used
        used += rows * columns
        return numbers[used - rows * columns : used].reshape(rows, columns)

    params = nnx.to_pure_dict(nnx.state(Decoder(config, draw), nnx.Param))
    params["layers"] = [params["layers"][i] for i in range(config.layers)]
    return params


def _matrix_entries(c: ModelConfig) -> int:
    inner, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    layer = c.dim * (2 * inner + 2 * kv + 3 * c.ffn)
    return c.layers * layer + c.vocab * c.dim * (1 if c.tied else 2)


def partition_specs(config: ModelConfig) -> Params:
    """How each parameter lies on a mesh with axes ``fsdp`` and ``tensor`` (Megatron's split)."""
    rows, columns = PartitionSpec("tensor", "fsdp"), PartitionSpec("fsdp", "tensor")
    spec = {"o": columns, "down": columns}
    shapes = jax.eval_shape(lambda k: init_params(config, k), jax.random.key(0))

    def one(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
        return spec.get(path[-1].key, rows) if leaf.ndim == 2 else PartitionSpec()

    return jax.tree_util.tree_map_with_path(one, shapes)


def linear(x: jax.Array, w: jax.Array) -> jax.Array:
    """``x @ w.T``, float32 out. Inputs take the weights' dtype: without ``preferred_element_type``
    a bfloat16 product on CPU converts the weights at every call, 2 to 10 times slower."""
    dims = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(x.astype(w.dtype), w, dims, preferred_element_type=jnp.float32)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """``x / sqrt(mean(x^2) + eps) * scale`` over the last axis, in float32 (arXiv:1910.07467)."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * scale


def rope_tables(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, float32[..., head_dim // 2], for absolute ``positions``."""
    exponents = np.arange(0, config.head_dim, 2) / config.head_dim
    frequencies = _scaled(config.rope_theta**-exponents, config.rope_scaling)
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
    return jnp.cos(angles), jnp.sin(angles)


def _scaled(frequencies: np.ndarray, scaling: RopeScaling | None) -> np.ndarray:
    """Llama 3.1: divide slow frequencies by ``factor``, keep fast ones, blend in between."""
    if scaling is None:
        return frequencies
    turns = scaling.original_max_len * frequencies / (2 * np.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return frequencies * (blend + (1 - blend) / scaling.factor)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding in the half-split ("rotate half") convention; x is [B,L,heads,Dh]."""
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def block(
    layer: Params,
    config: ModelConfig,
    x: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    attend: Attend,
) -> jax.Array:
    """One residual block on ``x`` [B,L,D]."""
    c = config
    h = rms_norm(x, layer["attn_norm"], c.eps)
    q, k, v = (linear(h, layer[name]) for name in "qkv")
    if c.qkv_bias:
        q, k, v = q + layer["q_bias"], k + layer["k_bias"], v + layer["v_bias"]
    q = q.reshape(*x.shape[:2], c.heads, c.head_dim)
    k, v = (t.reshape(*x.shape[:2], c.kv_heads, c.head_dim) for t in (k, v))
    if c.qk_norm:
        q, k = rms_norm(q, layer["q_norm"], c.eps), rms_norm(k, layer["k_norm"], c.eps)
    mixed = attend(rotate(q, *rope), rotate(k, *rope), v)
    x = x + linear(mixed.reshape(*x.shape[:2], -1), layer["o"])
    h = rms_norm(x, layer["mlp_norm"], c.eps)
    return x + linear(jax.nn.silu(linear(h, layer["gate"])) * linear(h, layer["up"]), layer["down"])


def masked_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax attention; query head h reads key/value head ``h // (heads // kv_heads)``.

    Args:
        q: [B,L,H,Dh]; k, v: [B,M,KVH,Dh]; mask: bool[B,L,M], true where attending is allowed.
    """
    b, n, heads, dh = q.shape
    q = q.reshape(b, n, k.shape[2], heads // k.shape[2], dh)
    scores = jnp.einsum("blkgd,bmkd->bkglm", q, k) * dh**-0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, MASKED), axis=-1)
    return jnp.einsum("bkglm,bmkd->blkgd", weights, v).reshape(b, n, heads, dh)


def attention_mask(segments: jax.Array, prefixes: jax.Array) -> jax.Array:
    """bool[B,L,L]: i attends to j iff j <= i, j is no padding, and j lies in i's segment or prefix.

    Several responses may branch from one prompt in a row: the prompt is a segment of its own, and
    each response names it as its prefix.
    """
    own = segments[:, :, None] == segments[:, None, :]
    prefix = prefixes[:, :, None] == segments[:, None, :]
    causal = jnp.tril(jnp.ones((segments.shape[1],) * 2, bool))
    return causal & (segments[:, None, :] != 0) & (own | prefix)


def hidden_states(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    segments: jax.Array,
    prefixes: jax.Array,
    *,
    scan: bool = False,
    remat: bool = False,
) -> jax.Array:
    """Run the decoder over whole rows.

    Args:
        tokens, positions: int32[B,L]; positions count within a sequence, prompt first.
        segments: int32[B,L], 0 for padding; prefixes: int32[B,L], the segment that precedes this
            one (see ``attention_mask``), or 0.
        scan: stack the layers and scan over them: same speed in training, a third less compiling.
        remat: recompute each block in the backward pass instead of keeping its activations.

    Returns:
        float32[B,L,D] after the final norm; give them to ``head_logits``.
    """
    mask = attention_mask(segments, prefixes)
    rope = rope_tables(config, positions)

    @jax.jit  # traced and differentiated once for all layers
    def apply(layer: Params, x: jax.Array) -> jax.Array:
        return block(layer, config, x, rope, lambda q, k, v: masked_attention(q, k, v, mask))

    if remat:
        apply = jax.checkpoint(apply)
    x = embed(params, tokens)
    if scan:
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["layers"])
        x, _ = jax.lax.scan(lambda x, layer: (apply(layer, x), None), x, stacked)
    else:
        for layer in params["layers"]:
            x = apply(layer, x)
    return rms_norm(x, params["norm"], config.eps)


def embed(params: Params, tokens: jax.Array) -> jax.Array:
    """float32 embeddings of ``tokens``, any shape."""
    return params["embed"][tokens].astype(jnp.float32)


def head_logits(params: Params, config: ModelConfig, hidden: jax.Array) -> jax.Array:
    """float32[..., V] logits of final hidden states; the head is float32 on both sides."""
    return linear(hidden, params["embed"] if config.tied else params["head"])
