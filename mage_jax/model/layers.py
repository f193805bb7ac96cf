"""What both towers share: the matmul in the compute dtype and the run over stacked layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mage_jax.config import ComputeConfig


def matmul(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Einsum with the weight cast to the activations' dtype."""
    return jnp.einsum(equation, x, weight.astype(x.dtype))


def run_layers(
    layer: Callable[[Any, jax.Array], tuple[jax.Array, Any]],
    layers: Any,
    x: jax.Array,
    *,
    compute: ComputeConfig,
) -> tuple[jax.Array, Any]:
    """Applies ``layer(params, x) -> (x, extra)`` over all layers.

    Args:
      layer: one layer; ``extra`` may be None.
      layers: stacked parameters (leading axis L, scanned), or a sequence of per-layer parameters (unrolled).
      x: the residual stream.
      compute: its ``remat`` decides what the backward recomputes.

    Returns:
      The last residual stream, and the extras stacked along a leading axis L.
    """

    def body(carry, layer_params):
        return layer(layer_params, carry)

    if compute.remat == "full":
        body = jax.checkpoint(body, prevent_cse=False)
    elif compute.remat == "dots":
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        body = jax.checkpoint(body, prevent_cse=False, policy=policy)
    if isinstance(layers, (tuple, list)):
        extras = []
        for layer_params in layers:
            x, extra = body(x, layer_params)
            extras.append(extra)
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *extras)
    return jax.lax.scan(body, x, layers)


def unstack_layers(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters with ``text.layers`` and ``vision.layers`` as tuples of per-layer trees.

    A one-token decode reads each weight once; slicing it out of a stack first would read it twice, so serving
    unstacks once.
    """

    def split(stacked):
        count = jax.tree.leaves(stacked)[0].shape[0]
        return tuple(jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(count))

    return {
        name: {**tower, "layers": split(tower["layers"])} if name in ("vision", "text") else tower
        for name, tower in params.items()
    }


def layer_at(layers: Any, index: int) -> Any:
    """Parameters of one layer, stacked or not."""
    if isinstance(layers, (tuple, list)):
        return layers[index]
    return jax.tree.map(lambda leaf: leaf[index], layers)
