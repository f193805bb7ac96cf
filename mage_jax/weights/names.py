"""The one table between Hugging Face tensor names and our parameter paths, used in both directions.

A rule's layout spells the checkpoint tensor's axes with the letters that end the parameter's name; letters in
parentheses are flattened into one axis: ``q_nhd`` under ``(n h) d`` is stored as [N * H, D]. Letters never change
order, so every conversion is a reshape of contiguous memory: bytes are copied, never permuted.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping
from typing import Any

from mage_jax.config import ModelConfig
from mage_jax.params import ParamSpec, declare, flatten
from mage_jax.weights.errors import HfConfigError, MismatchError

LM_HEAD = "lm_head.weight"
SUPPORTED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # safetensors name -> numpy name

_TEXT = "model.language_model.layers.{layer}."
_VISION = "model.visual.encoder.layers.{layer}."

# (checkpoint name, parameter path, layout). "{layer}" runs over the leading axis of a stacked parameter. The order is
# the order of tensors in files written for models that were born here.
RULES: tuple[tuple[str, str, str], ...] = (
    ("model.language_model.embed_tokens.weight", "text.embed_vd", "v d"),
    (_TEXT + "input_layernorm.weight", "text.layers.attn_norm_d", "d"),
    (_TEXT + "self_attn.q_proj.weight", "text.layers.attn.q_nhd", "(n h) d"),
    (_TEXT + "self_attn.k_proj.weight", "text.layers.attn.k_khd", "(k h) d"),
    (_TEXT + "self_attn.v_proj.weight", "text.layers.attn.v_khd", "(k h) d"),
    (_TEXT + "self_attn.o_proj.weight", "text.layers.attn.o_dnh", "d (n h)"),
    (_TEXT + "self_attn.q_norm.weight", "text.layers.attn.q_norm_h", "h"),
    (_TEXT + "self_attn.k_norm.weight", "text.layers.attn.k_norm_h", "h"),
    (_TEXT + "post_attention_layernorm.weight", "text.layers.mlp_norm_d", "d"),
    (_TEXT + "mlp.gate_proj.weight", "text.layers.mlp.gate_fd", "f d"),
    (_TEXT + "mlp.up_proj.weight", "text.layers.mlp.up_fd", "f d"),
    (_TEXT + "mlp.down_proj.weight", "text.layers.mlp.down_df", "d f"),
    ("model.language_model.norm.weight", "text.final_norm_d", "d"),
    ("model.visual.embeddings.patch_embedding.weight", "vision.patch_embed_dcyx", "d c y x"),
    ("model.visual.layernorm_pre.weight", "vision.pre_norm.scale_d", "d"),
    ("model.visual.layernorm_pre.bias", "vision.pre_norm.bias_d", "d"),
    (_VISION + "layer_norm1.weight", "vision.layers.norm1.scale_d", "d"),
    (_VISION + "layer_norm1.bias", "vision.layers.norm1.bias_d", "d"),
    (_VISION + "self_attn.qkv.weight", "vision.layers.attn.qkv_cnhd", "(c n h) d"),
    (_VISION + "self_attn.qkv.bias", "vision.layers.attn.qkv_bias_cnh", "(c n h)"),
    (_VISION + "self_attn.proj.weight", "vision.layers.attn.proj_dnh", "d (n h)"),
    (_VISION + "self_attn.proj.bias", "vision.layers.attn.proj_bias_d", "d"),
    (_VISION + "layer_norm2.weight", "vision.layers.norm2.scale_d", "d"),
    (_VISION + "layer_norm2.bias", "vision.layers.norm2.bias_d", "d"),
    (_VISION + "mlp.fc1.weight", "vision.layers.mlp.fc1_fd", "f d"),
    (_VISION + "mlp.fc1.bias", "vision.layers.mlp.fc1_bias_f", "f"),
    (_VISION + "mlp.fc2.weight", "vision.layers.mlp.fc2_df", "d f"),
    (_VISION + "mlp.fc2.bias", "vision.layers.mlp.fc2_bias_d", "d"),
    ("model.visual.merger.ln_q.weight", "merger.norm.scale_d", "d"),
    ("model.visual.merger.ln_q.bias", "merger.norm.bias_d", "d"),
    ("model.visual.merger.mlp.0.weight", "merger.fc1_fd", "f d"),
    ("model.visual.merger.mlp.0.bias", "merger.fc1_bias_f", "f"),
    ("model.visual.merger.mlp.2.weight", "merger.fc2_df", "d f"),
    ("model.visual.merger.mlp.2.bias", "merger.fc2_bias_d", "d"),
    (LM_HEAD, "lm_head_vd", "v d"),
)


@dataclasses.dataclass(frozen=True)
class Slot:
    """One checkpoint tensor and the place of its values in the parameters.

    Attributes:
      name: checkpoint tensor name.
      path: dotted parameter path.
      layer: index on the parameter's leading axis; None for a parameter that is not stacked.
      hf_shape: shape in the checkpoint.
      shape: shape in the parameter, without the layer axis.
    """

    name: str
    path: str
    layer: int | None
    hf_shape: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.shape)


def slots(config: ModelConfig) -> list[Slot]:
    """Every checkpoint tensor of a model, layer by layer, each exactly once.

    Raises:
      ValueError: the table and the declared parameters disagree (a parameter without a rule, or twice).
    """
    specs: dict[str, ParamSpec] = flatten(declare(config))
    rules = [rule for rule in RULES if rule[0] != LM_HEAD or not config.tied_embeddings]
    paths = [path for _, path, _ in rules]
    if sorted(paths) != sorted(specs):
        raise ValueError(f"name table and parameters differ: {sorted(set(paths) ^ set(specs))}")
    result = []
    for stack, group in itertools.groupby(rules, key=_stack):
        members = list(group)
        layers: list[int | None] = list(range(specs[members[0][1]].shape[0])) if stack else [None]
        result += [_slot(*rule, layer, specs[rule[1]]) for layer in layers for rule in members]
    return result


def _stack(rule: tuple[str, str, str]) -> str:
    """What comes before the layer number in a rule's name; empty for a weight that is not stacked."""
    head, marker, _ = rule[0].partition("{layer}")
    return head if marker else ""


def _slot(pattern: str, path: str, layout: str, layer: int | None, spec: ParamSpec) -> Slot:
    shape = spec.shape if layer is None else spec.shape[1:]
    letters = path.rpartition("_")[2]
    if layout.translate(str.maketrans("", "", "() ")) != letters or len(letters) != len(shape):
        raise ValueError(f"rule {pattern}: layout {layout!r} does not spell {path} of shape {shape}")
    sizes = dict(zip(letters, shape, strict=True))
    axes = re.findall(r"\([^)]*\)|\w", layout)
    hf_shape = tuple(math.prod(sizes[c] for c in axis if c.isalpha()) for axis in axes)
    return Slot(pattern.format(layer=layer), path, layer, hf_shape, shape)


def check_layer_counts(config: ModelConfig, tensors: Mapping[str, Any], *, where: str) -> None:
    """Refuses a number of layers that no listing of missing tensors could be made for.

    Args:
      config: geometry.
      tensors: checkpoint name -> anything.
      where: the config's file, for messages.

    Raises:
      HfConfigError: more layers than there are tensors in all.
    """
    towers = {"text_config": (_TEXT, config.text), "vision_config": (_VISION, config.vision)}
    for section, (pattern, tower) in towers.items():
        if tower.num_layers > len(tensors):
            prefix = pattern.partition("{layer}")[0]
            found = {name[len(prefix) :].partition(".")[0] for name in tensors if name.startswith(prefix)}
            raise HfConfigError(
                f"{where}: {section}.num_hidden_layers is {tower.num_layers}, but the weight files hold {len(found)} "
                "such layers; correct it"
            )


def match(config: ModelConfig, tensors: Mapping[str, Any], *, where: str) -> list[Slot]:
    """Pairs a checkpoint's tensors with the model's parameters and reports every disagreement at once.

    Args:
      config: geometry.
      tensors: checkpoint name -> object with ``dtype`` (safetensors name), ``shape`` and ``file``.
      where: the checkpoint's folder or index, for messages.

    Returns:
      The slots, in table order.

    Raises:
      MismatchError: tensors missing, left over, of another shape, of an unsupported dtype, or of mixed dtypes within
        one stacked parameter.
    """
    expected = slots(config)
    names = {slot.name for slot in expected}
    problems = [
        f"{tensor.file}: tensor {name} {list(tensor.shape)} is not a weight of this model; config.json describes "
        "another geometry, or the tensor belongs in a file outside the index"
        for name, tensor in tensors.items()
        if name not in names
    ]
    dtypes: dict[str, dict[str, str]] = {}
    for slot in expected:
        tensor = tensors.get(slot.name)
        if tensor is None:
            problems.append(f"tensor {slot.name} is missing: {slot.path} needs shape {list(slot.hf_shape)}")
            continue
        if tuple(tensor.shape) != slot.hf_shape:
            problems.append(
                f"{tensor.file}: tensor {slot.name} has shape {list(tensor.shape)}, config.json asks for "
                f"{list(slot.hf_shape)}"
            )
        if tensor.dtype not in SUPPORTED_DTYPES:
            problems.append(
                f"{tensor.file}: tensor {slot.name} has dtype {tensor.dtype}; supported are "
                f"{', '.join(SUPPORTED_DTYPES)}"
            )
        dtypes.setdefault(slot.path, {}).setdefault(tensor.dtype, f"{slot.name} in {tensor.file}")
    for path, found in dtypes.items():
        if len(found) > 1:
            listed = ", ".join(f"{dtype} ({example})" for dtype, example in sorted(found.items()))
            problems.append(f"layers of {path} have different dtypes and cannot be stacked: {listed}")
    if problems:
        raise MismatchError(where, problems)
    return expected
