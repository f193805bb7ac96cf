"""The model in float64 numpy, written from its description and not from the library: the oracle of the parity tests.

It reads a checkpoint in the released layout and the released processor's arrays, and returns every tensor by its
reference name (tests/golden/model/README.md lists them). Loops are plain and nothing is cached: generation recomputes
everything for every token, so that a fault in a cache cannot hide in both sides.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import safe_open

ERF = np.vectorize(math.erf, otypes=[np.float64])
SAMPLE_KEYS = {"ids": "input_ids", "px": "pixel_values", "grid": "image_grid_thw", "pos": "patch_positions"}
SAMPLE_TENSORS = ("merged_features", "inputs_embeds", "dec_last_hidden", "logits")


def read_weights(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a folder in float64; shards are independent files, so no index is needed."""
    weights = {}
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, framework="np") as file:
            weights |= {name: file.get_tensor(name).astype(np.float64) for name in file.keys()}  # noqa: SIM118
    return weights


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1.0 + ERF(x / math.sqrt(2.0)))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1.0 + np.exp(-x))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """One head: [T, h] each, ``allowed`` [T, S] marks what a query sees."""
    scores = q @ k.T / math.sqrt(q.shape[-1])
    return softmax(np.where(allowed, scores, -np.inf)) @ v


def windows_of(grids: np.ndarray, frames: int) -> list[int]:
    """Sizes of the attention windows: one a grid row, a longer row cut every ``frames`` frames."""
    sizes = []
    for t, h, w in grids.tolist():
        for first in range(0, t, frames):
            sizes.append(min(frames, t - first) * h * w)
    return sizes


class Reference:
    """A checkpoint folder, ready to compute."""

    def __init__(self, folder: str | Path, config_file: str = "config.json") -> None:
        config = json.loads((Path(folder) / config_file).read_text())
        self.vision, self.text = config["vision_config"], config["text_config"]
        self.image_token = config["image_token_id"]
        rope = self.text.get("rope_parameters") or {}
        self.theta = float(rope["rope_theta"] if "rope_theta" in rope else self.text["rope_theta"])
        self.w = read_weights(Path(folder))
        if "lm_head.weight" not in self.w:
            if not config["tie_word_embeddings"]:
                raise ValueError(f"{folder}: neither a head nor tied embeddings")
            self.w["lm_head.weight"] = self.w["model.language_model.embed_tokens.weight"]

    # Small pieces

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        y = x @ self.w[f"{name}.weight"].T
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def layer_norm(self, name: str, x: np.ndarray) -> np.ndarray:
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = (centred**2).mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt(variance + self.vision["layer_norm_eps"])
        return scaled * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def rms_norm(self, name: str, x: np.ndarray) -> np.ndarray:
        scaled = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + self.text["rms_norm_eps"])
        return scaled * self.w[f"{name}.weight"]

    # Vision tower

    def vision_angles(self, positions: np.ndarray) -> np.ndarray:
        """[P, head]: per axis position x base^(-i/n), time then row then column, and all that twice."""
        half = self.vision["hidden_size"] // self.vision["num_attention_heads"] // 2
        unit = half // 16
        parts = []
        for axis, size in enumerate((4 * unit, 6 * unit, 6 * unit)):
            frequencies = self.vision["rope_theta"] ** (-np.arange(size) / size)
            parts.append(positions[:, axis, None].astype(np.float64) * frequencies)
        angles = np.concatenate(parts, axis=-1)
        return np.concatenate([angles, angles], axis=-1)

    @staticmethod
    def rotate_interleaved(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
        """Neighbours form a pair, yet each takes the angle of its own lane; no true rotation, and meant literally."""
        out = np.empty_like(x)
        out[:, 0::2] = x[:, 0::2] * np.cos(angles[:, 0::2]) - x[:, 1::2] * np.sin(angles[:, 0::2])
        out[:, 1::2] = x[:, 1::2] * np.cos(angles[:, 1::2]) + x[:, 0::2] * np.sin(angles[:, 1::2])
        return out

    def vision_block(self, layer: int, x: np.ndarray, angles: np.ndarray, sizes: list[int]) -> np.ndarray:
        name = f"model.visual.encoder.layers.{layer}"
        heads = self.vision["num_attention_heads"]
        q, k, v = np.split(self.linear(f"{name}.self_attn.qkv", self.layer_norm(f"{name}.layer_norm1", x)), 3, axis=-1)
        mixed = np.zeros_like(x)
        size = x.shape[-1] // heads
        for head in range(heads):
            lanes = slice(head * size, (head + 1) * size)
            rotated_q = self.rotate_interleaved(q[:, lanes], angles)
            rotated_k = self.rotate_interleaved(k[:, lanes], angles)
            start = 0
            for count in sizes:
                rows = slice(start, start + count)
                everything = np.ones((count, count), bool)
                mixed[rows, lanes] = attend(rotated_q[rows], rotated_k[rows], v[rows, lanes], everything)
                start += count
        x = x + self.linear(f"{name}.self_attn.proj", mixed)
        hidden = gelu(self.linear(f"{name}.mlp.fc1", self.layer_norm(f"{name}.layer_norm2", x)))
        return x + self.linear(f"{name}.mlp.fc2", hidden)

    def vision_tower(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Every vision tensor; empty ones for text alone."""
        merge = self.vision["spatial_merge_size"]
        kernel = self.w["model.visual.embeddings.patch_embedding.weight"]
        pixels = np.asarray(inputs.get("pixel_values", ()), np.float64).reshape(-1, kernel[0].size)
        grids = np.asarray(inputs.get("image_grid_thw", ()), np.int64).reshape(-1, 3)
        positions = np.asarray(inputs.get("patch_positions", ()), np.int64).reshape(-1, 3)
        assert len(pixels) == len(positions) == grids.prod(axis=1).sum()
        sizes = windows_of(grids, self.vision["frame_windows_size"])
        got = {"cu_seqlens": np.cumsum([0, *sizes])}
        got["vision_patch_embed"] = pixels @ kernel.reshape(len(kernel), -1).T
        got["vision_rope_angles"] = self.vision_angles(positions)
        got["vision_pre_ln"] = x = self.layer_norm("model.visual.layernorm_pre", got["vision_patch_embed"])
        for layer in range(self.vision["num_hidden_layers"]):
            x = self.vision_block(layer, x, got["vision_rope_angles"], sizes)
            got[f"vision_layer_{layer}"] = x
        # The norm sees single patches; only then are the four of a block put side by side.
        x = self.layer_norm("model.visual.merger.ln_q", x).reshape(-1, merge * merge * x.shape[-1])
        x = gelu(self.linear("model.visual.merger.mlp.0", x))
        got["merged_features"] = self.linear("model.visual.merger.mlp.2", x)
        return got

    # Decoder

    def rotate_halves(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        half = x.shape[-1] // 2
        angles = positions[:, None] * self.theta ** (-np.arange(half) / half)
        a, b = x[:, :half], x[:, half:]
        return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)

    def decoder_block(self, layer: int, x: np.ndarray, positions: np.ndarray, allowed: np.ndarray) -> np.ndarray:
        name = f"model.language_model.layers.{layer}"
        heads, kv_heads, size = (self.text[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        normed = self.rms_norm(f"{name}.input_layernorm", x)
        q, k, v = (self.linear(f"{name}.self_attn.{part}_proj", normed) for part in "qkv")
        mixed = np.zeros_like(q)
        for head in range(heads):
            lanes = slice(head * size, (head + 1) * size)
            shared = head // (heads // kv_heads)  # neighbours share a key head
            kv_lanes = slice(shared * size, (shared + 1) * size)
            query = self.rotate_halves(self.rms_norm(f"{name}.self_attn.q_norm", q[:, lanes]), positions)
            key = self.rotate_halves(self.rms_norm(f"{name}.self_attn.k_norm", k[:, kv_lanes]), positions)
            mixed[:, lanes] = attend(query, key, v[:, kv_lanes], allowed)
        x = x + self.linear(f"{name}.self_attn.o_proj", mixed)
        normed = self.rms_norm(f"{name}.post_attention_layernorm", x)
        gated = silu(self.linear(f"{name}.mlp.gate_proj", normed)) * self.linear(f"{name}.mlp.up_proj", normed)
        return x + self.linear(f"{name}.mlp.down_proj", gated)

    def decode_row(self, embeds: np.ndarray, positions: np.ndarray, segments: np.ndarray) -> dict[str, np.ndarray]:
        """One row [T, D]; a token sees earlier ones of its own segment. Padding is segment -1, and means nothing."""
        length = len(embeds)
        allowed = np.tril(np.ones((length, length), bool)) & (segments[:, None] == segments[None, :])
        got, x = {}, embeds
        for layer in range(self.text["num_hidden_layers"]):
            x = self.decoder_block(layer, x, positions, allowed)
            got[f"dec_layer_{layer}"] = x
        got["dec_last_hidden"] = self.rms_norm("model.language_model.norm", x)
        got["logits"] = self.linear("lm_head", got["dec_last_hidden"])
        return got

    # The whole

    def prepare(self, inputs: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(ids, segments, positions), each [B, T]; padding has segment -1."""
        ids = np.asarray(inputs["input_ids"])
        mask = np.asarray(inputs.get("attention_mask", np.ones_like(ids))).astype(bool)
        segments = np.where(mask, inputs.get("segment_ids", np.zeros_like(ids)), -1)
        if "position_ids" in inputs:
            return ids, segments, np.asarray(inputs["position_ids"])
        positions = np.ones_like(ids)
        for row, own in zip(positions, segments, strict=True):
            for segment in set(own.tolist()) - {-1}:
                row[own == segment] = np.arange(np.sum(own == segment))
        return ids, segments, positions

    def forward(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """All tensors, batch axis kept."""
        ids, segments, positions = self.prepare(inputs)
        got = self.vision_tower(inputs)
        embeds = self.w["model.language_model.embed_tokens.weight"][ids]
        places = ids == self.image_token
        if places.sum() != len(got["merged_features"]):
            raise ValueError(f"{places.sum()} image tokens for {len(got['merged_features'])} merged patches")
        embeds[places] = got["merged_features"]
        got["inputs_embeds"] = embeds
        rows = [self.decode_row(*row) for row in zip(embeds, positions, segments, strict=True)]
        return got | {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def greedy(self, inputs: Mapping[str, np.ndarray], embeds: np.ndarray, count: int) -> dict[str, np.ndarray]:
        """``count`` new tokens a row. A chosen image token is its plain embedding, no picture."""
        _, segments, positions = self.prepare(inputs)
        ids, scores = [], []
        for _ in range(count):
            new = [self.decode_row(*row)["logits"][-1] for row in zip(embeds, positions, segments, strict=True)]
            scores.append(np.stack(new))
            ids.append(scores[-1].argmax(axis=-1))
            embeds = np.concatenate([embeds, self.w["model.language_model.embed_tokens.weight"][ids[-1]][:, None]], 1)
            segments = np.concatenate([segments, segments[:, -1:]], axis=1)
            positions = np.concatenate([positions, positions[:, -1:] + 1], axis=1)
        logits = np.stack(scores, axis=1)
        best = np.sort(logits, axis=-1)
        return {
            "greedy_ids": np.stack(ids, axis=1),
            "greedy_logits": logits,
            "greedy_margins": best[..., -1] - best[..., -2],
        }

    def loss(self, inputs: Mapping[str, np.ndarray], logits: np.ndarray | None = None) -> float:
        """Mean cross-entropy of the next token over the labels that count.

        A label whose predecessor lies in another segment has nothing to be predicted from and does not count.
        """
        logits = self.forward(inputs)["logits"] if logits is None else logits
        _, segments, _ = self.prepare(inputs)
        labels = np.asarray(inputs["labels"])[:, 1:]
        counted = (labels != -100) & (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] >= 0)
        scores = logits[:, :-1][counted]
        top = scores.max(axis=-1)
        log_total = top + np.log(np.exp(scores - top[:, None]).sum(axis=-1))
        return float(np.mean(log_total - scores[np.arange(len(scores)), labels[counted]]))

    def tensors(self, inputs: Mapping[str, np.ndarray], *, greedy: int = 0) -> dict[str, np.ndarray]:
        """Every reference tensor by name; the batch axis is dropped where it is 1."""
        got = self.forward(inputs)
        batched = {"inputs_embeds", "dec_last_hidden", "logits"} | {n for n in got if n.startswith("dec_layer_")}
        if greedy and "segment_ids" not in inputs:
            chosen = self.greedy(inputs, got["inputs_embeds"], greedy)
            got, batched = got | chosen, batched | set(chosen)
        if "labels" in inputs:
            got["loss"] = np.asarray(self.loss(inputs, got["logits"]))
        if len(inputs["input_ids"]) == 1:
            got = {name: value[0] if name in batched else value for name, value in got.items()}
        mask = np.asarray(inputs.get("attention_mask", 1))
        if not mask.all():
            got["valid"] = mask[0] if len(mask) == 1 else mask
        if "segment_ids" in inputs:
            got["packed_logits"] = got.pop("logits")
            for index in range(len(inputs.get("lengths", ()))):
                keys = {usual: f"sample{index}_{short}" for short, usual in SAMPLE_KEYS.items()}
                sample = self.tensors({usual: inputs[key] for usual, key in keys.items() if key in inputs})
                got |= {f"sample{index}_{name}": sample[name] for name in SAMPLE_TENSORS}
        return got
