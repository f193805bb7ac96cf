"""The loader: every record once per epoch, exact resume at every offset, fair hosts, clear errors."""

import collections
import dataclasses
import itertools
import json
import pathlib

import numpy as np
import pytest
from PIL import Image

from mage_jax.agent.tokenizer import Tokenizer
from mage_jax.config import DataConfig, ImageConfig
from mage_jax.data import samples as samples_lib
from mage_jax.data.loader import LoaderError, make_loader
from mage_jax.data.packing import PackingError, RowShape, build_batch
from mage_jax.data.parse import RecordError
from mage_jax.data.records import RecordSet
from tests.data.helpers import VISION, flat, sample_ids

TOY = Tokenizer.load("toy")
IMAGE_ID = TOY.special_ids.image_pad
RECORDS = 11
BASE = DataConfig(rows=2, tokens_per_row=128, patches_per_row=64, packing_bins=3, epochs=2)


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory):
    """11 records, ids r0 to r10: text only or with an image of 16, 24 or 32 patches, answers of growing length."""
    folder = tmp_path_factory.mktemp("records")
    rng = np.random.default_rng(0)
    for i in range(3):
        Image.fromarray(rng.integers(0, 256, (64, 64 + 32 * i, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    with open(folder / "set.jsonl", "w") as file:
        for i in range(RECORDS):
            content = [{"type": "text", "text": "What is this? " * (i % 4)}]
            if i % 4:
                content.insert(0, {"type": "image", "image": f"{i % 4 - 1}.png"})
            messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "yes " * i}]
            file.write(json.dumps({"id": f"r{i}", "messages": messages}) + "\n")
    return str(folder / "set.jsonl")


def _loader(jsonl, *, seed=3, process_index=0, process_count=1, eval=False, **changes):
    changes.setdefault("records", (jsonl,))
    return make_loader(
        dataclasses.replace(BASE, **changes),
        vision=VISION,
        tokenizer=TOY,
        image_token_id=IMAGE_ID,
        seed=seed,
        process_index=process_index,
        process_count=process_count,
        eval=eval,
    )


def _assert_equal(got, expected):
    assert [flat(b) for b in got] == [flat(b) for b in expected]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("max_samples", [0, 1])
def test_every_record_once_per_epoch(jsonl, shuffle, max_samples):
    batches = list(_loader(jsonl, shuffle=shuffle, max_samples_per_row=max_samples))
    assert collections.Counter(sample_ids(batches)) == {f"r{i}": 2 for i in range(RECORDS)}
    one_epoch = sample_ids(_loader(jsonl, shuffle=shuffle, max_samples_per_row=max_samples, epochs=1))
    assert sorted(one_epoch) == sorted(f"r{i}" for i in range(RECORDS))
    if max_samples:
        assert all(len(row) <= 1 for batch in batches for row in batch.sample_ids)


def test_rows_hold_what_the_ids_say(jsonl):
    records = {record.id: record for record in RecordSet(jsonl)}
    shape = RowShape(tokens=128, patches=64, patch_dim=768, merge_factor=4, image_token_id=IMAGE_ID)
    for got in _loader(jsonl):
        rows = [
            [samples_lib.make_sample(records[i], tokenizer=TOY, image=ImageConfig(), vision=VISION) for i in row]
            for row in got.sample_ids
        ]
        expected = build_batch(rows, shape=shape)
        for name, value in vars(expected.rows).items():
            np.testing.assert_array_equal(getattr(got.batch.rows, name), value)
        np.testing.assert_array_equal(got.batch.weights_bt, expected.weights_bt)
        np.testing.assert_array_equal(got.batch.targets_bt, expected.targets_bt)
        assert got.tokens_used == np.count_nonzero(expected.rows.segment_ids_bt)
        assert got.patches_used == np.count_nonzero(expected.rows.patch_windows_bp)


def test_shuffle_differs_by_epoch_and_seed_and_repeats_by_seed(jsonl):
    first, again, other = (sample_ids(_loader(jsonl, seed=seed, packing_bins=1)) for seed in (3, 3, 4))
    assert first == again != other
    assert first[:RECORDS] != first[RECORDS:]


@pytest.mark.parametrize("shuffle", [False, True])
def test_resume_at_every_offset(jsonl, shuffle):
    loader = _loader(jsonl, shuffle=shuffle)
    iterator = iter(loader)
    states, batches = [iterator.get_state()], []
    for batch in iterator:
        batches.append(batch)
        states.append(iterator.get_state())
    assert len(batches) >= 4
    for offset, state in enumerate(states):
        fresh = iter(_loader(jsonl, shuffle=shuffle))  # as after a restart of the process
        fresh.set_state(json.loads(json.dumps(state)))
        _assert_equal(list(fresh), batches[offset:])
    used = iter(loader)
    for _ in range(3):
        next(used)
    used.set_state(states[1])  # back in time, in an iterator that has run
    _assert_equal(list(used), batches[1:])


def test_resume_decodes_only_what_it_returns(jsonl, monkeypatch):
    """A restart replays the packing window (here the whole epoch) from headers."""
    loader = _loader(jsonl, packing_bins=16, rows=1, epochs=1)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state, expected = iterator.get_state(), next(iterator)
    decoded = []
    original = samples_lib.materialise
    monkeypatch.setattr(
        "mage_jax.data.loader.materialise",
        lambda planned, **kwargs: decoded.append(planned.sample_id) or original(planned, **kwargs),
    )
    fresh = iter(loader)
    fresh.set_state(state)
    _assert_equal([next(fresh)], [expected])
    assert decoded == expected.sample_ids[0]


def test_endless_hosts_share_the_records(jsonl):
    batches = [list(itertools.islice(_loader(jsonl, epochs=0, process_index=i, process_count=2), 12)) for i in range(2)]
    seen = [sample_ids(host) for host in batches]
    assert all(len(b.batch.weights_bt) == 1 for host in batches for b in host)
    assert all(b.sample_ids[0] for host in batches for b in host)
    assert not set(seen[0][:5]) & set(seen[1][:5])
    together = collections.Counter(seen[0][: RECORDS * 2]) + collections.Counter(seen[1][: RECORDS * 2])
    assert set(together) == {f"r{i}" for i in range(RECORDS)}


@pytest.mark.parametrize("eval", [False, True])
def test_finite_hosts_take_the_same_number_of_batches(jsonl, eval):
    """Together they are exactly the batches of a single host."""
    kwargs = {"eval": eval, "eval_records": (jsonl,), "rows": 4, "shuffle": not eval}
    single = list(_loader(jsonl, **kwargs))
    hosts = [list(_loader(jsonl, process_index=i, process_count=2, **kwargs)) for i in range(2)]
    assert len(hosts[0]) == len(hosts[1]) == len(single)
    for whole, first, second in zip(single, *hosts, strict=True):
        assert whole.sample_ids == first.sample_ids + second.sample_ids
        both = np.concatenate([first.batch.rows.patches_bpc, second.batch.rows.patches_bpc])
        np.testing.assert_array_equal(whole.batch.rows.patches_bpc, both)


def test_the_last_batch_is_padded_with_empty_rows(jsonl):
    batches = list(_loader(jsonl, rows=8, epochs=1, packing_bins=16))
    assert len(batches) == 1 and batches[0].sample_ids[-1] == []
    rows = batches[0].batch.rows
    assert not rows.segment_ids_bt[-1].any() and not batches[0].batch.weights_bt[-1].any()
    assert (rows.vision_index_bt[-1] == -1).all()


def test_eval_reads_its_own_records_once_in_order(jsonl, tmp_path):
    own = tmp_path / "eval.jsonl"
    lines = [
        {"id": f"e{i}", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
        for i in range(3)
    ]
    own.write_text("".join(json.dumps(line) + "\n" for line in lines))
    loader = _loader(jsonl, eval=True, eval_records=(str(own),), epochs=0, shuffle=True, workers=2)
    assert sample_ids(loader) == ["e0", "e1", "e2"]


def test_worker_processes(jsonl):
    """Two workers: every record still once per epoch, and an exact resume; another worker count is refused."""
    loader = _loader(jsonl, workers=2)
    iterator = iter(loader)
    batches, states = [], []
    for batch in iterator:
        batches.append(flat(batch))
        states.append(iterator.get_state())
    assert collections.Counter(i for b in batches for row in b["ids"] for i in row) == {
        f"r{i}": 2 for i in range(RECORDS)
    }
    fresh = iter(_loader(jsonl, workers=2))
    fresh.set_state(json.loads(json.dumps(states[1])))
    assert [flat(batch) for batch in fresh] == batches[2:]
    with pytest.raises(LoaderError, match="workers 2, this loader has 0"):
        iter(_loader(jsonl)).set_state(states[1])


def test_a_worker_passes_our_errors_on(tmp_path):
    path = tmp_path / "bad.jsonl"
    messages = [
        {"role": "user", "content": [{"type": "image", "image": "none.png"}]},
        {"role": "assistant", "content": ""},
    ]
    path.write_text(json.dumps({"messages": messages}) + "\n")
    for workers in (0, 1):
        with pytest.raises(RecordError, match=r"bad\.jsonl:1: images\[0\]: no file .*none\.png"):
            next(iter(_loader(str(path), workers=workers)))


def test_a_state_of_other_settings_is_refused(jsonl, tmp_path):
    state = iter(_loader(jsonl)).get_state()
    for changes, name in (
        ({"seed": 4}, "seed"),
        ({"shuffle": False}, "shuffle"),
        ({"rows": 1}, "rows"),
        ({"packing_bins": 4}, "packing_bins"),
        ({"image": ImageConfig(max_pixels=10_000)}, "max_pixels"),
    ):
        with pytest.raises(LoaderError, match=f"has {name} "):
            iter(_loader(jsonl, **changes)).set_state(state)
    copy = tmp_path / "copy.jsonl"
    copy.write_text(pathlib.Path(jsonl).read_text().replace("yes", "no"))
    with pytest.raises(LoaderError, match="has records "):
        iter(_loader(str(copy))).set_state(state)


def test_settings_that_contradict_each_other(jsonl, tmp_path):
    (tmp_path / "empty.jsonl").touch()
    for changes, reason in (
        ({"rows": 3, "process_count": 2}, r"DataConfig\.rows: 3 is not divisible by process_count 2"),
        ({"process_index": 2, "process_count": 2}, "process_index"),
        ({"records": (str(tmp_path / "empty.jsonl"),)}, r"DataConfig\.records: holds no records"),
        ({"eval": True}, r"DataConfig\.eval_records: holds no records"),
        ({"workers": 12}, "12 workers for 11 records"),
    ):
        with pytest.raises(LoaderError, match=reason):
            _loader(jsonl, **changes)
    with pytest.raises(LoaderError, match="image_token_id: the model has 7"):
        make_loader(BASE, vision=VISION, tokenizer=TOY, image_token_id=7, seed=0)


@pytest.mark.parametrize(
    ("changes", "what"), [({"tokens_per_row": 20}, "tokens"), ({"patches_per_row": 16}, "patches")]
)
def test_a_record_longer_than_a_row_is_named(jsonl, changes, what):
    with pytest.raises(PackingError, match=rf"sample 'r\d+ \(.*set\.jsonl:\d+\)' has \d+ {what}, a row holds"):
        list(_loader(jsonl, **changes))
