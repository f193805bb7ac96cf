"""Mixtures and the best-fit loader: weights, ends, hosts, worker processes, exact resume, shared screenshots."""

import collections
import dataclasses
import itertools
import json

import numpy as np
import pytest
from PIL import Image

from mage_jax.agent.tokenizer import Tokenizer
from mage_jax.config import ConfigError, DataConfig, ImageConfig, SourceConfig, from_dict, to_dict
from mage_jax.data import samples as samples_lib
from mage_jax.data.loader import LoaderError, make_loader
from mage_jax.data.records import RecordSet
from tests.data.helpers import VISION, flat, sample_ids

TOY = Tokenizer.load("toy")
SIZES = {"ground": 12, "agent": 7}
BASE = DataConfig(rows=2, tokens_per_row=160, patches_per_row=64, packer="best_fit", window=6, epochs=2)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two record sets over three pictures of 16, 24 and 32 patches; the agent's records show two pictures each."""
    folder = tmp_path_factory.mktemp("records")
    rng = np.random.default_rng(0)
    for i in range(3):
        Image.fromarray(rng.integers(0, 256, (64, 64 + 32 * i, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    for name, count in SIZES.items():
        with open(folder / f"{name}.jsonl", "w") as file:
            for i in range(count):
                shown = [f"{i % 3}.png"] if name == "ground" else ["0.png", f"{i % 2}.png"]
                content = [{"type": "image", "image": path} for path in shown]
                content.append({"type": "text", "text": "Where? " * (i % 4)})
                messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "there " * (i % 5)}]
                file.write(json.dumps({"id": f"r{i}", "messages": messages}) + "\n")
    return {name: str(folder / f"{name}.jsonl") for name in SIZES}


def _mixture(files, ground=2.0, agent=1.0):
    return (SourceConfig("ground", (files["ground"],), ground), SourceConfig("agent", (files["agent"],), agent))


def _loader(files, *, seed=3, process_index=0, process_count=1, **changes):
    if "records" not in changes:
        changes.setdefault("mixture", _mixture(files))
    return make_loader(
        dataclasses.replace(BASE, **changes),
        vision=VISION,
        tokenizer=TOY,
        image_token_id=TOY.special_ids.image_pad,
        seed=seed,
        process_index=process_index,
        process_count=process_count,
    )


def _expected(epochs):
    return {f"{name}/r{i}": epochs for name, count in SIZES.items() for i in range(count)}


@pytest.mark.parametrize("packer", ["best_fit", "first_fit"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_record_of_every_source_once_per_epoch(files, packer, shuffle):
    batches = list(_loader(files, packer=packer, shuffle=shuffle))
    assert collections.Counter(sample_ids(batches)) == _expected(2)
    for batch in batches:
        assert batch.tokens_used == np.count_nonzero(batch.batch.rows.segment_ids_bt)
        assert batch.patches_used == np.count_nonzero(batch.batch.rows.patch_windows_bp)


def test_weights_rule_until_a_source_ends(files):
    """One sample a row, in file order, one record pending: the order of the draws is the order of the rows."""
    plain = {"shuffle": False, "max_samples_per_row": 1, "window": 1, "rows": 1, "epochs": 1}
    ids = sample_ids(_loader(files, **plain))
    names = [sample_id.partition("/")[0] for sample_id in ids]
    for n in range(1, 19):
        assert abs(names[:n].count("ground") - n * 2 / 3) <= 1
    assert sorted(ids) == sorted(_expected(1)) and names[-1] == "agent"
    # A heavy source that ends early drops out; the other goes on alone.
    names = [i.partition("/")[0] for i in sample_ids(_loader(files, mixture=_mixture(files, agent=20.0), **plain))]
    assert names[:7].count("agent") >= 6 and names[-10:] == ["ground"] * 10


def test_endless_mixture_keeps_its_weights(files):
    batches = itertools.islice(_loader(files, epochs=0, mixture=_mixture(files, 1.0, 3.0)), 60)
    counts = collections.Counter(sample_id.partition("/")[0] for sample_id in sample_ids(batches))
    assert 2.7 < counts["agent"] / counts["ground"] < 3.3


def test_a_source_shuffles_by_its_own_name(files):
    """Adding a source leaves the order inside the others alone."""
    plain = {"max_samples_per_row": 1, "window": 1, "rows": 1, "epochs": 1}
    both, alone = (sample_ids(_loader(files, mixture=m, **plain)) for m in (_mixture(files), _mixture(files)[:1]))
    assert [i for i in both if i.startswith("ground/")] == alone != sorted(alone)


@pytest.mark.parametrize("packer", ["best_fit", "first_fit"])
def test_resume_at_every_offset(files, packer):
    loader = _loader(files, packer=packer)
    iterator = iter(loader)
    states, batches = [iterator.get_state()], []
    for batch in iterator:
        batches.append(flat(batch))
        states.append(iterator.get_state())
    assert len(batches) >= 5
    for offset, state in enumerate(states):
        fresh = iter(_loader(files, packer=packer))
        fresh.set_state(json.loads(json.dumps(state)))
        assert json.dumps(fresh.get_state()) == json.dumps(state)  # before anything is drawn
        rest = [fresh.get_state()]
        for batch in fresh:
            assert flat(batch) == batches[offset + len(rest) - 1]
            rest.append(fresh.get_state())
        assert rest == states[offset:]
    used = iter(loader)
    for _ in range(3):
        next(used)
    used.set_state(states[1])
    assert [flat(batch) for batch in used] == batches[1:]


def test_resume_decodes_only_what_it_returns(files, monkeypatch):
    loader = _loader(files, window=12)
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    state, expected = iterator.get_state(), next(iterator)
    decoded = []
    original = samples_lib.image_lib.image_patches
    monkeypatch.setattr(
        samples_lib.image_lib, "image_patches", lambda ref, **how: decoded.append(ref.path) or original(ref, **how)
    )
    fresh = iter(loader)
    fresh.set_state(state)
    assert flat(next(fresh)) == flat(expected)
    # Each picture of a row once, whatever number of its samples show it.
    assert len(decoded) == sum(len(_row_keys(files, row)) for row in expected.sample_ids)
    assert len(decoded) < sum(1 if i.startswith("ground") else 2 for row in expected.sample_ids for i in row)


def _plan(files, sample_id):
    name, _, record_id = sample_id.partition("/")
    record = RecordSet(files[name])[int(record_id[1:])]
    return samples_lib.plan(record, tokenizer=TOY, image=ImageConfig(), vision=VISION)


def _row_keys(files, row):
    return {key for sample_id in row for key, _ in _plan(files, sample_id).distinct_images}


def test_a_row_shows_each_sample_its_own_pixels(files):
    """Through shared vision indices every segment reads the patches that it has when packed alone."""
    shared = 0
    for batch in _loader(files):
        rows = batch.batch.rows
        for r, row in enumerate(batch.sample_ids):
            used = np.count_nonzero(rows.patch_windows_bp[r])
            assert used == sum({k: n for i in row for k, n in _plan(files, i).distinct_images}.values()) <= 64
            shared += sum(_plan(files, i).num_patches for i in row) > used
            windows = rows.patch_windows_bp[r, :used]
            assert np.array_equal(np.unique(windows), np.arange(1, len(_row_keys(files, row)) + 1))
            for segment, sample_id in enumerate(row, start=1):
                index = rows.vision_index_bt[r, rows.segment_ids_bt[r] == segment]
                patches = (index[index >= 0][:, None] * 4 + np.arange(4)).reshape(-1)
                planned = _plan(files, sample_id)
                images = [samples_lib.image_lib.image_patches(i.ref, image=ImageConfig())[0] for i in planned.images]
                np.testing.assert_array_equal(rows.patches_bpc[r, patches], np.concatenate(images))
                grids = [samples_lib.image_lib.block_positions([i.grid]) for i in planned.images]
                np.testing.assert_array_equal(rows.patch_positions_bp3[r, patches], np.concatenate(grids))
    assert shared


@pytest.mark.parametrize("epochs", [0, 2])
def test_hosts_share_the_rows_of_the_same_batches(files, epochs):
    """Best-fit batches do not depend on the number of hosts."""
    take = lambda **kwargs: list(itertools.islice(_loader(files, rows=4, epochs=epochs, **kwargs), 8))
    single = take()
    first, second = (take(process_index=i, process_count=2) for i in range(2))
    for whole, one, two in zip(single, first, second, strict=True):
        assert whole.sample_ids == one.sample_ids + two.sample_ids
        both = np.concatenate([one.batch.rows.patches_bpc, two.batch.rows.patches_bpc])
        np.testing.assert_array_equal(whole.batch.rows.patches_bpc, both)


def test_worker_processes(files):
    """Two workers: every record once per epoch, an exact resume, and no other worker count."""
    iterator = iter(_loader(files, workers=2))
    batches, states = [], []
    for batch in iterator:
        batches.append(flat(batch))
        states.append(iterator.get_state())
    assert collections.Counter(i for b in batches for row in b["ids"] for i in row) == _expected(2)
    for offset in (0, 2):
        fresh = iter(_loader(files, workers=2))
        fresh.set_state(json.loads(json.dumps(states[offset])))
        assert [flat(batch) for batch in fresh] == batches[offset + 1 :]
    with pytest.raises(LoaderError, match="workers 2, this loader has 1"):
        iter(_loader(files, workers=1)).set_state(states[1])


def test_a_state_of_other_settings_is_refused(files):
    state = iter(_loader(files)).get_state()
    for changes, name in (
        ({"seed": 4}, "seed"),
        ({"window": 7}, "window"),
        ({"packer": "first_fit"}, "packer"),
        ({"mixture": _mixture(files, 2.5)}, "records"),
        ({"records": (files["ground"],)}, "records"),
    ):
        with pytest.raises(LoaderError, match=f"has {name} "):
            iter(_loader(files, **changes)).set_state(state)


def test_bad_mixtures_are_named(files, tmp_path):
    (tmp_path / "empty.jsonl").touch()
    empty = SourceConfig("void", (str(tmp_path / "empty.jsonl"),))
    with pytest.raises(LoaderError, match=r"DataConfig\.mixture\[void\]: holds no records"):
        _loader(files, mixture=(*_mixture(files), empty))
    with pytest.raises(LoaderError, match=r"8 workers for 7 records in DataConfig\.mixture\[agent\]"):
        _loader(files, workers=8)
    one = SourceConfig("a", ("a.jsonl",))
    for make, reason in (
        (lambda: SourceConfig("", ("a",)), r"SourceConfig\.name"),
        (lambda: SourceConfig("a/b", ("a",)), r"SourceConfig\.name"),
        (lambda: SourceConfig("a", ()), r"SourceConfig\.records: source 'a' has no files"),
        (lambda: SourceConfig("a", ("a",), 0.0), r"SourceConfig\.weight: must be positive"),
        (lambda: SourceConfig("a", ("a",), float("nan")), r"SourceConfig\.weight"),
        (lambda: DataConfig(mixture=(one, one)), r"DataConfig\.mixture: two sources are named 'a'"),
        (lambda: DataConfig(mixture=(one,), records=("b",)), r"DataConfig\.mixture: records are given too"),
        (lambda: DataConfig(packer="next_fit"), r"DataConfig\.packer: 'next_fit' not in"),
        (lambda: DataConfig(window=0), r"DataConfig\.window"),
        (lambda: from_dict(DataConfig, {"mixture": [{"name": "a", "file": 1}]}), r"mixture\[0\]\.file: is not a field"),
    ):
        with pytest.raises(ConfigError, match=reason):
            make()
    config = DataConfig(mixture=(one, SourceConfig("b", ("b",), 2.0)))
    assert from_dict(DataConfig, json.loads(json.dumps(to_dict(config)))) == config
