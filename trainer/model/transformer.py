"""The decoder: RMSNorm, rotary positions, grouped-query attention, gated MLP; tied or untied head.

What families differ in is in ``ModelConfig``; a part that a family lacks costs nothing.

Flax builds and names the parameters (``Decoder``); everything that computes is a pure function of
a plain pytree, because ``nnx.jit`` costs 9.5 ms a call at 270 leaves and a plain dict 0.2 ms.
Matrices are stored as Hugging Face stores them, (out, in), and contracted over their second axis:
as fast as (in, out) on CPU, and publishing or loading weights then needs neither copy nor
transposition. The engine (``trainer.model.decode``) runs these same blocks with a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from trainer.model.attention import layer_masks, masked_attention, softcap
from trainer.model.config import ModelConfig
from trainer.model.rope import layer_ropes, rotate

Params = dict[str, Any]
"""{"embed": [V,D], "layers": [{...}], "norm": [D]} and, if untied, "head": [V,D]."""

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(q [B,L,H,Dh], k [B,L,KVH,Dh], v [B,L,KVH,Dh]) -> [B,L,H,Dh]; may keep k and v on the way."""

Draw = Callable[[int, int], jax.Array]
"""(rows, columns) -> standard normal numbers. All come from one draw: 200 random operations would
take the compiler half a minute."""


class Layer(nnx.Module):
    """Parameters of one block."""

    def __init__(self, config: ModelConfig, draw: Draw) -> None:
        c, inner, kv = config, config.heads * config.head_dim, config.kv_heads * config.head_dim
        out_scale = (2 * c.layers) ** -0.5  # keeps the residual stream's variance at depth
        self.attn_norm = _unit(c, c.dim)
        self.q = nnx.Param(_matrix(draw, inner, c.dim))
        self.k = nnx.Param(_matrix(draw, kv, c.dim))
        self.v = nnx.Param(_matrix(draw, kv, c.dim))
        self.o = nnx.Param(_matrix(draw, c.dim, inner) * out_scale)
        if c.qkv_bias:
            self.q_bias = nnx.Param(jnp.zeros(inner))
            self.k_bias = nnx.Param(jnp.zeros(kv))
            self.v_bias = nnx.Param(jnp.zeros(kv))
        if c.qk_norm:
            self.q_norm, self.k_norm = _unit(c, c.head_dim), _unit(c, c.head_dim)
        if c.post_norms:
            self.attn_out_norm, self.mlp_out_norm = _unit(c, c.dim), _unit(c, c.dim)
        self.mlp_norm = _unit(c, c.dim)
        self.gate = nnx.Param(_matrix(draw, c.ffn, c.dim))
        self.up = nnx.Param(_matrix(draw, c.ffn, c.dim))
        self.down = nnx.Param(_matrix(draw, c.dim, c.ffn) * out_scale)


class Decoder(nnx.Module):
    """Parameters of the whole model; ``init_params`` is what callers want."""

    def __init__(self, config: ModelConfig, draw: Draw) -> None:
        self.embed = nnx.Param(0.02 * draw(config.vocab, config.dim))
        self.layers = nnx.List([Layer(config, draw) for _ in range(config.layers)])
        self.norm = _unit(config, config.dim)
        if not config.tied:
            self.head = nnx.Param(_matrix(draw, config.vocab, config.dim))


def _unit(config: ModelConfig, size: int) -> nnx.Param:
    """The stored scale of a norm that scales by one."""
    return nnx.Param(jnp.full(size, 1.0 - config.norm_offset, jnp.float32))  # never weakly typed


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


FEW_ROWS = 48
"""Up to here ``w @ x.T`` is faster than ``x @ w.T`` on CPU, which packs its right side anew at
every call: of SmolLM2-135M, 8 rows 1.7 times, 32 rows 1.4 times; at 64 no longer."""


class Quantised(NamedTuple):
    """A matrix as the engine may hold it: ``values * scale[:, None]``."""

    values: jax.Array
    """int8[out, in]"""
    scale: jax.Array
    """float32[out]"""


def linear(x: jax.Array, w: jax.Array | Quantised) -> jax.Array:
    """``x @ w.T``, float32 out. Inputs take the weights' dtype: without ``preferred_element_type``
    a bfloat16 product on CPU converts the weights at every call, 2 to 10 times slower."""
    if isinstance(w, Quantised):
        return linear(x, w.values.astype(jnp.float32)) * w.scale
    x = x.astype(w.dtype)
    if x.size <= FEW_ROWS * x.shape[-1]:
        dims = (((1,), (x.ndim - 1,)), ((), ()))
        y = jax.lax.dot_general(w, x, dims, preferred_element_type=jnp.float32)
        return jnp.moveaxis(y, 0, -1)  # costs nothing: what follows is computed in y's layout
    dims = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, w, dims, preferred_element_type=jnp.float32)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """``x / sqrt(mean(x^2) + eps) * scale`` over the last axis, in float32 (arXiv:1910.07467)."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * scale


def norm(config: ModelConfig, x: jax.Array, scale: jax.Array) -> jax.Array:
    """``rms_norm`` by the family's convention: Gemma stores the scale less one."""
    scale = scale + config.norm_offset if config.norm_offset else scale
    return rms_norm(x, scale, config.eps)


def block(
    layer: Params,
    config: ModelConfig,
    x: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    attend: Attend,
) -> jax.Array:
    """One residual block on ``x`` [B,L,D]."""
    c = config
    h = norm(c, x, layer["attn_norm"])
    q, k, v = (linear(h, layer[name]) for name in "qkv")
    if c.qkv_bias:
        q, k, v = q + layer["q_bias"], k + layer["k_bias"], v + layer["v_bias"]
    q = q.reshape(*x.shape[:2], c.heads, c.head_dim)
    k, v = (t.reshape(*x.shape[:2], c.kv_heads, c.head_dim) for t in (k, v))
    if c.qk_norm:
        q, k = norm(c, q, layer["q_norm"]), norm(c, k, layer["k_norm"])
    mixed = attend(rotate(q, *rope), rotate(k, *rope), v)
    h = linear(mixed.reshape(*x.shape[:2], -1), layer["o"])
    x = x + (norm(c, h, layer["attn_out_norm"]) if c.post_norms else h)
    h = norm(c, x, layer["mlp_norm"])
    h = linear(
        _ACTIVATION[c.activation](linear(h, layer["gate"])) * linear(h, layer["up"]), layer["down"]
    )
    return x + (norm(c, h, layer["mlp_out_norm"]) if c.post_norms else h)


_ACTIVATION = {"silu": jax.nn.silu, "gelu_tanh": jax.nn.gelu}
"""``jax.nn.gelu`` is the tanh form unless told otherwise."""


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
    views = [
        _View(*view)
        for view in zip(
            layer_ropes(config, positions),
            layer_masks(config, positions, segments, prefixes),
            strict=True,
        )
    ]

    @jax.jit  # traced and differentiated once for all layers
    def apply(layer: Params, x: jax.Array, view: _View) -> jax.Array:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return masked_attention(config, q, k, v, view.mask)

        return block(layer, config, x, view.rope, attend)

    if remat:
        apply = jax.checkpoint(apply)
    x = embed(params, config, tokens)
    if scan:
        x = _scan(apply, x, params["layers"], views, config.sliding)
    else:
        for layer, view in zip(params["layers"], views, strict=True):
            x = apply(layer, x, view)
    return norm(config, x, params["norm"])


class _View(NamedTuple):
    """What a layer sees of the row."""

    rope: tuple[jax.Array, jax.Array]
    mask: jax.Array


def _scan(
    apply: Callable[[Params, jax.Array, _View], jax.Array],
    x: jax.Array,
    layers: list[Params],
    views: list[_View],
    sliding: tuple[bool, ...],
) -> jax.Array:
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    kinds = [sliding.index(kind) for kind in sorted(set(sliding))]  # one layer of each kind
    table = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(views[i] for i in kinds))
    which = jnp.array([kind and len(kinds) > 1 for kind in sliding], jnp.int32)

    def body(x: jax.Array, layer: tuple[Params, jax.Array]) -> tuple[jax.Array, None]:
        return apply(layer[0], x, jax.tree.map(lambda leaf: leaf[layer[1]], table)), None

    return jax.lax.scan(body, x, (stacked, which))[0]


def embed(params: Params, config: ModelConfig, tokens: jax.Array) -> jax.Array:
    """float32 embeddings of ``tokens``, any shape."""
    x = params["embed"][tokens].astype(jnp.float32)
    return x if config.embed_scale == 1.0 else x * config.embed_scale


def head_logits(params: Params, config: ModelConfig, hidden: jax.Array) -> jax.Array:
    """float32[..., V] logits of final hidden states; the head is float32 on both sides."""
    logits = linear(hidden, params["embed"] if config.tied else params["head"])
    return softcap(logits, config.final_softcap)
