import dataclasses

import jax
import numpy as np
import pytest

from configs.models import mage_vl_4b
from mage_jax.config import ConfigError, MeshConfig, ModelConfig, TrainConfig, from_dict, to_dict
from mage_jax.params import abstract_params, count_params, declare, flatten, init_params, unflatten
from mage_jax.sharding import make_mesh, param_shardings
from tests.helpers import tiny_config


def test_released_geometry_counts_as_the_released_checkpoint():
    assert count_params(mage_vl_4b()) == 4_741_793_792
    tied = dataclasses.replace(mage_vl_4b(), tied_embeddings=True)
    assert count_params(mage_vl_4b()) - count_params(tied) == 388_956_160


def test_trees_derive_from_one_declaration():
    config = tiny_config()
    params = init_params(config, jax.random.key(0))
    abstract = abstract_params(config)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(lambda x: (x.shape, x.dtype), abstract)
    mesh = make_mesh(MeshConfig())
    assert jax.tree.structure(param_shardings(config, mesh)) == jax.tree.structure(params)
    assert flatten(unflatten(flatten(params))).keys() == flatten(params).keys()


def test_init_of_a_weight_depends_on_its_own_path_only():
    key = jax.random.key(3)
    small = init_params(dataclasses.replace(tiny_config(), tied_embeddings=True), key)
    large = init_params(tiny_config(), key)
    np.testing.assert_array_equal(small["text"]["layers"]["attn"]["q_nhd"], large["text"]["layers"]["attn"]["q_nhd"])
    assert not np.array_equal(large["lm_head_vd"], large["text"]["embed_vd"])


def test_norms_and_biases_carry_no_weight_decay():
    for path, spec in flatten(declare(tiny_config())).items():
        assert spec.decay == ("norm" not in path and "bias" not in path), path


def test_config_round_trips_and_names_what_is_wrong():
    config = TrainConfig(name="run", model=tiny_config(), steps=3)
    assert from_dict(TrainConfig, to_dict(config)) == config
    values = to_dict(config)
    values["model"]["text"]["num_headz"] = 4
    with pytest.raises(ConfigError, match=r"config\.model\.text\.num_headz"):
        from_dict(TrainConfig, values)
    values = to_dict(config)
    values["optimizer"]["learning_rate"] = "fast"
    with pytest.raises(ConfigError, match=r"config\.optimizer\.learning_rate: must be float"):
        from_dict(TrainConfig, values)
    values = to_dict(config)
    del values["model"]["vision"]["rope_theta"]
    with pytest.raises(ConfigError, match=r"config\.model\.vision\.rope_theta: is missing"):
        from_dict(TrainConfig, values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_token_id": 96}, "image_token_id"),
        ({"eos_token_ids": ()}, "eos_token_ids"),
    ],
)
def test_model_config_rejects_ids_outside_the_vocabulary(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(tiny_config(), **change)


def test_mesh_sizes_must_match_the_devices():
    with pytest.raises(ConfigError, match="devices"):
        make_mesh(MeshConfig(data=3, fsdp=5))
    assert isinstance(tiny_config(), ModelConfig)
