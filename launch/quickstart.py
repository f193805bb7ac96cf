"""Train, export, import, generate: the whole path at toy scale, each step by the command that users type.

    bash launch/quickstart.sh

Trains the toy model of ``configs/quickstart.py`` on real screenshots, exports the last checkpoint to a Hugging Face
folder, imports that folder again (bit for bit), lets the exported model click on held-out pages, and prints a table.
Every step can be stopped and run again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "tests" / "data" / "miniwob"
NEW_TOKENS = 64
CLICK = re.compile(r'"coordinate": \[(\d+), (\d+)\]')


def command(*words: str | Path) -> None:
    """Shows and runs one of our commands; a failure stops the quickstart with its status."""
    words = [str(w) for w in words]
    print(f"\n$ python {shlex.join(words)}", flush=True)
    child = subprocess.Popen([sys.executable, *words], cwd=ROOT)
    try:
        status = child.wait()
    except KeyboardInterrupt:  # the child has got it too, and training saves first
        child.wait()
        print("quickstart.py: stopped; run it again to continue", file=sys.stderr)
        sys.exit(130)
    if status:
        print(f"quickstart.py: {words[0]} failed with status {status}", file=sys.stderr)
        sys.exit(status)


def read_records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def clicks(model_dir: Path, records: list[dict]) -> list[dict]:
    """Greedy answers of a model to each record's question, and whether the click lands in the target's box."""
    from mage_jax.agent.tokenizer import Tokenizer
    from mage_jax.config import ComputeConfig
    from mage_jax.data import preprocessor
    from mage_jax.data.prompts import prompt_rows, prompt_sample
    from mage_jax.model.generate import Generator
    from mage_jax.model.sampling import Sampling
    from mage_jax.weights.load import load_model

    model = load_model(model_dir, dtype="float32")
    tokenizer = Tokenizer.load(model.assets)
    image = preprocessor.load(model.assets, vision=model.config.vision)
    samples = []
    for record in records:
        pictures = [str(PAGES / item["image"]) for item in record["messages"][0]["content"] if item["type"] == "image"]
        samples.append(
            prompt_sample(record["messages"][:1], pictures, tokenizer=tokenizer, image=image, model=model.config)
        )
    generator = Generator(model.params, config=model.config, compute=ComputeConfig())
    out = generator(prompt_rows(samples, model=model.config), Sampling(), max_new_tokens=NEW_TOKENS)
    answers = []
    for record, tokens, live in zip(records, out.tokens, out.live, strict=True):
        ids = [t for t in tokens[live].tolist() if t not in model.config.eos_token_ids]
        text = tokenizer.decode(ids)
        answers.append({"id": record["id"], "text": text, "hit": is_hit(text, record)})
    return answers


def is_hit(text: str, record: dict) -> bool:
    """Whether the answer's coordinate, in thousandths of the screen, falls into the record's pixel box."""
    found = CLICK.search(text)
    if not found:
        return False
    (x, y), (width, height) = (int(v) for v in found.groups()), record["image_size"]
    x0, y0, x1, y1 = record["target_box"]
    return x0 <= x * width / 1000 <= x1 and y0 <= y * height / 1000 <= y1


def count_equal_tensors(checkpoint: Path, imported: Path) -> tuple[int, int]:
    """(equal, all) parameters of a checkpoint and of its export read back, compared bit for bit."""
    from mage_jax.params import flatten
    from mage_jax.weights.load import load_model

    ours, theirs = (flatten(load_model(path).params) for path in (checkpoint, imported))
    equal = sum(np.asarray(a).tobytes() == np.asarray(theirs[name]).tobytes() for name, a in ours.items())
    return equal, len(ours)


def metrics(run: Path) -> tuple[list[dict], list[dict]]:
    """Lines with a training loss and lines with an evaluation loss."""
    lines = read_records(run / "metrics.jsonl")
    return [m for m in lines if "loss" in m], [m for m in lines if "eval_loss" in m]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="six training steps, to see the whole path")
    parser.add_argument("--run", type=Path, help="run folder (default: runs/quickstart)")
    args = parser.parse_args(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    name = "quickstart_smoke" if args.smoke else "quickstart"
    run = (args.run or ROOT / "runs" / name).resolve()
    exported, imported = run / "hf", run / "reimported"
    started = time.perf_counter()

    variant = ":smoke" if args.smoke else ""
    command("launch/train.py", f"--config=configs/quickstart.py{variant}", f"--workdir={run}", "--plot")
    for derived in (exported, imported):  # made from the checkpoint each time; the commands never overwrite
        shutil.rmtree(derived, ignore_errors=True)
    command("convert/orbax_to_hf.py", "--ckpt", run, "--out", exported, "--dtype", "float32", "--quiet")
    command("convert/hf_to_orbax.py", "--hf", exported, "--out", imported, "--quiet")
    equal, tensors = count_equal_tensors(run, imported)

    train_pages, held_out = (read_records(PAGES / f) for f in ("train.jsonl", "heldout.jsonl"))
    shown = held_out[0]
    content = shown["messages"][0]["content"]
    image, prompt = PAGES / content[0]["image"], content[1]["text"]
    command(
        "launch/generate.py",
        "--model",
        exported,
        "--image",
        image,
        "--prompt",
        prompt,
        "--max_new_tokens",
        str(NEW_TOKENS),
    )
    seen, unseen = (clicks(exported, pages) for pages in (train_pages, held_out))

    train_lines, eval_lines = metrics(run)
    summary = {
        "steps": train_lines[-1]["step"],
        "loss": [train_lines[0]["loss"], train_lines[-1]["loss"]],
        "held_out_loss": [eval_lines[0]["eval_loss"], eval_lines[-1]["eval_loss"]] if eval_lines else None,
        "clicks_on_training_pages": [sum(a["hit"] for a in seen), len(seen)],
        "clicks_on_held_out_pages": [sum(a["hit"] for a in unseen), len(unseen)],
        "tensors_equal_after_reimport": [equal, tensors],
        "minutes": (time.perf_counter() - started) / 60,
        "answers": unseen,
    }
    (run / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print_summary(summary, run)
    return 0 if equal == tensors else 1


def shown_path(path: Path) -> str:
    """Relative to where the user stands, when it lies below."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def print_summary(summary: dict, run: Path) -> None:
    first, last = summary["loss"]
    rows = [
        ("training loss, first and last logged", f"{first:.3f} -> {last:.3f} nats a token ({summary['steps']} steps)"),
    ]
    if summary["held_out_loss"]:
        rows.append(("held-out loss, first and last", "{:.3f} -> {:.3f}".format(*summary["held_out_loss"])))
    rows += [
        ("clicks inside the box, training pages", "{} of {}".format(*summary["clicks_on_training_pages"])),
        ("clicks inside the box, held-out pages", "{} of {}".format(*summary["clicks_on_held_out_pages"])),
        ("parameters bit-equal after export and import", "{} of {}".format(*summary["tensors_equal_after_reimport"])),
        ("time", f"{summary['minutes']:.1f} min"),
        ("loss curve", shown_path(run / "loss.png")),
        ("Hugging Face folder", shown_path(run / "hf")),
    ]
    width = max(len(label) for label, _ in rows)
    print()
    for label, value in rows:
        print(f"{label:{width}}  {value}")


if __name__ == "__main__":
    sys.exit(main())
