"""Hugging Face ``config.json`` to ``ModelConfig`` and back.

Nothing is ever filled in from a class default: the released values differ from the defaults of the public code, and a
silently wrong rotary base or epsilon still produces fluent text. A missing field is an error that names file and field.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mage_jax.config import ConfigError, ModelConfig, TextConfig, VisionConfig
from mage_jax.weights.errors import HfConfigError
from mage_jax.weights.names import LM_HEAD

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"

# model_type -> (architecture, model_type of the vision tower)
FAMILIES = {
    "llava_onevision2": ("LlavaOnevision2ForConditionalGeneration", "onevision_encoder"),
    "mage_vl": ("MageVLForConditionalGeneration", "mage_vl_vision"),
}
_VISION_TYPES = tuple(vision for _, vision in FAMILIES.values())
_ABSENT = object()


class _Section:
    """A JSON object that knows its file and dotted name."""

    def __init__(self, values: Any, file: str, name: str = "") -> None:
        self.file, self.name = file, name
        if not isinstance(values, Mapping):
            raise HfConfigError(f"{file}: {name or 'the file'} must be a JSON object, got {type(values).__name__}")
        self.values = values

    def where(self, field: str) -> str:
        return f"{self.file}: {self.name}.{field}" if self.name else f"{self.file}: {field}"

    def section(self, field: str) -> _Section:
        dotted = f"{self.name}.{field}" if self.name else field
        if field not in self.values:
            raise HfConfigError(f"{self.where(field)} is missing; no default is assumed")
        return _Section(self.values[field], self.file, dotted)

    def get(self, field: str, kind: type, default: Any = _ABSENT) -> Any:
        """A field of type ``kind``; null counts as absent."""
        value = self.values.get(field)
        if value is None:
            if default is _ABSENT:
                raise HfConfigError(f"{self.where(field)} is missing; add it, no default is assumed")
            return default
        accepted = (int, float) if kind is float else kind
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise HfConfigError(f"{self.where(field)} must be {kind.__name__}, got {value!r}")
        return kind(value)

    def only(self, field: str, allowed: Iterable[Any], *, required: bool = False) -> None:
        """Rejects values that would need code that does not exist here."""
        allowed = tuple(allowed)
        if field not in self.values:
            if required:
                raise HfConfigError(f"{self.where(field)} is missing; no default is assumed")
            return
        value = self.values[field]
        if not any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed):
            raise HfConfigError(f"{self.where(field)} is {value!r}, supported: {', '.join(map(repr, allowed))}")


def read_json(path: Path) -> Any:
    """Parses a JSON file.

    Raises:
      HfConfigError: the file is absent or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise HfConfigError(f"{path} does not exist") from None
    except ValueError as e:
        raise HfConfigError(f"{path} is not valid JSON: {e}") from None


def read_hf_config(folder: Path, *, has_lm_head: bool) -> ModelConfig:
    """``config.json`` (and ``generation_config.json`` where present) of a folder as a ``ModelConfig``.

    Args:
      folder: Hugging Face folder.
      has_lm_head: whether the weight files hold ``lm_head.weight``.

    Raises:
      HfConfigError: a field is missing, ill-typed or unsupported; the message names file and dotted field.
    """
    config = read_json(folder / CONFIG_FILE)
    generation_path = folder / GENERATION_FILE
    generation = read_json(generation_path) if generation_path.exists() else None
    return from_hf_config(config, generation, has_lm_head=has_lm_head, folder=folder)


def from_hf_config(
    config: Any, generation: Any = None, *, has_lm_head: bool, folder: Path | None = None
) -> ModelConfig:
    """Parsed config dicts as a ``ModelConfig``; see ``read_hf_config``."""
    prefix = f"{folder}/" if folder else ""
    top = _Section(config, prefix + CONFIG_FILE)
    top.only("model_type", FAMILIES, required=True)
    vision, text = top.section("vision_config"), top.section("text_config")
    eos_sources = [top, text]
    if generation is not None:
        eos_sources.insert(0, _Section(generation, prefix + GENERATION_FILE))
    try:
        model = ModelConfig(
            vision=_vision(vision),
            text=_text(text),
            tied_embeddings=_tied(top, has_lm_head),
            image_token_id=top.get("image_token_id", int),
            video_token_id=top.get("video_token_id", int),
            vision_start_token_id=top.get("vision_start_token_id", int),
            vision_end_token_id=top.get("vision_end_token_id", int),
            bos_token_id=_first_id("bos_token_id", [top, text])[0],
            eos_token_ids=_first_id("eos_token_id", eos_sources),
        )
    except ConfigError as e:
        raise HfConfigError(f"{top.file}: {e}") from e
    for field in ("out_hidden_size", "text_hidden_size"):
        value = vision.get(field, int, model.text.hidden_size)
        if value != model.text.hidden_size:
            raise HfConfigError(
                f"{vision.where(field)} is {value}, but text_config.hidden_size is {model.text.hidden_size}"
            )
    return model


def _vision(section: _Section) -> VisionConfig:
    section.only("model_type", _VISION_TYPES, required=True)
    section.only("hidden_act", ("gelu",), required=True)
    section.only("layer_norm_type", ("layer_norm",))
    section.only("use_head", (False,))
    section.only("use_patch_position_encoding", (False,))
    section.only("temporal_patch_size", (1,))
    return VisionConfig(
        hidden_size=section.get("hidden_size", int),
        num_layers=section.get("num_hidden_layers", int),
        num_heads=section.get("num_attention_heads", int),
        mlp_size=section.get("intermediate_size", int),
        patch_size=section.get("patch_size", int),
        num_channels=section.get("num_channels", int),
        spatial_merge_size=section.get("spatial_merge_size", int),
        rope_theta=_rope_theta(section),
        layer_norm_eps=section.get("layer_norm_eps", float),
        frame_window_size=section.get("frame_windows_size", int),
    )


def _text(section: _Section) -> TextConfig:
    section.only("model_type", ("qwen3",), required=True)
    section.only("hidden_act", ("silu",), required=True)
    section.only("attention_bias", (False,))
    section.only("use_sliding_window", (False,))
    if section.values.get("use_sliding_window") is not False:  # an unused window size may stay in the file
        section.only("sliding_window", (None,))
    layer_types = section.get("layer_types", list, [])
    if any(kind != "full_attention" for kind in layer_types):
        raise HfConfigError(f"{section.where('layer_types')} is {layer_types!r}, supported: 'full_attention' only")
    config = TextConfig(
        hidden_size=section.get("hidden_size", int),
        num_layers=section.get("num_hidden_layers", int),
        num_heads=section.get("num_attention_heads", int),
        num_kv_heads=section.get("num_key_value_heads", int),
        head_dim=section.get("head_dim", int),
        mlp_size=section.get("intermediate_size", int),
        vocab_size=section.get("vocab_size", int),
        rope_theta=_rope_theta(section),
        rms_norm_eps=section.get("rms_norm_eps", float),
        max_positions=section.get("max_position_embeddings", int),
    )
    if layer_types and len(layer_types) != config.num_layers:
        raise HfConfigError(
            f"{section.where('layer_types')} lists {len(layer_types)} layers, num_hidden_layers is {config.num_layers}"
        )
    return config


def _rope_theta(section: _Section) -> float:
    """Rotary base: nested ``rope_parameters`` (current files) or the flat key (older ones), never a default."""
    section.only("rope_scaling", (None,))
    if section.values.get("rope_parameters") is not None:
        rope = section.section("rope_parameters")
        for key in ("rope_type", "type"):
            rope.only(key, ("default",))
        rope.only("mrope_section", (None,))
        rope.only("partial_rotary_factor", (1,))
        theta = rope.get("rope_theta", float)
        flat = section.get("rope_theta", float, theta)
        if flat != theta:
            raise HfConfigError(f"{section.where('rope_theta')} is {flat}, but {rope.name}.rope_theta is {theta}")
        return theta
    if section.values.get("rope_theta") is None:
        raise HfConfigError(
            f"{section.where('rope_parameters.rope_theta')} and {section.name}.rope_theta are both missing; add one, "
            "no default is assumed"
        )
    return section.get("rope_theta", float)


def _tied(top: _Section, has_lm_head: bool) -> bool:
    """Whether the head is the embedding. Only the top-level flag counts; a head in the file is always kept."""
    if has_lm_head:
        return False
    if not top.get("tie_word_embeddings", bool):
        raise HfConfigError(
            f"{top.where('tie_word_embeddings')} is false, but the weight files hold no {LM_HEAD}: the output head "
            "would be random. Restore the tensor, or set the flag to true if the head really is the embedding"
        )
    return True


def _first_id(field: str, sections: list[_Section]) -> tuple[int, ...]:
    """Token ids of the first section that has the field: one id or a list of ids."""
    for section in sections:
        value = section.values.get(field)
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not ids or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise HfConfigError(f"{section.where(field)} must be an id or a list of ids, got {value!r}")
        return tuple(ids)
    raise HfConfigError(f"{sections[-1].where(field)} is missing; add it, no default is assumed")


def tie_flag(folder: Path) -> bool | None:
    """The top-level ``tie_word_embeddings`` of a folder's ``config.json``, None where absent."""
    return _Section(read_json(folder / CONFIG_FILE), str(folder / CONFIG_FILE)).get("tie_word_embeddings", bool, None)


def to_hf_config(
    model: ModelConfig, *, dtype: str = "bfloat16", model_type: str = "llava_onevision2"
) -> dict[str, Any]:
    """A complete ``config.json`` for a model that was born here.

    Args:
      model: geometry.
      dtype: what the weight files hold ("bfloat16", "float16" or "float32").
      model_type: "llava_onevision2" or "mage_vl".
    """
    architecture, vision_type = FAMILIES[model_type]
    v, t = model.vision, model.text
    eos = model.eos_token_ids[0] if len(model.eos_token_ids) == 1 else list(model.eos_token_ids)
    return {
        "architectures": [architecture],
        "bos_token_id": model.bos_token_id,
        "dtype": dtype,
        "eos_token_id": eos,
        "image_token_id": model.image_token_id,
        "model_type": model_type,
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": model.bos_token_id,
            "dtype": dtype,
            "eos_token_id": eos,
            "head_dim": t.head_dim,
            "hidden_act": "silu",
            "hidden_size": t.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": t.mlp_size,
            "layer_types": ["full_attention"] * t.num_layers,
            "max_position_embeddings": t.max_positions,
            "max_window_layers": t.num_layers,
            "model_type": "qwen3",
            "num_attention_heads": t.num_heads,
            "num_hidden_layers": t.num_layers,
            "num_key_value_heads": t.num_kv_heads,
            "rms_norm_eps": t.rms_norm_eps,
            "rope_parameters": {"rope_theta": t.rope_theta, "rope_type": "default"},
            "sliding_window": None,
            "tie_word_embeddings": model.tied_embeddings,
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": t.vocab_size,
        },
        "tie_word_embeddings": model.tied_embeddings,
        "video_token_id": model.video_token_id,
        "vision_config": {
            "attention_dropout": 0.0,
            "frame_windows_size": v.frame_window_size,
            "hidden_act": "gelu",
            "hidden_size": v.hidden_size,
            "image_size": 448,  # required by the format, unused by the model
            "initializer_range": 0.02,
            "intermediate_size": v.mlp_size,
            "layer_norm_eps": v.layer_norm_eps,
            "layer_norm_type": "layer_norm",
            "model_type": vision_type,
            "num_attention_heads": v.num_heads,
            "num_channels": v.num_channels,
            "num_hidden_layers": v.num_layers,
            "out_hidden_size": t.hidden_size,
            "patch_size": v.patch_size,
            "rope_theta": v.rope_theta,
            "spatial_merge_size": v.spatial_merge_size,
            "temporal_patch_size": 1,
            "text_hidden_size": t.hidden_size,
            "tokens_per_second": 1,
            "use_head": False,
            "use_patch_position_encoding": False,
        },
        "vision_end_token_id": model.vision_end_token_id,
        "vision_start_token_id": model.vision_start_token_id,
    }


def write_hf_config(
    folder: Path, model: ModelConfig, *, dtype: str = "bfloat16", model_type: str = "llava_onevision2"
) -> None:
    """Writes ``config.json`` and ``generation_config.json`` into ``folder``."""
    config = to_hf_config(model, dtype=dtype, model_type=model_type)
    generation = {"bos_token_id": model.bos_token_id, "eos_token_id": config["eos_token_id"]}
    for name, values in ((CONFIG_FILE, config), (GENERATION_FILE, generation)):
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def set_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """A copy of a config whose dtype fields say ``dtype``, so that loaders do not cast back."""
    config = json.loads(json.dumps(config))
    sections = [config, *(config[k] for k in ("text_config", "vision_config") if isinstance(config.get(k), dict))]
    for section in sections:
        for key in ("dtype", "torch_dtype"):
            if key in section:
                section[key] = dtype
    return config


def same_geometry(a: ModelConfig, b: ModelConfig) -> bool:
    """Whether two configs describe the same tensors and the same function (the head's tying aside)."""
    return dataclasses.replace(a, tied_embeddings=False) == dataclasses.replace(b, tied_embeddings=False)
