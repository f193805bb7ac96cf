"""Generates text from a prompt and screenshots, streaming to the terminal.

    python launch/generate.py --model DIR --image screen.png --prompt "Click the Submit button."

DIR is a Hugging Face folder, a converted folder, a run (its newest checkpoint) or one step of a run. The answer goes to
standard output as it is generated; timing goes to standard error.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np

from mage_jax.agent.tokenizer import Tokenizer, TokenizerError
from mage_jax.config import DTYPES, ComputeConfig, ConfigError
from mage_jax.data import preprocessor
from mage_jax.data.prompts import prompt_rows, prompt_sample
from mage_jax.model.generate import Generator
from mage_jax.model.sampling import Sampling
from mage_jax.weights.load import load_model


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint folder, of Hugging Face's layout or ours")
    parser.add_argument("--image", action="append", default=[], help="a picture; repeat for several, in order")
    parser.add_argument("--prompt", required=True, help="the user's text, placed after the pictures")
    parser.add_argument("--system", help="system prompt (default: the chat template's)")
    parser.add_argument("--tokenizer", help="tokenizer.json or its folder (default: the checkpoint's own)")
    parser.add_argument("--max_new_tokens", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top_p", type=float, default=1.0)
    parser.add_argument("--top_k", type=int, default=0, help="0 turns it off (default)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chunk", type=int, default=8, help="tokens per device call; 1 streams every token at once")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of weights and activations (default: bfloat16 on an accelerator, else float32)"
    )
    args = parser.parse_args(argv)
    for name in ("max_new_tokens", "chunk"):
        if getattr(args, name) < 1:
            parser.error(f"argument --{name}: must be at least 1, got {getattr(args, name)}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        return run(args)
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:  # our errors are ValueErrors that name the file or field
        print(f"generate.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ngenerate.py: interrupted", file=sys.stderr)
        return 130


def run(args: argparse.Namespace) -> int:
    sampling = Sampling(temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, seed=args.seed)
    dtype = args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    started = time.perf_counter()
    model = load_model(args.model, dtype=dtype)
    tokenizer = load_tokenizer(args.tokenizer or model.assets, chosen=bool(args.tokenizer))
    if tokenizer.special_ids.image_pad != model.config.image_token_id:
        raise ConfigError(
            f"{tokenizer.source}: <|image_pad|> is {tokenizer.special_ids.image_pad}, the model's image token is "
            f"{model.config.image_token_id}: this tokenizer belongs to another checkpoint"
        )
    content = [{"type": "image"} for _ in args.image] + [{"type": "text", "text": args.prompt}]
    messages = [{"role": "system", "content": args.system}] if args.system is not None else []
    sample = prompt_sample(
        [*messages, {"role": "user", "content": content}],
        args.image,
        tokenizer=tokenizer,
        image=preprocessor.load(model.assets, vision=model.config.vision),
        model=model.config,
    )
    generator = Generator(model.params, config=model.config, compute=ComputeConfig(compute_dtype=dtype))
    loaded = time.perf_counter()
    stream = tokenizer.stream()
    ends = set(model.config.eos_token_ids)
    count, first = 0, None
    for chunk in generator.stream(
        prompt_rows([sample], model=model.config), sampling, max_new_tokens=args.max_new_tokens, chunk=args.chunk
    ):
        first = first or time.perf_counter()
        for token in chunk.tokens[0][chunk.live[0]].tolist():
            count += 1
            if token not in ends:
                print(stream.push(token), end="", flush=True)
    print(stream.flush(), flush=True)
    seconds = time.perf_counter() - first
    after_first = count - min(count, args.chunk)
    speed = f", then {after_first / seconds:.1f} tokens/s" if after_first else ""
    print(
        f"[{len(sample.tokens)} prompt tokens ({int(np.sum(sample.tokens == model.config.image_token_id))} visual), "
        f"{count} new; loaded in {loaded - started:.1f} s, first tokens after {first - loaded:.1f} s with compilation"
        f"{speed}]",
        file=sys.stderr,
    )
    return 0


def load_tokenizer(place: str | Path, *, chosen: bool) -> Tokenizer:
    """The named tokenizer, or the checkpoint's own; says what to do when a checkpoint has none."""
    try:
        return Tokenizer.load(place)
    except TokenizerError as error:
        if chosen or os.path.exists(Path(place) / "tokenizer.json"):
            raise
        raise TokenizerError(f"{error}; or name one with --tokenizer") from error


if __name__ == "__main__":
    sys.exit(main())
