"""Damaged, incomplete and unsupported checkpoints: refused with file and tensor named, and nothing left behind."""

import errno
import json
import os
import re
import subprocess

import numpy as np
import pytest
import safetensors.numpy

from mage_jax.weights import atomic, plain_chunks
from mage_jax.weights.errors import HfConfigError, MismatchError, SafetensorsError, WeightsError
from mage_jax.weights.hf_export import export_hf
from mage_jax.weights.hf_import import import_hf
from mage_jax.weights.load import load_model, read_config
from mage_jax.weights.model_dir import read_model_file, resolve
from tests.weights import helpers

FILE = "model.safetensors"
NORM = "model.language_model.norm.weight"
K_PROJ = "model.language_model.layers.1.self_attn.k_proj.weight"
SHARD = "model-00002-of-00002.safetensors"
HEAD = "lm_head.weight"
LN_Q = "model.visual.merger.ln_q.weight"  # lies in SHARD


def _tensors(change):
    return lambda folder: helpers.rewrite(folder, change)


def _drop(name):
    return _tensors(lambda t: {k: v for k, v in t.items() if k != name})


def _header(change):
    def damage(folder):
        header, data = helpers.read_raw(folder / FILE)
        helpers.write_raw(folder / FILE, change(header), data)

    return damage


def _offsets(name, start, stop):
    def change(header):
        a, b = header[name]["data_offsets"]
        return {**header, name: {**header[name], "data_offsets": [a + start, b + stop]}}

    return change


def _entry(name, **fields):
    return lambda header: {**header, name: {**header[name], **fields}}


def _truncate(file, size):
    return lambda folder: os.truncate(folder / file, size)


def _index(**changes):
    def damage(folder):
        index = json.loads((folder / helpers.INDEX).read_text())
        index["metadata"].update(changes.get("metadata", {}))
        index["weight_map"].update(changes.get("weight_map", {}))
        for name in changes.get("remove", ()):
            del index["weight_map"][name]
        (folder / helpers.INDEX).write_text(json.dumps(index))

    return damage


def _unlink(name):
    return lambda folder: (folder / name).unlink()


def _duplicate_name(folder):
    header, data = helpers.read_raw(folder / FILE)
    text = json.dumps(header)[:-1] + ', "' + NORM + '": ' + json.dumps(header[NORM]) + "}"
    helpers.write_raw(folder / FILE, text.encode(), data)


def _in_both_shards(folder):
    first = "model-00001-of-00002.safetensors"
    extra = safetensors.numpy.load_file(folder / SHARD)[LN_Q]
    helpers.rewrite(folder, lambda t: {**t, LN_Q: extra}, file=first)


def _cast(name, dtype):
    return _tensors(lambda t: {**t, name: t[name].astype(dtype)})


# case: (golden, damage, error, what the message must contain)
FILES = {
    "missing tensor": (helpers.SINGLE, _drop(K_PROJ), MismatchError, [FILE, K_PROJ, "missing", r"\[64, 64\]"]),
    "extra tensor": (
        helpers.SINGLE,
        _tensors(lambda t: {**t, "model.stray": np.ones(3, np.float32)}),
        MismatchError,
        [FILE, r"model\.stray", r"\[3\]"],
    ),
    "wrong shape": (
        helpers.SINGLE,
        _tensors(lambda t: {**t, K_PROJ: np.ones((64, 63), np.float32)}),
        MismatchError,
        [FILE, K_PROJ, r"\[64, 63\]", r"\[64, 64\]"],
    ),
    "transposed": (
        helpers.SINGLE,
        _tensors(lambda t: {**t, "lm_head.weight": np.ascontiguousarray(t["lm_head.weight"].T)}),
        MismatchError,
        [HEAD, r"\[64, 512\]", r"\[512, 64\]"],
    ),
    "unsupported dtype": (helpers.SINGLE, _cast(NORM, np.float64), MismatchError, [FILE, NORM, "F64", "BF16"]),
    "mixed stack": (helpers.SINGLE, _cast(K_PROJ, np.float16), MismatchError, ["k_khd", "F16", "F32", K_PROJ]),
    "empty file": (helpers.SINGLE, _truncate(FILE, 0), SafetensorsError, [FILE, "truncated"]),
    "truncated header": (helpers.SINGLE, _truncate(FILE, 100), SafetensorsError, [FILE, "truncated"]),
    "truncated data": (helpers.SHARDED, _truncate(SHARD, 400_000), SafetensorsError, [SHARD, "after the end"]),
    "not safetensors": (
        helpers.SINGLE,
        lambda folder: (folder / FILE).write_bytes(b"PK\x03\x04" * 100),
        SafetensorsError,
        [FILE, "header"],
    ),
    "header not json": (
        helpers.SINGLE,
        lambda folder: helpers.write_raw(folder / FILE, b'{"a": ', b""),
        SafetensorsError,
        [FILE, "JSON"],
    ),
    "offsets past the end": (
        helpers.SINGLE,
        _header(_offsets(NORM, 10**9, 10**9)),
        SafetensorsError,
        [FILE, NORM, "after the end"],
    ),
    "overlap": (helpers.SINGLE, _header(_offsets(NORM, -256, -256)), SafetensorsError, [FILE, "overlaps", NORM]),
    "size and dtype differ": (
        helpers.SINGLE,
        _header(_entry(NORM, dtype="BF16")),
        SafetensorsError,
        [FILE, NORM, "256 bytes", "128 bytes"],
    ),
    "unknown dtype": (helpers.SINGLE, _header(_entry(NORM, dtype="Q4")), SafetensorsError, [FILE, NORM, "Q4"]),
    "negative shape": (helpers.SINGLE, _header(_entry(NORM, shape=[-64])), SafetensorsError, [FILE, NORM, "shape"]),
    "duplicate name": (helpers.SINGLE, _duplicate_name, SafetensorsError, [FILE, NORM, "duplicate"]),
    "bytes left over": (
        helpers.SINGLE,
        lambda folder: (folder / FILE).open("ab").write(b"x" * 16),
        SafetensorsError,
        [FILE, "16 bytes follow"],
    ),
    "shard missing": (helpers.SHARDED, _unlink(SHARD), SafetensorsError, [helpers.INDEX, SHARD, "missing"]),
    "tensor in another shard": (
        helpers.SHARDED,
        _index(weight_map={HEAD: SHARD}),
        SafetensorsError,
        [helpers.INDEX, HEAD, SHARD],
    ),
    "tensor not in its shard": (
        helpers.SHARDED,
        _index(weight_map={"model.ghost": SHARD}),
        SafetensorsError,
        [helpers.INDEX, r"model\.ghost", SHARD],
    ),
    "tensor not in index": (helpers.SHARDED, _index(remove=[LN_Q]), SafetensorsError, [SHARD, LN_Q, "index"]),
    "total_size wrong": (
        helpers.SHARDED,
        _index(metadata={"total_size": 953_025}),
        SafetensorsError,
        [helpers.INDEX, "total_size", "953025", "953024"],
    ),
    "shard outside the folder": (
        helpers.SHARDED,
        _index(weight_map={HEAD: "../x.safetensors"}),
        SafetensorsError,
        [helpers.INDEX, HEAD, "plain file name"],
    ),
    "tensor in two shards": (helpers.SHARDED, _in_both_shards, SafetensorsError, [LN_Q, "also in"]),
    "head absent, untied": (
        helpers.SINGLE,
        _drop(HEAD),
        HfConfigError,
        [r"config\.json", "tie_word_embeddings", r"lm_head\.weight"],
    ),
    "no weights": (helpers.SINGLE, _unlink(FILE), SafetensorsError, [FILE, "neither"]),
    "no config": (helpers.SINGLE, _unlink("config.json"), HfConfigError, [r"config\.json", "does not exist"]),
}


@pytest.mark.parametrize("case", FILES)
def test_damaged_files_are_refused(case, tmp_path):
    golden, damage, error, parts = FILES[case]
    hf = helpers.copy_case(golden, tmp_path / "hf")
    damage(hf)
    with pytest.raises(error) as caught:
        import_hf(hf, tmp_path / "out")
    for part in parts:
        assert re.search(part, str(caught.value)), f"{part!r} not in: {caught.value}"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]
    with pytest.raises(WeightsError):
        load_model(hf)


def test_all_mismatches_are_reported_together(tmp_path):
    hf = helpers.copy_case(helpers.SINGLE, tmp_path / "hf")
    _drop(NORM)(hf)
    helpers.rewrite(hf, lambda t: {**t, K_PROJ: np.ones((2, 2), np.float32), "model.stray": np.ones(1, np.float32)})
    with pytest.raises(MismatchError) as caught:
        import_hf(hf, tmp_path / "out")
    assert len(caught.value.problems) == 3


GEOMETRY = [
    *(f"vision_config.{f}" for f in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")),
    *(f"vision_config.{f}" for f in ("patch_size", "num_channels", "spatial_merge_size", "rope_theta")),
    *(f"vision_config.{f}" for f in ("layer_norm_eps", "frame_windows_size", "hidden_act", "model_type")),
    *(f"text_config.{f}" for f in ("hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim")),
    *(f"text_config.{f}" for f in ("num_key_value_heads", "intermediate_size", "vocab_size", "rms_norm_eps")),
    *(f"text_config.{f}" for f in ("max_position_embeddings", "rope_parameters", "rope_parameters.rope_theta")),
    *("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    *("text_config", "vision_config", "model_type"),
]


@pytest.mark.parametrize("field", GEOMETRY)
def test_missing_field_is_named(field, tmp_path):
    hf = helpers.copy_case(helpers.SINGLE, tmp_path / "hf")
    helpers.edit_json(hf / "config.json", remove=field)
    with pytest.raises(HfConfigError, match=rf"config\.json: .*{re.escape(field)}.*missing"):
        read_config(hf)


UNSUPPORTED = {
    "model_type": "llava",
    "vision_config__model_type": "siglip",
    "vision_config__hidden_act": "quick_gelu",
    "vision_config__use_head": True,
    "vision_config__use_patch_position_encoding": True,
    "vision_config__layer_norm_type": "rms_norm",
    "vision_config__temporal_patch_size": 2,
    "vision_config__out_hidden_size": 65,
    "vision_config__hidden_size": "64",
    "vision_config__num_attention_heads": 3,
    "text_config__model_type": "qwen3_moe",
    "text_config__hidden_act": "gelu",
    "text_config__attention_bias": True,
    "text_config__use_sliding_window": True,
    "text_config__layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "text_config__rope_parameters__rope_type": "yarn",
    "text_config__rope_scaling": {"type": "linear", "factor": 2},
    "text_config__rope_theta": 10_000.0,
    "text_config__num_hidden_layers": True,
    "image_token_id": 100_000,
}


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_unsupported_value_is_named(field, tmp_path):
    hf = helpers.copy_case(helpers.SINGLE, tmp_path / "hf")
    helpers.edit_json(hf / "config.json", **{field: UNSUPPORTED[field]})
    leaf = field.rpartition("__")[2].replace("num_attention_heads", "num_heads")
    with pytest.raises(HfConfigError, match=rf"config\.json: .*{leaf}"):
        read_config(hf)


def test_flat_rope_theta_and_eos_sources(tmp_path):
    hf = helpers.copy_case(helpers.SINGLE, tmp_path / "hf")
    helpers.edit_json(hf / "config.json", remove="text_config.rope_parameters")
    helpers.edit_json(hf / "config.json", text_config__rope_theta=1_000_000)
    helpers.edit_json(hf / "generation_config.json", eos_token_id=[501, 502])
    config = read_config(hf)
    assert config.text.rope_theta == 1_000_000 and config.eos_token_ids == (501, 502)
    (hf / "generation_config.json").unlink()
    helpers.edit_json(hf / "config.json", remove="eos_token_id")
    assert read_config(hf).eos_token_ids == (501,)
    helpers.edit_json(hf / "config.json", remove="text_config.eos_token_id")
    with pytest.raises(HfConfigError, match="eos_token_id is missing"):
        read_config(hf)


def test_existing_output_is_refused(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    import_hf(helpers.GOLDEN / helpers.SINGLE, out)  # empty is fine
    before = helpers.tree_bytes(out)
    with pytest.raises(WeightsError, match="out already exists"):
        import_hf(helpers.GOLDEN / helpers.SINGLE, out)
    with pytest.raises(WeightsError, match="out already exists"):
        export_hf(out, out)
    assert helpers.tree_bytes(out) == before


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("direction", ["in", "out"])
def test_an_error_half_way_leaves_nothing(error, direction, tmp_path, monkeypatch):
    import_hf(helpers.GOLDEN / helpers.SHARDED, tmp_path / "model")
    calls = iter(range(1000))
    real = os.copy_file_range

    def failing(*args):
        if next(calls) == 20:
            raise error
        return real(*args)

    monkeypatch.setattr(plain_chunks.os, "copy_file_range", failing)
    with pytest.raises(type(error)) as caught:
        if direction == "in":
            import_hf(helpers.GOLDEN / helpers.SHARDED, tmp_path / "out")
        else:
            export_hf(tmp_path / "model", tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]
    if isinstance(error, OSError):
        assert caught.value.errno == errno.ENOSPC and "disk is full" in str(caught.value)
        assert str(tmp_path / "out") in str(caught.value)


def test_too_small_a_disk_is_seen_before_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(OSError, match=r"MB are needed, 1\.00 kB are free; nothing written"):
        import_hf(helpers.GOLDEN / helpers.SINGLE, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_full_disk_for_real(tmp_path, monkeypatch):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True)
    if mount.returncode:
        pytest.skip("mounting a small tmpfs is not permitted here")
    try:
        monkeypatch.setattr(atomic.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10**12})())
        with pytest.raises(OSError, match="disk is full") as caught:
            import_hf(helpers.GOLDEN / helpers.SINGLE, disk / "out")
        assert caught.value.errno == errno.ENOSPC
        assert not list(disk.iterdir())
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_damaged_model_folders_are_refused(tmp_path):
    import_hf(helpers.GOLDEN / helpers.SHARDED, tmp_path / "model")
    model = tmp_path / "model"
    chunk = model / "params" / "text.layers.mlp.up_fd" / "c" / "0" / "0" / "0"
    data = chunk.read_bytes()
    os.truncate(chunk, len(data) - 2)
    for use in (lambda: export_hf(model, tmp_path / "a"), lambda: load_model(model)):
        with pytest.raises(WeightsError, match=r"up_fd|params"):
            use()
    chunk.unlink()
    with pytest.raises(WeightsError, match=r"up_fd"):
        export_hf(model, tmp_path / "a")
    with pytest.raises(WeightsError, match=r"up_fd"):
        export_hf(model, tmp_path / "a", dtype="float32")
    chunk.write_bytes(data)
    helpers.edit_json(model / "model.json", model__text__mlp_size=161)
    with pytest.raises(MismatchError, match=r"text\.layers\.mlp\.up_fd has shape"):
        load_model(model)
    helpers.edit_json(model / "model.json", model__text__mlp_size=160)
    helpers.edit_json(model / "assets" / "config.json", text_config__rms_norm_eps=1e-5)
    with pytest.raises(WeightsError, match=r"config\.json describes another model"):
        export_hf(model, tmp_path / "a")
    helpers.edit_json(model / "model.json", format=99)
    with pytest.raises(WeightsError, match=r"model\.json: format 99"):
        read_model_file(model)
    assert not (tmp_path / "a").exists()


def test_carried_files_never_replace_weight_files(tmp_path):
    import_hf(helpers.GOLDEN / helpers.SHARDED, tmp_path / "model")
    (tmp_path / "model" / "assets" / FILE).write_bytes(b"stray")
    with pytest.raises(WeightsError, match=r"assets/model\.safetensors: a carried file has the name"):
        export_hf(tmp_path / "model", tmp_path / "out", max_shard_gb=5)
    assert not (tmp_path / "out").exists()


def test_other_paths_are_refused(tmp_path):
    with pytest.raises(WeightsError, match="does not exist"):
        resolve(tmp_path / "nothing")
    (tmp_path / "file").touch()
    with pytest.raises(WeightsError, match="not a folder"):
        resolve(tmp_path / "file")
    with pytest.raises(WeightsError, match=r"not a checkpoint.*found file"):
        resolve(tmp_path)
    with pytest.raises(WeightsError, match="Hugging Face folder already"):
        export_hf(helpers.GOLDEN / helpers.SINGLE, tmp_path / "out")
    with pytest.raises(WeightsError, match="max_shard_gb must be positive"):
        import_hf(helpers.GOLDEN / helpers.SINGLE, tmp_path / "model")
        export_hf(tmp_path / "model", tmp_path / "out", max_shard_gb=0)
