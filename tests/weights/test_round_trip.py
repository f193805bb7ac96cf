"""Hugging Face -> orbax -> Hugging Face, byte for byte, and what the reference libraries make of the results."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from orbax.checkpoint import v1 as ocp

from mage_jax.config import MeshConfig
from mage_jax.params import abstract_params, flatten, unflatten
from mage_jax.sharding import make_mesh, param_shardings
from mage_jax.weights import load
from mage_jax.weights.errors import MismatchError, WeightsError
from mage_jax.weights.hf_config import from_hf_config, to_hf_config
from mage_jax.weights.hf_export import export_hf, export_params
from mage_jax.weights.hf_import import import_hf, open_hf
from mage_jax.weights.load import load_model, read_config
from mage_jax.weights.model_dir import complete_steps, resolve, start_run_folder
from mage_jax.weights.names import RULES, slots
from tests.weights import helpers


def _half(folder):
    helpers.rewrite(folder, lambda tensors: {k: v.astype(np.float16) for k, v in tensors.items()})


def _tied(folder):
    helpers.rewrite(folder, lambda tensors: {k: v for k, v in tensors.items() if k != "lm_head.weight"})
    helpers.edit_json(folder / "config.json", tie_word_embeddings=True)


def _tied_flag_with_head(folder):
    helpers.edit_json(folder / "config.json", tie_word_embeddings=True)


def _mage_vl(folder):
    (folder / "config.mage_vl.json").replace(folder / "config.json")


def _assets(folder):
    (folder / "extra" / "empty").mkdir(parents=True)
    (folder / "extra" / "chat_template.jinja").write_text("{{ messages }}")
    gate = {"gate": np.ones((2, 3), np.float32)}
    safetensors.numpy.save_file(gate, folder / "streammind_gate.safetensors")


CASES = {
    "single": (helpers.SINGLE, lambda _: None),
    "sharded": (helpers.SHARDED, lambda _: None),
    "float16": (helpers.SINGLE, _half),
    "tied": (helpers.SINGLE, _tied),
    "tied_flag_with_head": (helpers.SINGLE, _tied_flag_with_head),
    "mage_vl": (helpers.SHARDED, _mage_vl),
    "assets": (helpers.SHARDED, _assets),
}


@pytest.mark.parametrize("case", CASES)
def test_round_trip_is_byte_equal(case, tmp_path):
    golden, change = CASES[case]
    hf = helpers.copy_case(golden, tmp_path / "hf")
    change(hf)
    import_hf(hf, tmp_path / "model")
    export_hf(tmp_path / "model", tmp_path / "back")
    assert helpers.tree_bytes(hf) == helpers.tree_bytes(tmp_path / "back")
    from_hf, from_orbax = load_model(hf), load_model(tmp_path / "model")
    helpers.assert_same_params(from_hf.params, from_orbax.params)
    assert from_hf.config == from_orbax.config == read_config(hf)
    assert from_hf.source == from_orbax.source
    assert from_hf.config.tied_embeddings == (case == "tied")
    assert not list(tmp_path.glob(".*")), "temporary folders were left"


def test_values_land_where_the_table_says(tmp_path):
    hf = helpers.copy_case(helpers.SINGLE, tmp_path / "hf")
    tensors = safetensors.numpy.load_file(hf / "model.safetensors")
    params, config = load_model(hf).params, read_config(hf)
    q = tensors["model.language_model.layers.1.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(params["text"]["layers"]["attn"]["q_nhd"][1].reshape(q.shape), q)
    qkv = tensors["model.visual.encoder.layers.2.self_attn.qkv.weight"]
    width = config.vision.hidden_size
    np.testing.assert_array_equal(
        params["vision"]["layers"]["attn"]["qkv_cnhd"][2, 1].reshape(width, width), qkv[width : 2 * width]
    )
    flat = flatten(params)
    for slot in slots(config):
        value = flat[slot.path] if slot.layer is None else flat[slot.path][slot.layer]
        np.testing.assert_array_equal(np.asarray(value).reshape(slot.hf_shape), tensors[slot.name])


def test_table_names_every_tensor_once():
    config = read_config(helpers.GOLDEN / helpers.SINGLE)
    names = [slot.name for slot in slots(config)]
    assert sorted(names) == sorted(set(names)) == sorted(open_hf(helpers.GOLDEN / helpers.SINGLE).files.tensors)
    assert len({pattern for pattern, _, _ in RULES}) == len(RULES)


def test_orbax_loads_a_converted_folder_like_a_training_checkpoint(tmp_path):
    import_hf(helpers.GOLDEN / helpers.SHARDED, tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    mesh = make_mesh(MeshConfig(fsdp=1))
    shardings = param_shardings(loaded.config, mesh)
    abstract = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, jnp.float32, sharding=s), abstract_params(loaded.config), shardings
    )
    restored = ocp.load_checkpointables(tmp_path / "model", {"params": abstract})["params"]
    helpers.assert_same_params(restored, jax.tree.map(lambda x: x.astype(jnp.float32), loaded.params))
    metadata = ocp.checkpointables_metadata(tmp_path / "model").metadata["params"]
    assert metadata["text"]["embed_vd"].shape == loaded.params["text"]["embed_vd"].shape


@pytest.mark.parametrize("ocdbt", [True, False])
def test_training_checkpoint_exports_in_the_source_layout(ocdbt, tmp_path):
    hf = helpers.copy_case(helpers.SHARDED, tmp_path / "hf")
    loaded = load_model(hf, dtype=jnp.float32)
    run = tmp_path / "run"
    start_run_folder(run, config=loaded.config, source=loaded.source, assets=loaded.assets)
    with pytest.raises(WeightsError, match="neither complete"):
        resolve(run)
    context = ocp.Context()
    context.array.saving.use_ocdbt = ocdbt
    with context, ocp.training.Checkpointer(run / "checkpoints") as checkpointer:
        checkpointer.save_checkpointables(3, {"params": loaded.params, "step": {"n": jnp.int32(3)}}, force=True)
        changed = jax.tree.map(lambda x: x + 1, loaded.params)
        checkpointer.save_checkpointables(12, {"params": changed, "step": {"n": jnp.int32(12)}}, force=True)
    assert complete_steps(run) == [3, 12]
    assert resolve(run).step == 12 and resolve(run / "checkpoints" / "3").step == 3
    helpers.assert_same_params(load_model(run).params, changed)
    export_hf(run / "checkpoints" / "3", tmp_path / "back")
    assert helpers.tree_bytes(hf) == helpers.tree_bytes(tmp_path / "back")
    export_params(loaded.params, tmp_path / "live", config=loaded.config, source=loaded.source, assets=run / "assets")
    assert helpers.tree_bytes(hf) == helpers.tree_bytes(tmp_path / "live")


def test_resharding_keeps_every_tensor(tmp_path):
    import_hf(helpers.GOLDEN / helpers.SINGLE, tmp_path / "model")
    export_hf(tmp_path / "model", tmp_path / "back", max_shard_gb=0.0005)
    names = sorted(p.name for p in (tmp_path / "back").glob("*.safetensors"))
    count = len(names)
    assert count > 2 and names == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    index = json.loads((tmp_path / "back" / helpers.INDEX).read_text())
    original = safetensors.numpy.load_file(helpers.GOLDEN / helpers.SINGLE / "model.safetensors")
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in original.values())
    assert set(index["weight_map"]) == set(original)
    for name, file in index["weight_map"].items():
        with safetensors.safe_open(tmp_path / "back" / file, framework="numpy") as shard:
            assert shard.metadata() == {"format": "pt"}
            np.testing.assert_array_equal(shard.get_tensor(name), original[name])
    helpers.assert_same_params(load_model(tmp_path / "back").params, load_model(helpers.GOLDEN / helpers.SINGLE).params)


def test_export_casts_and_says_so_in_the_config(tmp_path):
    import_hf(helpers.GOLDEN / helpers.SINGLE, tmp_path / "model")
    export_hf(tmp_path / "model", tmp_path / "back", dtype="bfloat16")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["dtype"] == config["text_config"]["dtype"] == "bfloat16"
    original = load_model(helpers.GOLDEN / helpers.SINGLE)
    helpers.assert_same_params(
        load_model(tmp_path / "back").params, jax.tree.map(lambda x: x.astype(jnp.bfloat16), original.params)
    )


@pytest.mark.parametrize("tied", [True, False])
def test_born_here_exports_a_complete_folder(tied, tmp_path):
    config = dataclasses.replace(read_config(helpers.GOLDEN / helpers.SINGLE), tied_embeddings=tied)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda a: rng.normal(size=a.shape).astype(np.float32), abstract_params(config))
    export_params(params, tmp_path / "hf", config=config)
    loaded = load_model(tmp_path / "hf")
    assert loaded.config == config
    helpers.assert_same_params(loaded.params, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))


def test_config_survives_both_directions():
    for case in (helpers.SINGLE, helpers.SHARDED):
        config = read_config(helpers.GOLDEN / case)
        for family in ("llava_onevision2", "mage_vl"):
            assert from_hf_config(to_hf_config(config, model_type=family), has_lm_head=True) == config


def test_sharded_load_equals_whole_load(tmp_path):
    """Every device count and mesh split gives the same values; runs on the devices there are."""
    import_hf(helpers.GOLDEN / helpers.SHARDED, tmp_path / "model")
    config = read_config(tmp_path / "model")
    mesh = make_mesh(MeshConfig(data=1, fsdp=-1))
    shardings = param_shardings(config, mesh)
    for path in (helpers.GOLDEN / helpers.SHARDED, tmp_path / "model"):
        whole = load_model(path, dtype=jnp.float32).params
        split = load_model(path, dtype=jnp.float32, shardings=shardings).params
        helpers.assert_same_params(whole, split)
        for name, sharding in flatten(shardings).items():
            array = flatten(split)[name]
            assert array.sharding.is_equivalent_to(sharding, array.ndim), name


def test_casting_on_load_rounds_the_same_from_both(tmp_path):
    import_hf(helpers.GOLDEN / helpers.SINGLE, tmp_path / "model")
    from_hf = load_model(helpers.GOLDEN / helpers.SINGLE, dtype=jnp.bfloat16).params
    helpers.assert_same_params(from_hf, load_model(tmp_path / "model", dtype=jnp.bfloat16).params)


def test_arrays_larger_than_the_read_limit_still_load(tmp_path, monkeypatch):
    import_hf(helpers.GOLDEN / helpers.SHARDED, tmp_path / "model")
    monkeypatch.setattr(load, "_READ_BYTES", 1)
    restored = load_model(tmp_path / "model", dtype=jnp.float32).params
    helpers.assert_same_params(restored, load_model(helpers.GOLDEN / helpers.SHARDED, dtype=jnp.float32).params)


def test_live_export_rejects_another_tree(tmp_path):
    loaded = load_model(helpers.GOLDEN / helpers.SINGLE)
    flat = flatten(loaded.params)
    del flat["text.final_norm_d"]
    with pytest.raises(MismatchError, match=r"text\.final_norm_d"):
        export_params(unflatten(flat), tmp_path / "out", config=loaded.config)
    assert not (tmp_path / "out").exists()
