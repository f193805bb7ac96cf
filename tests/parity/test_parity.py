"""The parity check itself: it passes what is right, at the stated tolerances, and sees every known mistake.

Stored references come from another implementation; made cases (make_cases.py) from the float64 oracle in
tests/reference.py, which is itself held against the stored ones here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert import check_parity
from mage_jax.model import decoder, mage_vl, vision
from tests.parity.make_cases import CASES, cases, make_case
from tests.reference import Reference

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ROOT / "convert" / "check_parity.py"
GOLDEN = ROOT / "tests" / "golden" / "model"
GOLDENS = ("A_square", "B_rect", "C_multi", "F_sharded", "G_video", "P_packing")
GREEDY = ("greedy_ids", "greedy_logits", "greedy_margins")


@pytest.fixture(scope="module", autouse=True)
def quick_compiles():
    """Nearly all of the time here is compiling programs that run once."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folder of a made case by its name; each is made once."""
    root, known = tmp_path_factory.mktemp("cases"), cases(seeds=3)

    def folder(name: str) -> Path:
        return root / name if (root / name).is_dir() else make_case(known[name], root / name)

    return folder


@pytest.fixture(scope="module")
def checked(made, tmp_path_factory):
    """(exit status, stdout, computed tensors) of a made case by its name; each runs once."""
    known = {}

    def result(name: str):
        if name not in known:
            out, stdout = tmp_path_factory.mktemp("checked") / "got.npz", io.StringIO()
            with contextlib.redirect_stdout(stdout):
                status = check_parity.main(arguments(made(name), out))
            known[name] = status, stdout.getvalue(), check_parity.read_npz(out)
        return known[name]

    return result


def save(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    np.savez(path, **arrays)
    return path


def without_greedy(folder: Path, out: Path) -> Path:
    """The expected tensors of one forward pass; a decode loop costs a second compilation."""
    expected = check_parity.read_npz(folder / "expected.npz")
    return save(out / "expected.npz", {name: value for name, value in expected.items() if name not in GREEDY})


def arguments(folder: Path, out: Path, expected: Path | None = None) -> list[str]:
    expected = expected or folder / "expected.npz"
    return [f"--hf={folder}", f"--inputs={folder / 'inputs.npz'}", f"--out={out}", f"--expected={expected}"]


def table(text: str) -> dict[str, tuple[float, float, str]]:
    """The printed lines: name -> (difference, tolerance, verdict)."""
    lines = re.findall(r"^(\S+) +(\S+) +(\S+)  (ok|MISS)\b", text, re.MULTILINE)
    return {name: (float(difference), float(tolerance), verdict) for name, difference, tolerance, verdict in lines}


def stated_tolerance(name: str, want: np.ndarray) -> float:
    if want.size == 0 or np.issubdtype(want.dtype, np.integer):
        return 0.0
    if name == "vision_rope_angles":
        return 1e-5
    if name.startswith("grad:"):
        return 2e-4 * np.abs(want).max()
    return 1e-4 * max(1.0, np.sqrt(np.mean(np.square(want, dtype=np.float64))))


# What is right passes


@pytest.mark.parametrize("name", GOLDENS)
def test_the_oracle_agrees_with_the_stored_references(name):
    folder = GOLDEN / name
    inputs, expected = (check_parity.read_npz(folder / f"{part}.npz") for part in ("inputs", "expected"))
    got = Reference(folder).tensors(inputs, greedy=len(expected.get("greedy_ids", ())))
    if name == "B_rect":
        expected["loss"] = check_parity.read_npz(folder / "grads.npz")["loss"]
    for verdict in check_parity.compare(got, expected, attention_mask=inputs.get("attention_mask")):
        # The reference computed in float32 and this in float64, so half the room must be enough.
        assert verdict.passed and verdict.difference <= verdict.tolerance / 2, verdict


# Two programs more each for decoding, so by default only one of them decodes.
DECODING = [pytest.param(name, marks=[] if name == "A_square" else [pytest.mark.slow]) for name in GOLDENS[:-1]]


@pytest.mark.parametrize("name", DECODING)
def test_a_stored_reference_is_met_with_greedy_decoding(name, tmp_path, capsys):
    assert check_parity.main(arguments(GOLDEN / name, tmp_path / "got.npz")) == 0
    assert set(GREEDY) <= set(table(capsys.readouterr().out))


@pytest.mark.parametrize("name", GOLDENS[1:])
def test_a_stored_reference_is_met_at_the_stated_tolerances(name, tmp_path, capsys):
    folder, out = GOLDEN / name, tmp_path / "got.npz"
    expected = check_parity.read_npz(without_greedy(folder, tmp_path))
    if name == "B_rect":
        grads = check_parity.read_npz(folder / "grads.npz")
        save(tmp_path / "grads.npz", grads)  # beside the expected file, where they are looked for
        expected |= {name: grads[name] for name in grads if name != "labels"}
        assert "loss" in expected and sum(name.startswith("grad:") for name in expected) == 14
    assert check_parity.main(arguments(folder, out, tmp_path / "expected.npz")) == 0
    printed, got = table(capsys.readouterr().out), check_parity.read_npz(out)
    assert set(printed) == set(expected) <= set(got)
    for key, want in expected.items():
        difference, tolerance, _ = printed[key]
        assert tolerance == pytest.approx(stated_tolerance(key, want), rel=2e-3), key
        assert np.abs(got[key].astype(np.float64) - want).max() == pytest.approx(difference, rel=2e-3), key


QUICK = set(CASES) - {"packed_labels"}
DRAWS = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in cases(seeds=3)]


@pytest.mark.parametrize("name", DRAWS)
def test_a_made_case_is_met(checked, name):
    status, stdout, _ = checked(name)
    assert status == 0, stdout
    printed = table(stdout)
    logits = "packed_logits" if name.startswith("packed") else "logits"
    assert {"cu_seqlens", "inputs_embeds", "dec_layer_0", "dec_layer_1", "dec_last_hidden", logits} <= set(printed)
    assert {"vision_patch_embed", "vision_layer_1", "merged_features"} <= set(printed)


def test_the_oracle_cuts_long_rows_into_windows(made):
    """Guards the case that no stored reference covers: two rows, each with its own remainder."""
    bounds = check_parity.read_npz(made("windows_6_and_9") / "expected.npz")["cu_seqlens"]
    assert np.diff(bounds).tolist() == [4 * 4, 2 * 4, 4 * 4, 4 * 4, 1 * 4]


def test_a_batch_row_equals_its_own_run(made):
    """Padding, and the pictures of other rows, leave no trace in a row."""
    folder = made("left_padded_batch")
    inputs, batched = (check_parity.read_npz(folder / f"{part}.npz") for part in ("inputs", "expected"))
    patches = {0: slice(0, 16), 1: slice(0, 0), 2: slice(16, None)}
    grids = {0: slice(0, 1), 1: slice(0, 0), 2: slice(1, None)}
    for row in range(3):
        mask = inputs["attention_mask"][row] == 1
        alone = {
            "input_ids": inputs["input_ids"][row][mask][None],
            "image_grid_thw": inputs["image_grid_thw"][grids[row]],
        }
        alone |= {name: inputs[name][patches[row]] for name in ("pixel_values", "patch_positions")}
        got = Reference(folder).tensors(alone, greedy=4)
        np.testing.assert_allclose(got["logits"], batched["logits"][row][mask], atol=1e-10)
        np.testing.assert_array_equal(got["greedy_ids"], batched["greedy_ids"][row])


@pytest.mark.parametrize("case", ["golden", "made"])
def test_the_command(case, made, tmp_path):
    """The one is right; of the other, one number is changed by little more than the tolerance."""
    folder = GOLDEN / "F_sharded" if case == "golden" else made("sparse_positions")
    expected = without_greedy(folder, tmp_path)
    if case == "made":
        changed = check_parity.read_npz(expected)
        changed["merged_features"][3, 5] += 1.2e-4
        save(expected, changed)
    out = tmp_path / "got.npz"
    done = subprocess.run(
        [sys.executable, COMMAND, *arguments(folder, out, expected)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"},
    )
    printed = table(done.stdout)
    assert done.stderr == ""
    assert len(printed) == len(check_parity.read_npz(expected)) and set(printed) <= set(check_parity.read_npz(out))
    missed = [name for name, (_, _, verdict) in printed.items() if verdict == "MISS"]
    assert (done.returncode, missed) == ((0, []) if case == "golden" else (1, ["merged_features"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", GOLDENS)
def test_the_command_on_every_stored_reference(name, tmp_path):
    done = subprocess.run(
        [sys.executable, COMMAND, *arguments(GOLDEN / name, tmp_path / "got.npz")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


# What is wrong is seen


def replaced(**changes):
    """Sabotage by config: fields of the vision or text part."""

    def install(patch):
        load = check_parity.load_model

        def wrong(*args, **kwargs):
            model = load(*args, **kwargs)
            config = dataclasses.replace(
                model.config,
                **{
                    part: dataclasses.replace(getattr(model.config, part), **fields) for part, fields in changes.items()
                },
            )
            return dataclasses.replace(model, config=config)

        patch(check_parity, "load_model", wrong)

    return install


def around(name, change):
    """Sabotage of one function that ``forward`` calls: ``change(original)`` takes its place."""
    return lambda patch: patch(mage_vl, name, change(getattr(mage_vl, name)))


def with_gelu(gelu):
    """Another activation, while one tower is traced only."""

    def change(original):
        def wrong(*args, **kwargs):
            with mock.patch.object(jax.nn, "gelu", gelu):
                return original(*args, **kwargs)

        return wrong

    return change


def with_eps(eps):
    """Another epsilon in one of the two parts that share the config's."""

    def change(original):
        def wrong(*args, config, **kwargs):
            return original(*args, config=dataclasses.replace(config, layer_norm_eps=eps), **kwargs)

        return wrong

    return change


def tanh_gelu(x, approximate=False):
    return 0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def quick_gelu(x, approximate=False):
    return x * jax.nn.sigmoid(1.702 * x)


def half_split(x, angles):
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    first, second = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-second, first], axis=-1) * sin


def equal_angle_pairs(x, angles):
    """The textbook's interleaved form: a pair shares the angle."""
    half = angles[..., : angles.shape[-1] // 2]
    cos, sin = jnp.cos(half)[:, :, None], jnp.sin(half)[:, :, None]
    a, b = x[..., 0::2], x[..., 1::2]
    return jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)


def doubled_exponent(positions, *, head_dim, theta):
    unit, parts = head_dim // 32, []
    for axis, size in enumerate((4 * unit, 6 * unit, 6 * unit)):
        parts.append(positions[..., axis, None] * theta ** (-2.0 * np.arange(size) / size))
    half = jnp.concatenate(parts, axis=-1).astype(jnp.float32)
    return jnp.concatenate([half, half], axis=-1)


def tiled_gqa(original):
    """Query head j reads key head j modulo their number."""

    def wrong(q, k, v, *, causal, **kwargs):
        times = q.shape[2] // k.shape[2]
        return original(q, jnp.tile(k, (1, 1, times, 1)), jnp.tile(v, (1, 1, times, 1)), causal=causal, **kwargs)

    return wrong


def add_instead(original):
    def wrong(params, rows, **kwargs):
        embeds, seen = original(params, rows, **kwargs)
        own = params["text"]["embed_vd"][rows.tokens_bt]
        embeds = embeds + jnp.where((rows.vision_index_bt >= 0)[..., None], own, 0)
        return embeds, seen | {"inputs_embeds": embeds}

    return wrong


def no_head_norm(patch):
    norm = decoder.rms_norm
    patch(decoder, "rms_norm", lambda x, scale, *, eps: x if x.ndim == 4 else norm(x, scale, eps=eps))


def head_norm_after_rotation(patch):
    """The norm that comes first is put off until the rotation is done."""
    norm, rotate, scales = decoder.rms_norm, decoder.rotate_half_split, []

    def put_off(x, scale, *, eps):
        if x.ndim < 4:
            return norm(x, scale, eps=eps)
        scales.append((scale, eps))
        return x

    def rotate_then_norm(x, angles):
        scale, eps = scales.pop()
        return norm(rotate(x, angles), scale, eps=eps)

    patch(decoder, "rms_norm", put_off)
    patch(decoder, "rotate_half_split", rotate_then_norm)


def changed_params(change):
    def install(patch):
        load = check_parity.load_model

        def wrong(*args, **kwargs):
            model = load(*args, **kwargs)
            params = change(jax.tree.map(np.array, model.params))
            # Placed like the loaded ones, or every operation would be compiled again.
            params = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), params, model.params)
            return dataclasses.replace(model, params=params)

        patch(check_parity, "load_model", wrong)

    return install


def per_head_qkv(params):
    """Rows read as (head, part) instead of (part, head), as another trainer stores them."""
    attn = params["vision"]["layers"]["attn"]
    for name in ("qkv_cnhd", "qkv_bias_cnh"):
        layers, parts, heads, *rest = attn[name].shape
        attn[name] = np.swapaxes(attn[name].reshape(layers, heads, parts, *rest), 1, 2)
    return params


def pixels_channel_last(params):
    kernel = params["vision"]["patch_embed_dcyx"]
    d, c, y, x = kernel.shape
    params["vision"]["patch_embed_dcyx"] = kernel.transpose(0, 2, 3, 1).reshape(d, c, y, x)
    return params


def one_layer_less(params):
    """The tap before the last block: a block that adds nothing."""
    layers = params["vision"]["layers"]
    for weight in (layers["attn"]["proj_dnh"], layers["attn"]["proj_bias_d"]):
        weight[-1] = 0
    for weight in (layers["mlp"]["fc2_df"], layers["mlp"]["fc2_bias_d"]):
        weight[-1] = 0
    return params


def changed_rows(change):
    def install(patch):
        convert = check_parity.from_hf_inputs

        def wrong(inputs, **kwargs):
            case = convert(inputs, **kwargs)
            return dataclasses.replace(case, rows=case.rows.replace(**change(case.rows, inputs)))

        patch(check_parity, "from_hf_inputs", wrong)

    return install


def images_reversed(rows, inputs):
    """The last picture's features go to the first place of a picture."""
    counts = inputs["image_grid_thw"].prod(axis=1) // 4
    ends = np.cumsum(counts)
    order = np.concatenate([np.arange(end - n, end) for n, end in zip(counts[::-1], ends[::-1], strict=True)])
    index = rows.vision_index_bt.copy()
    index[index >= 0] = order
    return {"vision_index_bt": index}


def one_window(rows, inputs):
    return {"patch_windows_bp": np.minimum(rows.patch_windows_bp, 1)}


def no_segments(rows, inputs):
    return {"segment_ids_bt": np.minimum(rows.segment_ids_bt, 1)}


def row_major_positions(rows, inputs):
    return {"patch_positions_bp3": inputs["patch_positions_rowmajor"][None].astype(np.int32)}


def column_major_blocks(rows, inputs):
    """Inside each block, down before right."""
    swap = lambda x: x.reshape(1, -1, 4, x.shape[-1])[:, :, [0, 2, 1, 3]].reshape(x.shape)
    return {"patches_bpc": swap(rows.patches_bpc), "patch_positions_bp3": swap(rows.patch_positions_bp3)}


def time_as(times):
    def change(rows, inputs):
        positions = rows.patch_positions_bp3.copy()
        positions[..., 0] = times(positions[0, :, 0])
        return {"patch_positions_bp3": positions}

    return change


def no_pre_norm(patch):
    """The first norm of the tower is the one over its input."""
    norm, calls = vision.layer_norm, []

    def wrong(x, *args, **kwargs):
        calls.append(1)
        return x if len(calls) == 1 else norm(x, *args, **kwargs)

    patch(vision, "layer_norm", wrong)


def norm_after_concatenation(original):
    """One set of statistics for the four patches of a block."""

    def wrong(params, x, *, config):
        block = x.reshape(*x.shape[:1], -1, config.merged_size)
        wide = {name: jnp.tile(value, config.merge_factor) for name, value in params["norm"].items()}
        normed = vision.layer_norm(block, **wide, eps=config.layer_norm_eps).reshape(x.shape)
        with mock.patch.object(vision, "layer_norm", lambda x, **kwargs: x):
            return original(params, normed, config=config)

    return wrong


def stray_post_norm(original):
    def wrong(*args, config, **kwargs):
        x, seen = original(*args, config=config, **kwargs)
        one = jnp.ones(x.shape[-1])
        return vision.layer_norm(x, scale_d=one, bias_d=0 * one, eps=config.layer_norm_eps), seen

    return wrong


def scale_from_width(original):
    """Scores divided by the root of hidden / heads (16 here) where the head has 32."""
    return lambda q, *args, **kwargs: original(q * np.sqrt(q.shape[-1] / 16), *args, **kwargs)


# The case that shows a mistake, and the smallest error of the logits to expect there. Stated errors are maxima over
# more cases than are stored, so some floors lie below them; every one lies above the tolerance.
SABOTAGE = {
    "vision epsilon 1e-5": ("G_video", 1e-3, around("encode_patches", with_eps(1e-5))),
    "merger epsilon 1e-5": ("G_video", 4e-4, around("merge_patches", with_eps(1e-5))),
    "text epsilon 1e-5": ("G_video", 2e-3, replaced(text={"rms_norm_eps": 1e-5})),
    "tanh GELU in the tower": ("G_video", 5e-4, around("encode_patches", with_gelu(tanh_gelu))),
    "tanh GELU in the merger": ("G_video", 5e-4, around("merge_patches", with_gelu(tanh_gelu))),
    "quick GELU in the tower": ("G_video", 2e-2, around("encode_patches", with_gelu(quick_gelu))),
    "half-split rotation in the tower": ("G_video", 0.5, lambda patch: patch(vision, "rotate_interleaved", half_split)),
    "equal angles in a pair": ("G_video", 0.5, lambda patch: patch(vision, "rotate_interleaved", equal_angle_pairs)),
    "exponent 2i/n": ("G_video", 0.5, lambda patch: patch(vision, "vision_angles", doubled_exponent)),
    "positions row-major": ("G_video", 0.5, changed_rows(row_major_positions)),
    "t = 0": ("G_video", 0.5, changed_rows(time_as(np.zeros_like))),
    "t counted without gaps": ("G_video", 0.5, changed_rows(time_as(lambda t: np.unique(t, return_inverse=True)[1]))),
    "no frame windows": ("G_video", 0.5, replaced(vision={"frame_window_size": 1_000})),
    "images attend to each other": ("C_multi", 0.5, changed_rows(one_window)),
    "image order reversed": ("C_multi", 0.5, changed_rows(images_reversed)),
    "qkv rows by head": ("G_video", 0.5, changed_params(per_head_qkv)),
    "tap before the last block": ("G_video", 0.5, changed_params(one_layer_less)),
    "pixels (y, x, channel)": ("G_video", 0.5, changed_params(pixels_channel_last)),
    "blocks column-major": ("G_video", 0.5, changed_rows(column_major_blocks)),
    "norm after concatenation": ("G_video", 0.2, around("merge_patches", norm_after_concatenation)),
    "no norm before the blocks": ("G_video", 0.5, no_pre_norm),
    "a norm after the blocks": ("G_video", 2e-4, around("encode_patches", stray_post_norm)),
    "added instead of replaced": ("G_video", 0.2, around("embed_rows", add_instead)),
    "no norm of queries and keys": ("G_video", 0.5, no_head_norm),
    "norm of queries and keys after rotation": ("G_video", 0.5, head_norm_after_rotation),
    "rope base 1e6": ("G_video", 0.5, replaced(text={"rope_theta": 1e6})),
    "key heads tiled": ("G_video", 0.5, around("attention", tiled_gqa)),
    "scale from the width": ("G_video", 0.5, around("attention", scale_from_width)),
    "no segment mask": ("P_packing", 0.5, changed_rows(no_segments)),
}


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory):
    """The command on the tensors of one forward pass.

    Where most mistakes show it runs operation by operation: a sabotaged run then shares all compiled operations but
    its own, while a program compiled as a whole is compiled anew for each.
    """
    expected = {}

    def run(name: str) -> int:
        if name not in expected:
            expected[name] = without_greedy(GOLDEN / name, tmp_path_factory.mktemp(name))
        out = tmp_path_factory.mktemp("out") / "got.npz"
        with jax.disable_jit(name == "G_video"):
            return check_parity.main(arguments(GOLDEN / name, out, expected[name]))

    return run


def test_operation_by_operation_nothing_is_missed(plain_run, capsys):
    """Of the other cases, the tests further up say so."""
    assert plain_run("G_video") == 0
    assert "MISS" not in capsys.readouterr().out


@pytest.mark.parametrize("mistake", SABOTAGE)
def test_a_miss_is_a_miss(mistake, plain_run, monkeypatch, capsys):
    name, floor, install = SABOTAGE[mistake]
    install(monkeypatch.setattr)
    assert plain_run(name) == 1
    difference, tolerance, verdict = table(capsys.readouterr().out)["packed_logits" if name[0] == "P" else "logits"]
    assert verdict == "MISS" and difference > tolerance
    assert difference > floor


def test_only_what_counts_is_compared():
    """Padding does not count, whichever way it is marked, nor in tensors that merely have the same sizes."""
    want = {"logits": np.zeros((4, 5)), "vision_layer_0": np.zeros((4, 5)), "cu_seqlens": np.arange(3)}
    got = {"logits": np.zeros((4, 5)), "vision_layer_0": np.zeros((4, 5)), "cu_seqlens": np.arange(3)}
    got["logits"][0] = 1
    passed = lambda extra, mask=None: [v.passed for v in check_parity.compare(got, want | extra, attention_mask=mask)]
    assert passed({}) == [False, True, True]
    assert passed({"valid": np.array([0, 1, 1, 1])}) == [True, True, True]
    assert passed({}, np.array([[0, 1, 1, 1]])) == [True, True, True]
    got["vision_layer_0"][0] = 1
    assert passed({"valid": np.array([0, 1, 1, 1])}) == [True, False, True]
    got["cu_seqlens"][1] = 2
    assert passed({"valid": np.ones(4)}) == [False, False, False]


@pytest.mark.parametrize(
    ("got", "passes"),
    [
        (np.full(3, 1e-4), True),
        (np.full(3, 1.01e-4), False),
        (np.full(3, np.nan), False),
        (np.zeros(4), False),
        (None, False),
    ],
)
def test_the_verdict(got, passes):
    found = {} if got is None else {"logits": got}
    (verdict,) = check_parity.compare(found, {"logits": np.zeros(3)})
    assert verdict.passed == passes


# Bad input: status 2, one line, no file


@pytest.fixture
def bad_run(made, tmp_path, capsys):
    """Runs with changed arguments; returns the one line on stderr."""
    folder = made("sparse_positions")

    def run(**changes) -> str:
        out = tmp_path / "out" / "got.npz"
        out.parent.mkdir()
        words = dict(word[2:].split("=", 1) for word in arguments(folder, out)) | {
            k: str(v) for k, v in changes.items()
        }
        status = check_parity.main([f"--{key}={value}" for key, value in words.items()])
        stdout, stderr = capsys.readouterr()
        assert status == 2
        assert list(out.parent.iterdir()) == []
        assert stdout == "" and stderr.startswith("check_parity.py: ") and stderr.count("\n") == 1
        return stderr

    return run


def changed_inputs(made, path: Path, **changes) -> Path:
    inputs = check_parity.read_npz(made("sparse_positions") / "inputs.npz") | changes
    return save(path, {name: value for name, value in inputs.items() if value is not None})


@pytest.mark.parametrize("which", ["hf", "inputs", "expected"])
def test_a_missing_file_is_named(bad_run, which, tmp_path):
    assert "nowhere" in bad_run(**{which: tmp_path / "nowhere"})


def test_inputs_without_ids(bad_run, made, tmp_path):
    assert "input_ids" in bad_run(inputs=changed_inputs(made, tmp_path / "bad.npz", input_ids=None))


def test_another_count_of_image_tokens(bad_run, made, tmp_path):
    ids = check_parity.read_npz(made("sparse_positions") / "inputs.npz")["input_ids"]
    ids[0, np.flatnonzero(ids[0] == 90)[0]] = 1
    line = bad_run(inputs=changed_inputs(made, tmp_path / "bad.npz", input_ids=ids))
    assert "12 image tokens" in line and "13" in line


@pytest.mark.parametrize("change", [{"pixel_values": None}, {"image_grid_thw": None}, {"patch_positions": np.zeros(3)}])
def test_pictures_that_contradict_each_other(bad_run, made, tmp_path, change):
    assert next(iter(change)) in bad_run(inputs=changed_inputs(made, tmp_path / "bad.npz", **change))


@pytest.mark.parametrize("token", [-1, 96])
def test_ids_outside_the_vocabulary(bad_run, made, tmp_path, token):
    """Unchecked, they would be computed with some other embedding."""
    ids = check_parity.read_npz(made("sparse_positions") / "inputs.npz")["input_ids"]
    ids[0, -1] = token
    assert "vocabulary" in bad_run(inputs=changed_inputs(made, tmp_path / "bad.npz", input_ids=ids))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut short", b"plain text", "array"])
def test_a_file_that_is_no_archive(bad_run, tmp_path, content):
    path = tmp_path / "bad.npz"
    if content == "array":
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    else:
        path.write_bytes(content)
    assert "bad.npz" in bad_run(inputs=path)


def test_an_output_that_cannot_be_written(made, tmp_path, capsys):
    out = tmp_path / "absent" / "got.npz"
    assert check_parity.main(arguments(made("text_only"), out)) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("arrays", [{}, {"valid": np.ones(3)}])
def test_an_expected_file_with_nothing_to_compare(made, tmp_path, capsys, arrays):
    """The tensors were computed and stay; that nothing was compared is no success."""
    expected, out = save(tmp_path / "nothing.npz", arrays), tmp_path / "got.npz"
    assert check_parity.main(arguments(made("text_only"), out, expected)) == 2
    assert "no tensor" in capsys.readouterr().err
    assert "logits" in check_parity.read_npz(out)


def test_a_negative_count(made, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        check_parity.main([*arguments(made("text_only"), tmp_path / "got.npz"), "--greedy=-1"])
    assert stop.value.code == 2 and "negative" in capsys.readouterr().err


# Gradients


CHECKED = (
    "visual.embeddings.patch_embedding.weight",
    "visual.layernorm_pre.weight",
    "visual.encoder.layers.0.self_attn.qkv.weight",
    "visual.encoder.layers.1.mlp.fc1.bias",
    "visual.merger.ln_q.bias",
    "visual.merger.mlp.0.weight",
    "language_model.embed_tokens.weight",
    "language_model.layers.0.self_attn.k_norm.weight",
    "language_model.layers.0.self_attn.v_proj.weight",
    "language_model.layers.1.mlp.gate_proj.weight",
    "language_model.norm.weight",
)


@pytest.mark.parametrize("name", ["labels", pytest.param("packed_labels", marks=pytest.mark.slow)])
def test_gradients_are_the_slopes_of_the_oracle(made, checked, name):
    """Central differences in float64, at the steepest and at random entries of tensors of every kind."""
    (_, _, got), inputs = checked(name), check_parity.read_npz(made(name) / "inputs.npz")
    reference, rng, step = Reference(made(name)), np.random.default_rng(0), 1e-4
    assert got["loss"] == pytest.approx(reference.loss(inputs), abs=1e-5)
    assert {n.removeprefix("grad:") for n in got if n.startswith("grad:")} == set(reference.w)
    for name in (*(f"model.{tail}" for tail in CHECKED), "lm_head.weight"):
        grad, weight = got[f"grad:{name}"].reshape(-1), reference.w[name].reshape(-1)
        for entry in (np.abs(grad).argmax(), rng.integers(grad.size)):
            kept = weight[entry]
            losses = []
            for moved in (kept + step, kept - step):
                weight[entry] = moved
                losses.append(reference.loss(inputs))
            weight[entry] = kept
            slope = (losses[0] - losses[1]) / (2 * step)
            assert grad[entry] == pytest.approx(slope, abs=float(2e-4 * np.abs(grad).max())), (name, entry)
    image_row = got["grad:model.language_model.embed_tokens.weight"][90]
    assert np.all(image_row == 0)  # replaced, so nothing depends on it
