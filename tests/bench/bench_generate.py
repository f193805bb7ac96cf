"""Tokens per second of our prefill and decode against transformers on the same random Qwen3-shaped weights.

Text only, float32, on the CPU, both warmed, measured in turns in one run, greedy without an end token so that both do
the same work. Prints medians and the ratio ours / transformers (above 1: ours is faster), and checks that both chose
the same tokens. Needs ``bash launch/setup.sh --bench``.

    .venv/bin/python tests/bench/bench_generate.py [--size small|0.6b] [--batch 1 4] [--prompt 128] [--new 64]
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

from configs.models import mage_vl_4b
from mage_jax.config import ComputeConfig, ModelConfig
from mage_jax.model.generate import Generator
from mage_jax.model.sampling import Sampling
from mage_jax.params import flatten, init_params
from mage_jax.types import TEXT_TOKEN, PackedRows
from mage_jax.weights.names import slots

# (hidden, layers, heads, kv heads, head size, feed-forward, vocabulary)
SIZES = {
    "tiny": (256, 4, 8, 4, 32, 768, 4096),
    "small": (1024, 8, 16, 8, 128, 3072, 32_768),
    "0.6b": (1024, 28, 16, 8, 128, 3072, 151_936),
}


def model_config(size: str) -> ModelConfig:
    hidden, layers, heads, kv_heads, head_dim, mlp, vocab = SIZES[size]
    full = mage_vl_4b()
    text = dataclasses.replace(
        full.text,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_size=mlp,
        vocab_size=vocab,
    )
    vision = dataclasses.replace(full.vision, num_layers=1, hidden_size=64, num_heads=2, mlp_size=64)
    ids = {f.name: vocab - 1 for f in dataclasses.fields(ModelConfig) if f.name.endswith("_token_id")}
    return dataclasses.replace(full, text=text, vision=vision, eos_token_ids=(vocab - 1,), **ids)


def transformers_model(config: ModelConfig, params: dict, threads: int):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(threads)
    t = config.text
    reference = Qwen3Config(
        hidden_size=t.hidden_size,
        num_hidden_layers=t.num_layers,
        num_attention_heads=t.num_heads,
        num_key_value_heads=t.num_kv_heads,
        head_dim=t.head_dim,
        intermediate_size=t.mlp_size,
        vocab_size=t.vocab_size,
        rms_norm_eps=t.rms_norm_eps,
        max_position_embeddings=t.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": t.rope_theta},
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(reference)
    flat = flatten(params)
    state = {}
    for slot in slots(config):
        if "visual" in slot.name:
            continue
        leaf = flat[slot.path] if slot.layer is None else flat[slot.path][slot.layer]
        name = slot.name.replace("model.language_model.", "model.")
        state[name] = torch.from_numpy(np.array(leaf).reshape(slot.hf_shape))
    model = model.to_empty(device="cpu")
    model.load_state_dict(state)
    model.model.rotary_emb = type(model.model.rotary_emb)(reference)  # its buffer is not part of the state
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens")
    parser.add_argument("--new", type=int, default=64, help="new tokens")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each side, in turns")
    args = parser.parse_args()
    import torch

    config = model_config(args.size)
    params = init_params(config, jax.random.key(0))
    reference = transformers_model(config, params, os.cpu_count() or 1)
    # An end token that no greedy step reaches: the last id's logit is pushed down on both sides.
    generator = Generator(params, config=config, compute=ComputeConfig())
    print(f"{args.size}: {sum(x.size for x in jax.tree.leaves(params['text'])) / 1e6:.0f}M decoder parameters, float32")
    print("batch  what      ours tok/s  transformers tok/s  ratio")
    for batch in args.batch:
        ids = np.random.default_rng(batch).integers(0, config.text.vocab_size - 1, (batch, args.prompt))
        rows = PackedRows(
            tokens_bt=ids.astype(np.int32),
            segment_ids_bt=np.ones(ids.shape, np.int32),
            positions_bt=np.broadcast_to(np.arange(args.prompt, dtype=np.int32), ids.shape),
            vision_index_bt=np.full(ids.shape, TEXT_TOKEN, np.int32),
            patches_bpc=np.zeros((batch, 0, config.vision.patch_dim), np.float32),
            patch_windows_bp=np.zeros((batch, 0), np.int32),
            patch_positions_bp3=np.zeros((batch, 0, 3), np.int32),
        )
        prompt = torch.from_numpy(ids)

        def ours(new: int, rows=rows) -> np.ndarray:
            return generator(rows, Sampling(), max_new_tokens=new, chunk=new).tokens

        def theirs(new: int, prompt=prompt) -> np.ndarray:
            with torch.inference_mode():
                out = reference.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    do_sample=False,
                    max_new_tokens=new,
                    min_new_tokens=new,
                    pad_token_id=0,
                )
            return out[:, prompt.shape[1] :].numpy()

        same = np.mean(ours(args.new) == theirs(args.new))
        ours(1), theirs(1)
        times: dict[tuple[str, int], list[float]] = {}
        for _ in range(args.rounds):
            for name, run in (("ours", ours), ("theirs", theirs)):
                for new in (1, args.new):
                    start = time.perf_counter()
                    run(new)
                    times.setdefault((name, new), []).append(time.perf_counter() - start)
        median = {key: statistics.median(values) for key, values in times.items()}
        speed = {
            "prefill": {n: batch * args.prompt / median[n, 1] for n in ("ours", "theirs")},
            "decode": {n: batch * (args.new - 1) / (median[n, args.new] - median[n, 1]) for n in ("ours", "theirs")},
            "whole": {n: batch * args.new / median[n, args.new] for n in ("ours", "theirs")},
        }
        for what, both in speed.items():
            ratio = both["ours"] / both["theirs"]
            print(f"{batch:5d}  {what:8s}  {both['ours']:10.1f}  {both['theirs']:18.1f}  {ratio:5.2f}")
        print(f"       same greedy tokens: {same:.1%}")


if __name__ == "__main__":
    main()
