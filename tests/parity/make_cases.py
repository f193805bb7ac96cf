"""Makes random checkpoints, inputs and expected tensors beyond the stored references.

    python tests/parity/make_cases.py OUT [NAME...]

Each case is a folder laid out like the stored ones (config.json, model.safetensors, inputs.npz, expected.npz), small,
seeded, and named after the one thing in which it departs from them. The expected tensors are the float64 oracle's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ml_dtypes
import numpy as np
import safetensors.numpy

from tests.reference import Reference

TEMPLATE = Path(__file__).resolve().parents[1] / "golden" / "model" / "A_square"
VOCAB, IMAGE, VIDEO, START, END, BOS, EOS = 96, 90, 91, 92, 93, 94, 95
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}

Grid = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Case:
    """What to make.

    Attributes:
      grids: for each batch row its grid rows (t, h, w); a row without any is text alone.
      text_tokens: tokens of each batch row that are not image tokens; rows are padded on the left to the longest.
      vision, text, top: fields of the config that differ from ``base_config``; None removes one.
      config_file: the stored config to start from.
      dtype: of the weight file.
      head: "own" writes a head of its own, "none" writes none.
      positions: replaces the patch positions in block order, given the random generator and these.
      change: last edit of the inputs.
      labels: whether to add labels.
      greedy: new tokens.
      seed: of everything random.
    """

    grids: tuple[tuple[Grid, ...], ...] = (((1, 4, 4),),)
    text_tokens: tuple[int, ...] = (7,)
    vision: dict[str, Any] = dataclasses.field(default_factory=dict)
    text: dict[str, Any] = dataclasses.field(default_factory=dict)
    top: dict[str, Any] = dataclasses.field(default_factory=dict)
    config_file: str = "config.json"
    dtype: str = "float32"
    head: str = "own"
    positions: Callable[[np.random.Generator, np.ndarray], np.ndarray] | None = None
    change: Callable[[dict[str, np.ndarray]], None] | None = None
    labels: bool = False
    greedy: int = 0
    seed: int = 0


def base_config(case: Case) -> dict[str, Any]:
    """The stored config shrunk, so that the writer under test has no part in it."""
    config = json.loads((TEMPLATE / case.config_file).read_text())
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "bos_token_id": BOS, "eos_token_id": EOS}
    config |= ids | {"vision_start_token_id": START, "vision_end_token_id": END, "dtype": case.dtype} | case.top
    text, vision = config["text_config"], config["vision_config"]
    text |= {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"head_dim": 16, "intermediate_size": 80, "vocab_size": VOCAB, "dtype": case.dtype}
    text |= {"bos_token_id": BOS, "eos_token_id": EOS, "layer_types": ["full_attention"] * 2} | case.text
    vision |= {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}
    vision |= {"patch_size": 4} | case.vision
    vision["out_hidden_size"] = vision["text_hidden_size"] = text["hidden_size"]
    for section in (config, text, vision):
        for key in [key for key, value in section.items() if value is None and key != "sliding_window"]:
            del section[key]
    return config


def tensor_shapes(config: dict[str, Any], *, head: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the released layout."""
    v, t = config["vision_config"], config["text_config"]
    d, merged = v["hidden_size"], v["hidden_size"] * v["spatial_merge_size"] ** 2
    shapes = {"embeddings.patch_embedding.weight": (d, v["num_channels"], v["patch_size"], v["patch_size"])}

    def biased(name: str, *shape: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = shape, shape[:1]

    biased("layernorm_pre", d)
    for i in range(v["num_hidden_layers"]):
        biased(f"encoder.layers.{i}.layer_norm1", d)
        biased(f"encoder.layers.{i}.layer_norm2", d)
        biased(f"encoder.layers.{i}.self_attn.qkv", 3 * d, d)
        biased(f"encoder.layers.{i}.self_attn.proj", d, d)
        biased(f"encoder.layers.{i}.mlp.fc1", v["intermediate_size"], d)
        biased(f"encoder.layers.{i}.mlp.fc2", d, v["intermediate_size"])
    biased("merger.ln_q", d)
    biased("merger.mlp.0", merged, merged)
    biased("merger.mlp.2", t["hidden_size"], merged)
    named = {f"model.visual.{name}": shape for name, shape in shapes.items()}
    d, h = t["hidden_size"], t["head_dim"]
    queries, keys = t["num_attention_heads"] * h, t["num_key_value_heads"] * h
    layer = {"input_layernorm": (d,), "post_attention_layernorm": (d,), "self_attn.q_norm": (h,)}
    layer |= {"self_attn.k_norm": (h,), "self_attn.q_proj": (queries, d), "self_attn.k_proj": (keys, d)}
    layer |= {"self_attn.v_proj": (keys, d), "self_attn.o_proj": (d, queries)}
    layer |= {f"mlp.{part}_proj": (t["intermediate_size"], d) for part in ("gate", "up")}
    layer |= {"mlp.down_proj": (d, t["intermediate_size"])}
    text = {"embed_tokens": (t["vocab_size"], d), "norm": (d,)}
    text |= {f"layers.{i}.{name}": s for i in range(t["num_hidden_layers"]) for name, s in layer.items()}
    named |= {f"model.language_model.{name}.weight": shape for name, shape in text.items()}
    return named | ({"lm_head.weight": (t["vocab_size"], d)} if head else {})


def random_weight(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Scales at which every part of the function matters to the logits and none saturates."""
    if name.endswith(".bias"):
        return rng.normal(0, 0.1, shape)
    if len(shape) == 1:
        return rng.normal(1, 0.2, shape)
    if name.endswith("embed_tokens.weight"):
        return rng.normal(0, 1, shape)
    return rng.normal(0, 1 / np.sqrt(np.prod(shape[1:])), shape)


def block_order(grids: np.ndarray, merge: int) -> np.ndarray:
    """(t, row, column) of every patch, block after block; t is the frame's index in its grid row."""
    found = [
        (f, r + dr, c + dc)
        for t, h, w in grids.tolist()
        for f in range(t)
        for r in range(0, h, merge)
        for c in range(0, w, merge)
        for dr in range(merge)
        for dc in range(merge)
    ]
    return np.asarray(found, np.int64).reshape(-1, 3)


def make_inputs(case: Case, config: dict[str, Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """What the released processor would hand over."""
    v = config["vision_config"]
    merge = v["spatial_merge_size"]
    rows = []
    for grids, count in zip(case.grids, case.text_tokens, strict=True):
        ids = rng.integers(0, IMAGE, count).tolist()
        for t, h, w in grids:  # pictures at random places among the words
            block = [START, *[IMAGE] * (t * h * w // merge**2), END]
            at = int(rng.choice([i for i in range(len(ids) + 1) if i == len(ids) or IMAGE not in ids[i:]]))
            ids[at:at] = block
        rows.append(ids)
    longest = max(map(len, rows))
    pad = [longest - len(row) for row in rows]
    inputs = {
        "input_ids": np.asarray([[EOS] * n + row for n, row in zip(pad, rows, strict=True)], np.int64),
        "attention_mask": np.asarray([[0] * n + [1] * len(row) for n, row in zip(pad, rows, strict=True)], np.int64),
    }
    grid = np.asarray([g for grids in case.grids for g in grids], np.int64).reshape(-1, 3)
    if len(grid):
        positions = block_order(grid, merge)
        inputs["image_grid_thw"] = grid
        inputs["pixel_values"] = rng.normal(size=(len(positions), v["num_channels"] * v["patch_size"] ** 2))
        inputs["pixel_values"] = inputs["pixel_values"].astype(np.float32)
        inputs["patch_positions"] = case.positions(rng, positions) if case.positions else positions
    if case.labels:
        chosen = (inputs["attention_mask"] == 1) & (rng.random(inputs["input_ids"].shape) < 0.6)
        inputs["labels"] = np.where(chosen & (inputs["input_ids"] < IMAGE), inputs["input_ids"], -100)
    if case.change:
        case.change(inputs)
    return inputs


def make_case(case: Case, folder: Path) -> Path:
    """Writes a whole case into a new folder."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(case.seed)
    config = base_config(case)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    shapes = tensor_shapes(config, head=case.head == "own")
    weights = {name: random_weight(rng, name, shape).astype(DTYPES[case.dtype]) for name, shape in shapes.items()}
    safetensors.numpy.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    inputs = make_inputs(case, config, rng)
    np.savez(folder / "inputs.npz", **inputs)
    np.savez(folder / "expected.npz", **Reference(folder).tensors(inputs, greedy=case.greedy))
    return folder


def _frame_numbers(*frames: int) -> Callable:
    """Puts true frame numbers where the grid row (or the count of grid rows) has indices."""

    def positions(_rng: np.random.Generator, found: np.ndarray) -> np.ndarray:
        per_frame = len(found) // len(frames)
        return np.concatenate([np.repeat(frames, per_frame)[:, None], found[:, 1:]], axis=1)

    return positions


def _sparse(rng: np.random.Generator, found: np.ndarray) -> np.ndarray:
    """Anything goes: blocks torn apart, repeats, gaps."""
    return rng.integers(0, 90, found.shape)


def _empty_pictures(inputs: dict[str, np.ndarray]) -> None:
    inputs["pixel_values"] = np.zeros((0, 48), np.float32)
    inputs["image_grid_thw"] = inputs["patch_positions"] = np.zeros((0, 3), np.int64)


def _no_mask(inputs: dict[str, np.ndarray]) -> None:
    """The least that a caller may hand over."""
    del inputs["attention_mask"]


def _explicit_positions(inputs: dict[str, np.ndarray]) -> None:
    mask = inputs["attention_mask"]
    inputs["position_ids"] = np.where(mask == 1, np.cumsum(mask, axis=1) - 1, 1)


def _packed(inputs: dict[str, np.ndarray]) -> None:
    """Three samples in a row with padding behind, counted from 1; the cuts fall between tokens of any kind."""
    length, padding = inputs["input_ids"].shape[1], 3
    segments = np.arange(length) * 3 // length + 1
    positions = np.concatenate([np.arange(np.sum(segments == number)) for number in (1, 2, 3)])
    inputs |= {"segment_ids": segments[None], "position_ids": positions[None]}
    fill = {"input_ids": EOS, "attention_mask": 0, "segment_ids": 0, "position_ids": 0, "labels": -100}
    for name in fill.keys() & inputs.keys():
        inputs[name] = np.pad(inputs[name], ((0, 0), (0, padding)), constant_values=fill[name])


_NO_PICTURE = {"grids": ((),), "text_tokens": (12,)}
_PACKED = {"grids": (((1, 2, 4), (1, 4, 2)),), "text_tokens": (22,), "change": _packed}
_BATCH = {"grids": (((1, 4, 4),), (), ((1, 2, 4), (1, 6, 2))), "text_tokens": (9, 6, 5)}

CASES: dict[str, Case] = {
    "text_only": Case(**_NO_PICTURE, change=_no_mask),
    "text_only_empty_arrays": Case(**_NO_PICTURE, change=_empty_pictures),
    "tied": Case(head="none", top={"tie_word_embeddings": True}),
    "flag_true_own_head": Case(top={"tie_word_embeddings": True}),
    "gqa_8_1": Case(text={"num_attention_heads": 8, "num_key_value_heads": 1}),
    "gqa_4_4": Case(text={"num_key_value_heads": 4}),
    "gqa_6_2": Case(text={"num_attention_heads": 6}),
    "per_frame_grids": Case(grids=(((1, 4, 2),) * 3,), positions=_frame_numbers(0, 12, 47)),
    "windows_6_and_9": Case(
        grids=(((6, 2, 2), (9, 2, 2)),), positions=_frame_numbers(0, 3, 4, 9, 17, 40, *range(5, 77, 8))
    ),
    "sparse_positions": Case(grids=(((3, 4, 4), (1, 2, 2)),), positions=_sparse),
    "left_padded_batch": Case(**_BATCH, greedy=4),
    "bf16": Case(dtype="bfloat16"),
    "f16": Case(dtype="float16", top={"tie_word_embeddings": True}, head="none"),
    "mage_vl_names": Case(config_file="config.mage_vl.json", greedy=3),
    "flat_rope_theta": Case(text={"rope_parameters": None, "rope_theta": 123456.0}),
    "vit_head_64": Case(vision={"hidden_size": 128}),
    "other_widths": Case(
        vision={"hidden_size": 96, "num_attention_heads": 3, "patch_size": 16},
        text={"hidden_size": 40, "head_dim": 24, "num_attention_heads": 2, "num_key_value_heads": 1},
    ),
    "packed_with_padding": Case(**_PACKED),
    "packed_labels": Case(**_PACKED, labels=True),
    "labels": Case(**_BATCH, labels=True, change=_explicit_positions),
}


def cases(*, seeds: int = 1) -> dict[str, Case]:
    """Every case, each with its own seed; more seeds give further draws under numbered names."""
    found = {}
    for name, case in CASES.items():
        for draw in range(seeds):
            label = name if draw == 0 else f"{name}_{draw}"
            found[label] = dataclasses.replace(case, seed=case.seed + zlib.crc32(label.encode()) % 100_000)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to put the cases in")
    parser.add_argument("names", nargs="*", choices=[[], *CASES], metavar="NAME", help="cases to make (default: all)")
    args = parser.parse_args()
    for name, case in cases().items():
        if not args.names or name in args.names:
            print(make_case(case, args.out / name))


if __name__ == "__main__":
    main()
