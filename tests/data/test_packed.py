"""Packed folders: the same batches as the online loader, exact continuation after a kill, refusals by name."""

import collections
import dataclasses
import itertools
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from mage_jax.agent.tokenizer import Tokenizer
from mage_jax.config import ConfigError, DataConfig, ImageConfig, TrainConfig
from mage_jax.config_flags import load_config, override, run_main
from mage_jax.data import pack as pack_lib
from mage_jax.data.image import ImageRef
from mage_jax.data.loader import LoaderError, make_loader
from mage_jax.data.packed import MANIFEST, PackedError, PackedFolder, decode_row, encode_row
from mage_jax.data.samples import PlannedImage, SamplePlan
from tests.train.test_kill import CONFIG

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECORDS = ROOT / "tests" / "data" / "miniwob" / "train.jsonl"
TOY = Tokenizer.load("toy")


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "packed.py"
    path.write_text(CONFIG.format(records=str(RECORDS), steps=2, every=2))
    return path


@pytest.fixture(scope="module")
def config(config_file):
    best_fit = ["--config.data.packer=best_fit", "--config.data.window=24"]
    return override(load_config(str(config_file), cls=TrainConfig), best_fit)


@pytest.fixture(scope="module")
def folder(config, tmp_path_factory):
    return pack_lib.pack(config, tmp_path_factory.mktemp("packed") / "rows", batches_per_shard=2)


def _loader(config, *, process_index=0, process_count=1, **changes):
    return make_loader(
        dataclasses.replace(config.data, **changes),
        vision=config.model.vision,
        tokenizer=TOY,
        image_token_id=config.model.image_token_id,
        seed=config.seed,
        process_index=process_index,
        process_count=process_count,
    )


def _packed(config, folder, **changes):
    return _loader(config, records=(), packed=str(folder.path), **changes)


def _flat(batch):
    arrays = {**vars(batch.batch.rows), "targets": batch.batch.targets_bt, "weights": batch.batch.weights_bt}
    return {key: value.tobytes() for key, value in arrays.items()} | {
        "ids": batch.sample_ids,
        "used": (batch.tokens_used, batch.patches_used),
    }


def test_the_same_batches_as_online(config, folder):
    online = [_flat(batch) for batch in _loader(config, epochs=1)]
    packed = [_flat(batch) for batch in _packed(config, folder, epochs=1, shuffle=False)]
    assert packed == online and len(folder.shards) > 1
    assert folder.samples == sum(len(row) for batch in packed for row in batch["ids"]) == 85
    assert folder.tokens == sum(batch["used"][0] for batch in packed)


def test_batches_are_shuffled_whole_and_resume(config, folder):
    loader = _packed(config, folder, epochs=2)
    iterator, batches, states = iter(loader), [], []
    for batch in iterator:
        batches.append(_flat(batch))
        states.append(iterator.get_state())
    plain = [batch.sample_ids for batch in _packed(config, folder, epochs=1, shuffle=False)]
    order = [plain.index(batch["ids"]) for batch in batches]
    assert collections.Counter(order) == {i: 2 for i in range(len(plain))}
    assert order[: len(plain)] != order[len(plain) :]
    fresh = iter(_packed(config, folder, epochs=2))
    fresh.set_state(json.loads(json.dumps(states[1])))
    assert [_flat(batch) for batch in fresh] == batches[2:]
    with pytest.raises(LoaderError, match="has packer 'packed', this loader has 'best_fit'"):
        iter(_loader(config, epochs=2)).set_state(states[1])


def test_hosts_and_workers(config, folder):
    whole = list(itertools.islice(_packed(config, folder), 7))
    hosts = [list(itertools.islice(_packed(config, folder, process_index=i, process_count=2), 7)) for i in range(2)]
    for batch, first, second in zip(whole, *hosts, strict=True):
        assert batch.sample_ids == first.sample_ids + second.sample_ids
        both = np.concatenate([first.batch.rows.patches_bpc, second.batch.rows.patches_bpc])
        np.testing.assert_array_equal(batch.batch.rows.patches_bpc, both)
    ids = [i for b in _packed(config, folder, epochs=1, workers=2) for row in b.sample_ids for i in row]
    assert len(ids) == len(set(ids)) == 85


def test_a_row_stores_each_content_once(tmp_path):
    """Two files of the same bytes: stored once, and one key when read."""
    picture = RECORDS.parent / "images" / "click-test-0.png"
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(picture.read_bytes())
    row = [
        SamplePlan(f"s{i}", "here:1", np.arange(i + 3), np.ones(i + 3), (PlannedImage(ImageRef(path), (1, 2, 4)),))
        for i, path in enumerate((str(tmp_path / "a.png"), str(tmp_path / "b.png")))
    ]
    record = encode_row(row)
    assert record.count(picture.read_bytes()) == 1
    read = decode_row(record)
    assert len({image.key for planned in read for image in planned.images}) == 1
    assert encode_row(read) == record
    for planned, want in zip(read, row, strict=True):
        assert (planned.sample_id, planned.where, planned.num_patches) == (want.sample_id, want.where, 8)
        np.testing.assert_array_equal(planned.tokens, want.tokens)
        np.testing.assert_array_equal(planned.weights, want.weights)


# Dies while the third shard is being written.
DIE = """
import os, signal, sys
sys.path.insert(0, {root!r})
from mage_jax.data import pack
honest, calls = pack.encode_row, []
def encode_row(row):
    calls.append(row)
    if len(calls) == 19:
        os.kill(os.getpid(), signal.SIGKILL)
    return honest(row)
pack.encode_row = encode_row
sys.exit(pack.main(sys.argv[1:]))
"""


def test_killed_and_continued_it_is_the_same_folder(config_file, folder, tmp_path):
    out = tmp_path / "rows"
    arguments = [f"--config={config_file}", "--out", str(out), "--batches_per_shard=2"]
    arguments += ["--config.data.packer=best_fit", "--config.data.window=24"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", DIE.format(root=str(ROOT)), *arguments]
    assert subprocess.run(command, cwd=ROOT, env=environment, timeout=120).returncode == -9
    assert not (out / MANIFEST).exists() and len(list(out.glob("rows-*"))) == 2
    with pytest.raises(PackedError, match=r"has no manifest\.json; run mage_jax\.data\.pack to its end"):
        PackedFolder.open(out)
    # Another setting is refused before anything is touched.
    assert pack_lib.main([*arguments, "--config.seed=1"]) == 1
    assert pack_lib.main(arguments) == 0
    files = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    assert {path.name: path.read_bytes() for path in out.iterdir()} == files
    assert pack_lib.main(arguments) == 0  # complete: nothing to do


def test_refusals(config, config_file, folder, tmp_path, capsys):
    for changes, name in (
        ({"rows": 2}, "rows 4, this config has 2"),
        ({"tokens_per_row": 512}, "tokens_per_row 320"),
        ({"image": ImageConfig(max_pixels=10_000)}, "max_pixels"),
    ):
        with pytest.raises(PackedError, match=f"was packed with {name}"):
            _packed(config, folder, **changes)
    with pytest.raises(LoaderError, match="99 workers for"):
        _packed(config, folder, workers=99)
    with pytest.raises(ConfigError, match=r"DataConfig\.packed: records or a mixture are given too"):
        DataConfig(records=("a",), packed="b")
    (tmp_path / "letter.txt").touch()
    with pytest.raises(PackedError, match=r"holds other files \(letter\.txt\)"):
        pack_lib.pack(config, tmp_path)
    for arguments, reason in (
        (["--config=none.py"], "no file none.py"),
        ([f"--config={config_file}", "--config.data.row=3"], "config.data has no field 'row'"),
        ([f"--config={config_file}", "--config.data.rows=three"], "config.data.rows"),
        ([f"--config={config_file}", "--config.date.rows=3"], "config has no field 'date'"),
        ([f"--config={config_file}", "stray"], "unexpected argument: stray"),
        ([f"--config={config_file}", "--config.data.tokenizer="], "config.data.tokenizer: is empty"),
    ):
        assert run_main(pack_lib.main, [*arguments, "--out", str(tmp_path / "new")]) == 2
        assert reason in capsys.readouterr().err
    arguments = [f"--config={config_file}", "--config.data.records=()", "--out", str(tmp_path / "new")]
    assert pack_lib.main(arguments) == 1
    assert "DataConfig.records: holds no records" in capsys.readouterr().err
    assert run_main(pack_lib.main, [f"--config={config_file}"]) == 2
    assert "--out=DIR is missing" in capsys.readouterr().err
