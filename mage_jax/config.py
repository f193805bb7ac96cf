"""Frozen config dataclasses and all their validation. Imports nothing of ours and no jax.

Model geometry has no defaults on purpose: the released values differ from the class defaults of the public code, and a
silently wrong rope base or epsilon costs days. Geometry comes from ``configs/models.py`` or from a checkpoint's file.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

DTYPES = ("float32", "bfloat16", "float16")
REMAT_POLICIES = ("none", "full", "dots")
ATTENTION_IMPLS = ("xla", "xla_chunked")
TOWERS = ("vision", "merger", "text", "lm_head")
PACKERS = ("first_fit", "best_fit")

# Per-channel statistics that the released preprocessor normalises pixels with (CLIP's). Part of the model, not a knob.
PIXEL_MEAN = (0.48145466, 0.4578275, 0.40821073)
PIXEL_STD = (0.26862954, 0.26130258, 0.27577711)


class ConfigError(ValueError):
    """A config value is wrong; the message starts with the dotted name of the field."""


def _require(condition: bool, field: str, message: str) -> None:
    if not condition:
        raise ConfigError(f"{field}: {message}")


def _positive(config: Any, *fields: str) -> None:
    for field in fields:
        value = getattr(config, field)
        _require(value > 0, f"{type(config).__name__}.{field}", f"must be positive, got {value!r}")


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """Mage-ViT: pre-norm transformer over 16x16 patches with 3-D rotary positions."""

    hidden_size: int
    num_layers: int
    num_heads: int
    mlp_size: int
    patch_size: int
    num_channels: int
    spatial_merge_size: int
    rope_theta: float
    layer_norm_eps: float
    frame_window_size: int  # frames of one grid row that attend to each other

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_dim(self) -> int:
        """Length of a patch vector (channels, y, x)."""
        return self.num_channels * self.patch_size**2

    @property
    def merge_factor(self) -> int:
        """Patches per visual token."""
        return self.spatial_merge_size**2

    @property
    def merged_size(self) -> int:
        return self.hidden_size * self.merge_factor

    def __post_init__(self) -> None:
        _positive(self, *(f.name for f in dataclasses.fields(self)))
        _require(
            self.hidden_size % self.num_heads == 0,
            "VisionConfig.num_heads",
            f"{self.num_heads} does not divide hidden_size {self.hidden_size}",
        )
        # Angles split half of the head 4:6:6 between t, row and column.
        _require(
            self.head_dim % 32 == 0,
            "VisionConfig.num_heads",
            f"head size {self.head_dim} must be a multiple of 32 for the 3-D rotary split",
        )


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """Qwen3 decoder."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    vocab_size: int
    rope_theta: float
    rms_norm_eps: float
    max_positions: int

    def __post_init__(self) -> None:
        _positive(self, *(f.name for f in dataclasses.fields(self)))
        _require(
            self.num_heads % self.num_kv_heads == 0,
            "TextConfig.num_kv_heads",
            f"{self.num_kv_heads} does not divide num_heads {self.num_heads}",
        )
        _require(self.head_dim % 2 == 0, "TextConfig.head_dim", f"must be even, got {self.head_dim}")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The whole model: geometry and the token ids that it treats specially."""

    vision: VisionConfig
    text: TextConfig
    tied_embeddings: bool  # True: no separate ``lm_head`` weight
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    bos_token_id: int
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        named = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name.endswith("_token_id")}
        named |= {f"eos_token_ids[{i}]": v for i, v in enumerate(self.eos_token_ids)}
        for name, value in named.items():
            _require(
                0 <= value < self.text.vocab_size,
                f"ModelConfig.{name}",
                f"{value} is outside the vocabulary of {self.text.vocab_size}",
            )
        _require(len(self.eos_token_ids) > 0, "ModelConfig.eos_token_ids", "needs at least one id")


@dataclasses.dataclass(frozen=True)
class ImageConfig:
    """How a screenshot becomes patches. Defaults are the released preprocessor's values."""

    min_pixels: int = 3136
    max_pixels: int = 4_000_000

    def __post_init__(self) -> None:
        _positive(self, "min_pixels", "max_pixels")
        _require(
            self.min_pixels <= self.max_pixels,
            "ImageConfig.min_pixels",
            f"{self.min_pixels} is larger than max_pixels {self.max_pixels}",
        )


@dataclasses.dataclass(frozen=True)
class ComputeConfig:
    """How the same function is computed: precision, memory and kernels; never what it computes."""

    compute_dtype: str = "float32"  # activations; norms, rotary, softmax and loss stay float32
    remat: str = "none"  # what the backward recomputes: nothing, everything in a layer, or all but matmul outputs
    attention: str = "xla"
    attention_chunk: int = 512  # query rows at a time in "xla_chunked"
    vocab_chunk: int = 1024  # sequence positions whose logits exist at a time
    matmul_precision: str = "default"  # "highest" for parity checks

    def __post_init__(self) -> None:
        _require(self.compute_dtype in DTYPES, "ComputeConfig.compute_dtype", f"{self.compute_dtype!r} not in {DTYPES}")
        _require(self.remat in REMAT_POLICIES, "ComputeConfig.remat", f"{self.remat!r} not in {REMAT_POLICIES}")
        _require(
            self.attention in ATTENTION_IMPLS, "ComputeConfig.attention", f"{self.attention!r} not in {ATTENTION_IMPLS}"
        )
        _require(
            self.matmul_precision in ("default", "high", "highest"),
            "ComputeConfig.matmul_precision",
            f"{self.matmul_precision!r} not in ('default', 'high', 'highest')",
        )
        _positive(self, "attention_chunk", "vocab_chunk")


@dataclasses.dataclass(frozen=True)
class SourceConfig:
    """One record set of a mixture. Its samples are called ``name/id``, and its shuffle depends on its name."""

    name: str
    records: tuple[str, ...]  # JSONL files
    weight: float = 1.0  # samples drawn from it, relative to the other sources'

    def __post_init__(self) -> None:
        _require(bool(self.name) and "/" not in self.name, "SourceConfig.name", f"{self.name!r} is empty or has a /")
        _require(len(self.records) > 0, "SourceConfig.records", f"source {self.name!r} has no files")
        _require(
            0 < self.weight < float("inf"),
            "SourceConfig.weight",
            f"must be positive and finite, got {self.weight!r}; leave source {self.name!r} out to not draw from it",
        )


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Records on disk and the shape of the packed rows made of them."""

    records: tuple[str, ...] = ()  # JSONL files; image paths inside are relative to their file
    mixture: tuple[SourceConfig, ...] = ()  # instead of ``records``: several record sets, drawn by weight
    packed: str = ""  # instead of both: a folder of ready rows, written by mage_jax.data.pack
    eval_records: tuple[str, ...] = ()
    tokenizer: str = ""  # "": the own one of init_from; else "toy", a tokenizer.json, or a folder holding one
    rows: int = 8  # packed rows in a step, over all hosts
    tokens_per_row: int = 32_768
    patches_per_row: int = 131_072
    max_samples_per_row: int = 0  # 0: no limit
    packer: str = "first_fit"  # "best_fit": fuller rows of like attention cost, chosen over a window
    packing_bins: int = 16  # first_fit: rows kept open
    window: int = 256  # best_fit: pending samples that a row is chosen from
    epochs: int = 0  # 0: repeat for ever
    shuffle: bool = True
    workers: int = 0  # decoding processes; part of a run's identity (order depends on it)
    image: ImageConfig = dataclasses.field(default_factory=ImageConfig)

    def __post_init__(self) -> None:
        _positive(self, "rows", "tokens_per_row", "packing_bins", "window")
        _require(self.packer in PACKERS, "DataConfig.packer", f"{self.packer!r} not in {PACKERS}")
        _require(
            not (self.records and self.mixture),
            "DataConfig.mixture",
            "records are given too; leave records empty, or make them a source of the mixture",
        )
        _require(
            not (self.packed and (self.records or self.mixture)),
            "DataConfig.packed",
            "records or a mixture are given too; a packed folder holds its own",
        )
        names = [source.name for source in self.mixture]
        for name in names:
            _require(names.count(name) == 1, "DataConfig.mixture", f"two sources are named {name!r}")
        for field in ("patches_per_row", "max_samples_per_row", "epochs", "workers"):
            _require(getattr(self, field) >= 0, f"DataConfig.{field}", "must not be negative")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up and cosine decay. The paper gives none of these numbers."""

    learning_rate: float = 1e-5  # not reported
    end_lr_ratio: float = 0.1  # not reported
    warmup_steps: int = 100  # not reported
    beta1: float = 0.9  # not reported
    beta2: float = 0.95  # not reported
    eps: float = 1e-8  # not reported
    weight_decay: float = 0.1  # not reported; never on norms and biases
    clip_norm: float = 1.0  # not reported; 0 turns clipping off
    frozen: tuple[str, ...] = ()  # towers without gradient: vision, merger, text, lm_head

    def __post_init__(self) -> None:
        _positive(self, "learning_rate", "eps")
        for field in ("warmup_steps", "weight_decay", "clip_norm", "end_lr_ratio"):
            _require(getattr(self, field) >= 0, f"OptimizerConfig.{field}", "must not be negative")
        for field in ("beta1", "beta2"):
            _require(0 <= getattr(self, field) < 1, f"OptimizerConfig.{field}", "must be in [0, 1)")
        for tower in self.frozen:
            _require(tower in TOWERS, "OptimizerConfig.frozen", f"{tower!r} not in {TOWERS}")
        _require(set(self.frozen) != set(TOWERS), "OptimizerConfig.frozen", "every tower is frozen: nothing to train")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices: data replicates parameters, fsdp shards them; both split the rows. -1 takes what is left."""

    data: int = -1
    fsdp: int = 1

    def __post_init__(self) -> None:
        sizes = (self.data, self.fsdp)
        _require(all(s == -1 or s > 0 for s in sizes), "MeshConfig", f"sizes must be positive or -1, got {sizes}")
        _require(sizes.count(-1) <= 1, "MeshConfig", "only one axis may be -1")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    every: int = 500  # steps; the last step is always saved
    keep: int = 2  # newest checkpoints kept

    def __post_init__(self) -> None:
        _positive(self, "every", "keep")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """A supervised run, from records to checkpoints."""

    name: str
    model: ModelConfig
    steps: int
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    compute: ComputeConfig = dataclasses.field(default_factory=ComputeConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    param_dtype: str = "float32"
    micro_batches: int = 1  # gradient accumulation; must divide data.rows
    seed: int = 0
    init_from: str = ""  # a checkpoint or a Hugging Face folder; its geometry replaces ``model``
    log_every: int = 10
    eval_every: int = 0  # 0: never

    def __post_init__(self) -> None:
        _require(bool(self.name), "TrainConfig.name", "is empty")
        _positive(self, "steps", "micro_batches", "log_every")
        _require(self.steps < 2**31, "TrainConfig.steps", f"must be below 2**31, got {self.steps}")
        _require(0 <= self.seed < 2**31, "TrainConfig.seed", f"must be in [0, 2**31), got {self.seed}")
        _require(self.eval_every >= 0, "TrainConfig.eval_every", "must not be negative")
        _require(self.param_dtype in DTYPES, "TrainConfig.param_dtype", f"{self.param_dtype!r} not in {DTYPES}")
        _require(
            self.data.rows % self.micro_batches == 0,
            "TrainConfig.micro_batches",
            f"{self.micro_batches} does not divide data.rows {self.data.rows}",
        )
        _require(
            self.data.patches_per_row % self.model.vision.merge_factor == 0,
            "TrainConfig.data.patches_per_row",
            f"must be a multiple of {self.model.vision.merge_factor}",
        )


def to_dict(config: Any) -> Any:
    """A nested plain dict (tuples kept) of a config dataclass."""
    if dataclasses.is_dataclass(config):
        return {f.name: to_dict(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, (tuple, list)):
        return tuple(to_dict(v) for v in config)
    return config


def from_dict(cls: type, values: Any, *, name: str = "config") -> Any:
    """Inverse of ``to_dict``. Unknown, missing and ill-typed fields raise ``ConfigError`` with their dotted name."""
    _require(isinstance(values, typing.Mapping), name, f"must be a mapping, got {type(values).__name__}")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in values:
        _require(key in fields, f"{name}.{key}", f"is not a field of {cls.__name__} (fields: {', '.join(fields)})")
    kwargs = {}
    for key, field in fields.items():
        if key in values:
            kwargs[key] = _coerce(hints[key], values[key], f"{name}.{key}")
        else:
            has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
            _require(has_default, f"{name}.{key}", "is missing")
    return cls(**kwargs)


def _coerce(hint: Any, value: Any, name: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else from_dict(hint, value, name=name)
    if typing.get_origin(hint) is tuple:
        _require(isinstance(value, (tuple, list)), name, f"must be a tuple, got {value!r}")
        item = typing.get_args(hint)[0]
        return tuple(_coerce(item, v, f"{name}[{i}]") for i, v in enumerate(value))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    _require(
        isinstance(value, hint) and not (hint is int and isinstance(value, bool)),
        name,
        f"must be {hint.__name__}, got {value!r}",
    )
    return value
