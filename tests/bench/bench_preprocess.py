"""Screenshots a second on one core: file to model input, ours beside transformers' Qwen2-VL image processors.

The same 1920x1080 pictures as PNG and as JPEG, decoded, resized to multiples of 32, cut into 16x16 patches, and their
sample's text tokenised. "training" is what the loader does: raw uint8 patches, which the model normalises. "float32" is
the reference's own output, ``pixel_values``. Processor time of one thread, medians, measured in turns; the last column
is the reference's time over ours (above 1: ours is faster). Needs ``bash launch/setup.sh --bench``; a processor that
cannot be made is left out, with the reason.

    .venv/bin/python tests/bench/bench_preprocess.py [--pictures 4] [--rounds 7] [--text_tokens 560]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from PIL import Image, ImageDraw

from configs.models import mage_vl_4b
from mage_jax.agent.tokenizer import Tokenizer
from mage_jax.config import PIXEL_MEAN, PIXEL_STD, ImageConfig
from mage_jax.data.image import MERGE_SIZE, PATCH_SIZE, ImageRef, normalize_patches, preprocess
from mage_jax.data.parse import parse_record
from mage_jax.data.samples import make_sample

WIDTH, HEIGHT = 1920, 1080
MERGED = 2_040  # visual tokens of one screenshot
LIMITS = ImageConfig()
SENTENCE = "Open the settings of the second account and choose the notifications tab. "


def screenshot(seed: int) -> Image.Image:
    """Windows, lines of text and a photograph-like patch of noise."""
    rng = np.random.default_rng(seed)
    picture = Image.new("RGB", (WIDTH, HEIGHT), (236, 239, 244))
    draw = ImageDraw.Draw(picture)
    for _ in range(30):
        x, y = int(rng.integers(0, WIDTH - 200)), int(rng.integers(0, HEIGHT - 100))
        color = tuple(rng.integers(120, 256, 3).tolist())
        draw.rectangle([x, y, x + int(rng.integers(150, 700)), y + int(rng.integers(80, 400))], fill=color)
        for line in range(8):
            draw.text((x + 4, y + 4 + 14 * line), SENTENCE, fill=(20, 20, 20))
    noise = rng.normal(128, 20, (300, 500, 3)).clip(0, 255).astype(np.uint8)
    picture.paste(Image.fromarray(noise), (int(rng.integers(0, WIDTH - 500)), int(rng.integers(0, HEIGHT - 300))))
    return picture


def references() -> dict[str, Callable[[str], np.ndarray]]:
    """Name -> file path to ``pixel_values``; says which processors are left out."""
    settings = {
        "patch_size": PATCH_SIZE,
        "merge_size": MERGE_SIZE,
        "temporal_patch_size": 1,
        "size": {"shortest_edge": LIMITS.min_pixels, "longest_edge": LIMITS.max_pixels},
        "image_mean": list(PIXEL_MEAN),
        "image_std": list(PIXEL_STD),
    }
    found: dict[str, Callable[[str], np.ndarray]] = {}
    modules = {"PIL": ("image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil", "np")}
    modules["torchvision"] = ("image_processing_qwen2_vl", "Qwen2VLImageProcessor", "pt")
    for name, (module, cls, tensors) in modules.items():
        try:
            made = __import__(f"transformers.models.qwen2_vl.{module}", fromlist=[cls])
            if name == "torchvision":
                import torchvision  # noqa: F401  (without it the class is a placeholder that fails later)
            processor = getattr(made, cls)(**settings)
        except Exception as error:
            print(f"transformers, {name}: left out ({type(error).__name__}: {str(error).strip().splitlines()[0]})")
            continue

        def run(path: str, processor=processor, tensors=tensors) -> np.ndarray:
            with Image.open(path) as opened:
                picture = opened.convert("RGB")
            return np.asarray(processor(images=[picture], return_tensors=tensors)["pixel_values"])

        found[f"transformers, {name}"] = run
    return found


def seconds(function: Callable[[], object]) -> float:
    begin = time.process_time()
    function()
    return time.process_time() - begin


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--pictures", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--text_tokens", type=int, default=560, help="about so many tokens of text a sample")
    parser.add_argument("--tokenizer", default="toy", help="toy, or a folder or file as in DataConfig.tokenizer")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    with contextlib.suppress(AttributeError, OSError):  # one core, where the system can be told
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    tokenizer, vision = Tokenizer.load(args.tokenizer), mage_vl_4b().vision
    per_sentence = len(tokenizer.encode_text(SENTENCE))
    text = SENTENCE * max(1, args.text_tokens // per_sentence)
    others = references()

    def sample(path: str):
        line = {"messages": [{"role": "user", "content": [{"type": "image", "image": path}]}, {"role": "assistant"}]}
        line["messages"][1]["content"] = text
        record = parse_record(json.dumps(line).encode(), source_file=path, line=1)
        return make_sample(record, tokenizer=tokenizer, image=LIMITS, vision=vision)

    def ours_float(path: str) -> np.ndarray:
        return normalize_patches(sample(path).patches)

    def with_text(run: Callable[[str], np.ndarray], path: str) -> np.ndarray:
        ids = tokenizer.encode_text(text)
        assert len([tokenizer.special_ids.image_pad] * MERGED + ids) > MERGED
        return run(path)

    ways = {"ours, training": sample, "ours, float32": ours_float}
    ways |= {name: (lambda path, run=run: with_text(run, path)) for name, run in others.items()}
    print(f"{'':<6}{'':<28}{'ms/sample':>10}{'samples/s':>11}{'time over ours (training, float32)':>37}")
    with tempfile.TemporaryDirectory() as folder:
        for suffix, options in (("png", {}), ("jpg", {"quality": 90})):
            paths = [str(pathlib.Path(folder) / f"{i}.{suffix}") for i in range(args.pictures)]
            for i, path in enumerate(paths):
                screenshot(i).save(path, **options)
            want = preprocess(ImageRef(paths[0]), image=LIMITS)["pixel_values"]
            assert np.array_equal(ours_float(paths[0]), want)
            for name, run in others.items():
                same = np.mean(run(paths[0]) == want)
                print(f"{suffix}: {name}: {same:.2%} of its numbers are bit-equal to ours")
            times: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(args.rounds):
                for path in paths:
                    for name, way in ways.items():
                        times[name].append(seconds(lambda way=way, path=path: way(path)))
            medians = {name: statistics.median(values) for name, values in times.items()}
            for name, median in medians.items():
                over = ", ".join(f"{median / medians[own]:.2f}" for own in ("ours, training", "ours, float32"))
                print(f"{suffix:<6}{name:<28}{median * 1e3:>10.1f}{1 / median:>11.1f}{over:>37}")


if __name__ == "__main__":
    main()
