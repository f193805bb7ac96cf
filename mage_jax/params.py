"""One declaration per weight: shape, logical axes, initialiser. Abstract tree, shardings and init derive from it.

The tree mirrors the model: ``vision``, ``merger``, ``text`` and, when untied, ``lm_head_vd``. Layers are stacked along
a leading L axis and scanned. Linear weights keep the checkpoint's [out, in] order with heads split out, so that
converting to and from Hugging Face is a reshape and never a transpose.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mage_jax.config import ModelConfig, TextConfig, VisionConfig

Params = dict[str, Any]  # nested dict of arrays


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """Declaration of one weight.

    Attributes:
      shape: array shape, stacked weights with the leading layer axis.
      axes: logical axis name per dimension (see ``mage_jax.sharding.RULES``); None is never sharded.
      init: "normal" (scaled by 1/sqrt(fan_in)), "embed" (0.02), "ones" or "zeros".
      fan_in: number of inputs that are summed, for "normal".
      decay: whether weight decay applies (not to norms and biases).
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str
    fan_in: int = 0
    decay: bool = True

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"shape {self.shape} and axes {self.axes} differ in rank")


def declare(config: ModelConfig) -> dict[str, Any]:
    """Nested dict of ``ParamSpec`` with exactly the structure of the parameters."""
    v, t = config.vision, config.text
    specs = {
        "vision": {
            "patch_embed_dcyx": _linear(
                (v.hidden_size, v.num_channels, v.patch_size, v.patch_size), ("embed", None, None, None), v.patch_dim
            ),
            "pre_norm": _layer_norm(v.hidden_size),
            "layers": _vision_layers(v),
        },
        "merger": {
            "norm": _layer_norm(v.hidden_size),
            "fc1_fd": _linear((v.merged_size, v.merged_size), ("mlp", "embed"), v.merged_size),
            "fc1_bias_f": _vector((v.merged_size,), ("mlp",)),
            "fc2_df": _linear((t.hidden_size, v.merged_size), ("embed", "mlp"), v.merged_size),
            "fc2_bias_d": _vector((t.hidden_size,), ("embed",)),
        },
        "text": {
            "embed_vd": ParamSpec((t.vocab_size, t.hidden_size), ("vocab", "embed"), "embed"),
            "layers": _text_layers(t),
            "final_norm_d": _vector((t.hidden_size,), ("embed",), init="ones"),
        },
    }
    if not config.tied_embeddings:
        specs["lm_head_vd"] = ParamSpec((t.vocab_size, t.hidden_size), ("vocab", "embed"), "embed")
    return specs


def _linear(shape: tuple[int, ...], axes: tuple[str | None, ...], fan_in: int) -> ParamSpec:
    return ParamSpec(shape, axes, "normal", fan_in=fan_in)


def _vector(shape: tuple[int, ...], axes: tuple[str | None, ...], init: str = "zeros") -> ParamSpec:
    return ParamSpec(shape, axes, init, decay=False)


def _layer_norm(size: int, layers: int = 0) -> dict[str, ParamSpec]:
    lead, axes = ((layers,), ("layer",)) if layers else ((), ())
    return {
        "scale_d": _vector((*lead, size), (*axes, "embed"), init="ones"),
        "bias_d": _vector((*lead, size), (*axes, "embed")),
    }


def _vision_layers(v: VisionConfig) -> dict[str, Any]:
    layers, d, n, h, f = v.num_layers, v.hidden_size, v.num_heads, v.head_dim, v.mlp_size
    return {
        "norm1": _layer_norm(d, layers),
        "attn": {
            # Rows are [all q | all k | all v], each head-major.
            "qkv_cnhd": _linear((layers, 3, n, h, d), ("layer", None, "heads", None, "embed"), d),
            "qkv_bias_cnh": _vector((layers, 3, n, h), ("layer", None, "heads", None)),
            "proj_dnh": _linear((layers, d, n, h), ("layer", "embed", "heads", None), n * h),
            "proj_bias_d": _vector((layers, d), ("layer", "embed")),
        },
        "norm2": _layer_norm(d, layers),
        "mlp": {
            "fc1_fd": _linear((layers, f, d), ("layer", "mlp", "embed"), d),
            "fc1_bias_f": _vector((layers, f), ("layer", "mlp")),
            "fc2_df": _linear((layers, d, f), ("layer", "embed", "mlp"), f),
            "fc2_bias_d": _vector((layers, d), ("layer", "embed")),
        },
    }


def _text_layers(t: TextConfig) -> dict[str, Any]:
    layers, d, n, k, h, f = t.num_layers, t.hidden_size, t.num_heads, t.num_kv_heads, t.head_dim, t.mlp_size
    return {
        "attn_norm_d": _vector((layers, d), ("layer", "embed"), init="ones"),
        "attn": {
            "q_nhd": _linear((layers, n, h, d), ("layer", "heads", None, "embed"), d),
            "k_khd": _linear((layers, k, h, d), ("layer", "kv_heads", None, "embed"), d),
            "v_khd": _linear((layers, k, h, d), ("layer", "kv_heads", None, "embed"), d),
            "o_dnh": _linear((layers, d, n, h), ("layer", "embed", "heads", None), n * h),
            "q_norm_h": _vector((layers, h), ("layer", None), init="ones"),
            "k_norm_h": _vector((layers, h), ("layer", None), init="ones"),
        },
        "mlp_norm_d": _vector((layers, d), ("layer", "embed"), init="ones"),
        "mlp": {
            "gate_fd": _linear((layers, f, d), ("layer", "mlp", "embed"), d),
            "up_fd": _linear((layers, f, d), ("layer", "mlp", "embed"), d),
            "down_df": _linear((layers, d, f), ("layer", "embed", "mlp"), f),
        },
    }


def is_spec(value: Any) -> bool:
    return isinstance(value, ParamSpec)


def map_specs(function: Callable[[ParamSpec], Any], specs: dict[str, Any]) -> dict[str, Any]:
    """Applies ``function`` to every declaration of a tree made by ``declare``."""
    return jax.tree.map(function, specs, is_leaf=is_spec)


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dict -> {"text.layers.attn.q_nhd": leaf, ...} in insertion order."""
    flat = {}
    for key, value in tree.items():
        path = f"{prefix}.{key}" if prefix else key
        if isinstance(value, dict):
            flat |= flatten(value, path)
        else:
            flat[path] = value
    return flat


def unflatten(flat: dict[str, Any]) -> dict[str, Any]:
    """Inverse of ``flatten``."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, leaf = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def abstract_params(config: ModelConfig, *, dtype: Any = jnp.float32) -> Params:
    """The parameter tree as ``jax.ShapeDtypeStruct`` leaves."""
    return map_specs(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.dtype(dtype)), declare(config))


def init_params(config: ModelConfig, key: jax.Array, *, dtype: Any = jnp.float32) -> Params:
    """Random parameters. Every weight's key depends on its own path only, so adding a weight moves no other."""
    flat = flatten(declare(config))
    return unflatten({path: _init_one(spec, path, key, dtype) for path, spec in flat.items()})


def _init_one(spec: ParamSpec, path: str, key: jax.Array, dtype: Any) -> jax.Array:
    if spec.init == "zeros":
        return jnp.zeros(spec.shape, dtype)
    if spec.init == "ones":
        return jnp.ones(spec.shape, dtype)
    std = {"normal": 1.0 / math.sqrt(max(spec.fan_in, 1)), "embed": 0.02}[spec.init]
    key = jax.random.fold_in(key, zlib.crc32(path.encode()) & 0x7FFFFFFF)
    return (std * jax.random.truncated_normal(key, -3.0, 3.0, spec.shape, jnp.float32)).astype(dtype)


def count_params(config: ModelConfig) -> int:
    """Number of parameters (4,741,793,792 for the released geometry)."""
    return sum(math.prod(s.shape) for s in flatten(declare(config)).values())
