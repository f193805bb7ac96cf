"""Computes the reference tensors of a checkpoint in float32 and compares them with expected ones.

    python convert/check_parity.py --hf DIR --inputs inputs.npz --out got.npz [--greedy 16] [--expected expected.npz]

``inputs.npz`` holds the released processor's arrays (input_ids, pixel_values, image_grid_thw, patch_positions, ...;
also left-padded batches, packed rows with segment_ids, and labels for the loss and gradients). ``got.npz`` gets every
intermediate tensor by its reference name. With ``--expected`` a table of differences and tolerances is printed and the
exit status is 1 on a miss; a ``grads.npz`` beside the expected file is compared too when there are labels.

Tolerance per tensor: 1e-4 x max(1, rms of the expected), rotary angles 1e-5, gradients 2e-4 x max |expected|, integers
exact; everything in float32 with matmul precision "highest". In a padded batch only positions marked ``valid`` count.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from mage_jax.config import ComputeConfig, ConfigError, ModelConfig
from mage_jax.data.hf_inputs import IGNORE_LABEL, HfInputs, HfInputsError, from_hf_inputs
from mage_jax.data.image import save_npz
from mage_jax.model.cache import slots_for
from mage_jax.model.generate import decode_step, prefill
from mage_jax.model.mage_vl import forward, logits, output_head
from mage_jax.ops.vocab import cross_entropy_sums
from mage_jax.params import flatten
from mage_jax.types import PADDING_SEGMENT, PackedRows
from mage_jax.weights.errors import WeightsError
from mage_jax.weights.load import load_model
from mage_jax.weights.names import slots

COMPUTE = ComputeConfig(compute_dtype="float32", matmul_precision="highest")
# Of a packed case's separate runs only these are kept.
SAMPLE_TENSORS = ("merged_features", "inputs_embeds", "dec_last_hidden", "logits")
NOT_COMPUTED = ("valid", "labels")  # which positions to compare, and an input: not results
PER_TOKEN = ("inputs_embeds", "dec_layer_", "dec_last_hidden", "logits", "packed_logits")  # begin with [B, T]


class ParityInputError(ValueError):
    """An input file cannot be used; one line naming it."""


def read_npz(path: str | Path) -> dict[str, np.ndarray]:
    try:
        with open(path, "rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("one bare array, not an archive")
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ParityInputError(f"{path}: cannot be read as .npz ({error})") from error


def compute_tensors(
    params: dict, inputs: Mapping[str, np.ndarray], *, config: ModelConfig, greedy: int
) -> dict[str, np.ndarray]:
    """Every reference tensor of one case, by its reference name (see the module's text)."""
    case = from_hf_inputs(inputs, vision=config.vision, image_token_id=config.image_token_id)
    _check_ids(inputs, config)
    packed = "segment_ids" in inputs
    samples = _sample_count(inputs) if packed else 0
    if greedy and not packed:
        _check_room(case.rows, config, greedy)
    got = _forward_tensors(params, case, config)
    if packed:
        got["packed_logits"] = got.pop("logits")
        for index in range(samples):
            sample = _separate_sample(inputs, index)
            run = _forward_tensors(
                params,
                from_hf_inputs(sample, vision=config.vision, image_token_id=config.image_token_id),
                config,
            )
            got |= {f"sample{index}_{name}": run[name] for name in SAMPLE_TENSORS if name in run}
    if case.batch is not None:
        got |= _loss_and_gradients(params, case, config)
    if greedy and not packed:
        got |= _greedy(params, case.rows, config, greedy)
    got["cu_seqlens"] = _window_bounds(case)
    return got


def _check_ids(inputs: Mapping[str, np.ndarray], config: ModelConfig) -> None:
    """An index outside the vocabulary reads some row of the embedding instead of failing."""
    for name, least in (("input_ids", 0), ("labels", IGNORE_LABEL)):
        values = np.asarray(inputs.get(name, np.zeros(0, np.int64)))
        wrong = values[(values >= config.text.vocab_size) | (values < 0) & (values != least)]
        if wrong.size:
            raise ParityInputError(f"{name}: holds {wrong[0]}, the vocabulary has {config.text.vocab_size} tokens")


def _check_room(rows: PackedRows, config: ModelConfig, greedy: int) -> None:
    prompt = int(np.max(rows.positions_bt, initial=-1, where=rows.segment_ids_bt != PADDING_SEGMENT)) + 1
    if prompt + greedy > config.text.max_positions:
        raise ParityInputError(
            f"--greedy {greedy}: with a prompt of {prompt} tokens it passes the model's {config.text.max_positions} "
            f"positions; ask for at most {max(0, config.text.max_positions - prompt)}"
        )


def _sample_count(inputs: Mapping[str, np.ndarray]) -> int:
    lengths = np.asarray(inputs.get("lengths", np.zeros(0, np.int64)))
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
        raise ParityInputError(f"lengths: must be integers [samples], got {lengths.dtype} of shape {lengths.shape}")
    return len(lengths)


def read_expected(path: str | Path) -> dict[str, np.ndarray]:
    """An archive of numbers to compare with; a name that is not numeric cannot be."""
    expected = read_npz(path)
    for name, value in expected.items():
        if value.dtype.kind not in "biuf":
            raise ParityInputError(f"{path}: {name} must hold numbers, got {value.dtype}")
    if "greedy_ids" in expected and expected["greedy_ids"].ndim not in (1, 2):
        shape = expected["greedy_ids"].shape
        raise ParityInputError(f"{path}: greedy_ids must be [tokens] or [rows, tokens], got shape {shape}")
    return expected


def _separate_sample(inputs: Mapping[str, np.ndarray], index: int) -> dict[str, np.ndarray]:
    """The arrays of one sample of a packed case, under their usual names."""
    names = {"ids": "input_ids", "px": "pixel_values", "grid": "image_grid_thw", "pos": "patch_positions"}
    found = {
        usual: inputs[f"sample{index}_{short}"] for short, usual in names.items() if f"sample{index}_{short}" in inputs
    }
    if "input_ids" not in found:
        raise ParityInputError(f"inputs: lengths names sample {index}, but sample{index}_ids is missing")
    return found


def _drop_batch(x: np.ndarray) -> np.ndarray:
    return x[0] if x.shape[0] == 1 else x


def _forward_tensors(params: dict, case: HfInputs, config: ModelConfig) -> dict[str, np.ndarray]:
    @jax.jit
    def run(params, rows):
        out = forward(params, rows, config=config, compute=COMPUTE, capture=True)
        return {**out.captured, "logits": logits(params, out.hidden_btd, compute=COMPUTE)}

    got = {}
    for name, value in jax.device_get(run(params, case.rows)).items():
        if name.startswith("vision_"):
            got[name] = case.flatten_patches(value)
        elif name == "merged_features":
            got[name] = case.flatten_merged(value)
        else:
            got[name] = _drop_batch(value)
    return got


def _loss_and_gradients(params: dict, case: HfInputs, config: ModelConfig) -> dict[str, np.ndarray]:
    """Mean cross-entropy over the labels that count, and its gradient by checkpoint tensor name."""

    @jax.jit
    @jax.value_and_grad
    def run(params, batch):
        out = forward(params, batch.rows, config=config, compute=COMPUTE)
        with jax.default_matmul_precision(COMPUTE.matmul_precision):
            sums = cross_entropy_sums(
                out.hidden_btd, output_head(params), batch.targets_bt, batch.weights_bt, chunk=COMPUTE.vocab_chunk
            )
        return sums.loss / sums.weight

    loss, grads = jax.device_get(run(params, case.batch))
    flat = flatten(grads)
    named = {"loss": np.asarray(loss)}
    for slot in slots(config):
        value = flat[slot.path] if slot.layer is None else flat[slot.path][slot.layer]
        named[f"grad:{slot.name}"] = value.reshape(slot.hf_shape)
    return named


def _greedy(params: dict, rows: PackedRows, config: ModelConfig, count: int) -> dict[str, np.ndarray]:
    """The path that generation takes: prefill, then the cache. End tokens do not stop it."""
    room = slots_for(rows.tokens_bt.shape[1], count)
    state = jax.jit(lambda p, r: prefill(p, r, config=config, compute=COMPUTE, slots=room))(params, rows)
    step = jax.jit(lambda p, s, t: decode_step(p, s, t, config=config, compute=COMPUTE))
    ids, scores = [], []
    for _ in range(count):
        scores.append(np.asarray(state.logits_bv))
        ids.append(np.argmax(scores[-1], axis=-1))
        state = step(params, state, jnp.asarray(ids[-1], jnp.int32))
    logits_btv = np.stack(scores, axis=1)
    best = np.sort(logits_btv, axis=-1)
    return {
        "greedy_ids": _drop_batch(np.stack(ids, axis=1).astype(np.int64)),
        "greedy_logits": _drop_batch(logits_btv),
        "greedy_margins": _drop_batch((best[..., -1] - best[..., -2]).astype(np.float64)),
    }


def _window_bounds(case: HfInputs) -> np.ndarray:
    """Where the vision tower's attention windows begin and end in the flat patch order."""
    windows = case.flatten_patches(case.rows.patch_windows_bp)
    rows = case.patch_rows
    changes = np.flatnonzero((np.diff(windows) != 0) | (np.diff(rows) != 0)) + 1
    return np.unique(np.concatenate([[0], changes, [len(windows)]])).astype(np.int64)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One line of the table."""

    name: str
    difference: float
    tolerance: float
    passed: bool
    note: str = ""


def compare(
    got: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], *, attention_mask: np.ndarray | None = None
) -> list[Verdict]:
    """Every expected tensor against what was computed; one that was not computed is a miss.

    In a batch only positions marked by the expected ``valid`` count, or by ``attention_mask`` where that is absent.
    """
    valid = expected.get("valid", attention_mask)
    if valid is not None and valid.ndim == 2:
        valid = _drop_batch(valid)
    return [
        _compare_one(name, got.get(name), want, valid if name.startswith(PER_TOKEN) else None)
        for name, want in expected.items()
        if name not in NOT_COMPUTED
    ]


def _compare_one(name: str, value: np.ndarray | None, want: np.ndarray, valid: np.ndarray | None) -> Verdict:
    if value is None and want.size > 0:
        return Verdict(name, np.inf, 0.0, False, "not computed from these inputs")
    if want.size == 0 and (value is None or value.size == 0):
        return Verdict(name, 0.0, 0.0, True, "empty")
    if value.shape != want.shape:
        return Verdict(name, np.inf, 0.0, False, f"shape {list(value.shape)}, expected {list(want.shape)}")
    if valid is not None and want.shape[: valid.ndim] == valid.shape and valid.any():
        value, want = value[valid.astype(bool)], want[valid.astype(bool)]
    if np.issubdtype(want.dtype, np.integer) or want.dtype == bool:
        wrong = int(np.sum(value != want))
        return Verdict(name, float(wrong), 0.0, wrong == 0, f"{wrong} of {want.size} differ" if wrong else "exact")
    want64, value64 = want.astype(np.float64), value.astype(np.float64)
    if name == "vision_rope_angles":
        tolerance = 1e-5
    elif name.startswith("grad:"):
        tolerance = 2e-4 * float(np.abs(want64).max())
    else:
        tolerance = 1e-4 * max(1.0, float(np.sqrt(np.mean(want64**2))))
    difference = float(np.abs(value64 - want64).max())
    return Verdict(name, difference, tolerance, bool(difference <= tolerance))  # a NaN difference is a miss


def print_table(verdicts: list[Verdict]) -> None:
    width = max(len(v.name) for v in verdicts)
    print(f"{'tensor':{width}}  max difference   tolerance  verdict")
    for v in verdicts:
        word = "ok" if v.passed else "MISS"
        print(f"{v.name:{width}}  {v.difference:14.3e}  {v.tolerance:10.3e}  {word}{'  ' + v.note if v.note else ''}")
    misses = sum(not v.passed for v in verdicts)
    print(f"{len(verdicts)} tensors compared, {misses} missed")


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {value}")
    return value


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf", required=True, help="checkpoint: a Hugging Face folder, or any folder of ours")
    parser.add_argument("--inputs", required=True, help="inputs.npz")
    parser.add_argument("--out", required=True, help="where to write the computed tensors (.npz)")
    parser.add_argument(
        "--greedy", type=_count, help="new tokens to choose greedily (default: as many as are expected)"
    )
    parser.add_argument("--expected", help="expected.npz to compare with")
    args = parser.parse_args(argv)
    try:
        inputs = read_npz(args.inputs)
        expected = read_expected(args.expected) if args.expected else {}
        if args.expected and "labels" in inputs and Path(args.expected).name != "grads.npz":
            beside = Path(args.expected).with_name("grads.npz")
            expected |= read_expected(beside) if beside.is_file() else {}
        greedy = args.greedy if args.greedy is not None else expected.get("greedy_ids", np.zeros(0)).shape[-1]
        model = load_model(args.hf, dtype=jnp.float32)
        got = compute_tensors(model.params, inputs, config=model.config, greedy=greedy)
        save_npz(Path(args.out), got)
    except (ParityInputError, HfInputsError, WeightsError, ConfigError, OSError) as error:
        print(f"check_parity.py: {error}", file=sys.stderr)
        return 2
    if greedy and "segment_ids" in inputs:
        print("check_parity.py: note: --greedy is ignored for packed rows (segment_ids)", file=sys.stderr)
    print(f"wrote {len(got)} tensors to {args.out}")
    if not args.expected:
        return 0
    verdicts = compare(got, expected, attention_mask=inputs.get("attention_mask"))
    if not verdicts:
        print(f"check_parity.py: {args.expected}: holds no tensor to compare", file=sys.stderr)
        return 2
    print_table(verdicts)
    return 0 if all(v.passed for v in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
