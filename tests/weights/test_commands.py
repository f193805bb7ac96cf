"""The commands as users run them, from another folder."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mage_jax.weights.hf_import import import_hf
from tests.weights import helpers

ROOT = Path(__file__).resolve().parents[2]
ENV = {**os.environ, "JAX_PLATFORMS": "cpu"}


def run(cwd, name, *args, env=None, check=True):
    command = [sys.executable, str(ROOT / "convert" / f"{name}.py"), *map(str, args)]
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env={**ENV, **(env or {})})
    assert not check or result.returncode == 0, result.stderr
    return result


def test_make_convert_inspect_and_back(tmp_path):
    run(tmp_path, "make_random_hf", "--out", "hf", "--size", "toy", "--seed", 3, "--max_shard_gb", 0.0005, "--quiet")
    run(tmp_path, "hf_to_orbax", "--hf", "hf", "--out", "model", "--quiet")
    run(tmp_path, "orbax_to_hf", "--ckpt", "model", "--out", "back", "--quiet")
    assert helpers.tree_bytes(tmp_path / "hf") == helpers.tree_bytes(tmp_path / "back")
    reports = [json.loads(run(tmp_path, "inspect_ckpt", name, "--json", "--stats").stdout) for name in ("hf", "model")]
    assert reports[0]["total"]["parameters"] == reports[1]["total"]["parameters"]
    assert reports[0]["towers"].keys() == {"vision", "merger", "text", "lm_head"}
    embed = next(t for t in reports[1]["tensors"] if t["name"] == "text.embed_vd")
    assert 0.01 < embed["rms"] < 0.02 and embed["min"] < 0 < embed["max"] and embed["nonfinite"] == 0
    text = run(tmp_path, "inspect_ckpt", "model").stdout
    assert "text.layers.attn.q_nhd" in text and "total" in text
    refused = run(tmp_path, "hf_to_orbax", "--hf", "hf", "--out", "model", check=False)
    assert refused.returncode == 1 and "already exists" in refused.stderr and "Traceback" not in refused.stderr
    run(
        tmp_path, "orbax_to_hf", "--ckpt", "model", "--out", "f32", "--dtype", "float32", "--max_shard_gb", 1, "--quiet"
    )
    assert (tmp_path / "f32" / "model.safetensors").exists()


def test_bench_prints_one_table(tmp_path):
    out = run(tmp_path, "bench_convert", "--size", "toy", "--dir", tmp_path).stdout
    for word in ("copy", "hf_to_orbax", "orbax_to_hf", "peak RSS", "bit equality", "verified"):
        assert word in out
    assert not list(tmp_path.iterdir())


SHARDED_LOAD = """
import sys
import jax, jax.numpy as jnp
from mage_jax.config import MeshConfig
from mage_jax.params import flatten
from mage_jax.sharding import make_mesh, param_shardings
from mage_jax.weights.hf_export import export_params
from mage_jax.weights.hf_import import import_hf
from mage_jax.weights.load import load_model, read_config
from tests.weights import helpers

hf, work = sys.argv[1:]
import_hf(hf, work + "/model")
config = read_config(hf)
assert jax.device_count() == 8
whole = load_model(hf, dtype=jnp.float32)
for data, fsdp in ((1, 8), (2, 4), (8, 1)):
    shardings = param_shardings(config, make_mesh(MeshConfig(data=data, fsdp=fsdp)))
    for path in (hf, work + "/model"):
        split = load_model(path, dtype=jnp.float32, shardings=shardings)
        helpers.assert_same_params(whole.params, split.params)
        for name, sharding in flatten(shardings).items():
            array = flatten(split.params)[name]
            assert array.sharding.is_equivalent_to(sharding, array.ndim), name
    export_params(split.params, f"{work}/out{fsdp}", config=config, source=whole.source, assets=whole.assets)
    assert helpers.tree_bytes(helpers.Path(hf)) == helpers.tree_bytes(helpers.Path(f"{work}/out{fsdp}"))
print("same")
"""


PROCESS = """
import sys
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
process, port, hf, work = int(sys.argv[1]), *sys.argv[2:]
jax.distributed.initialize(f"localhost:{port}", 2, process)
import jax.numpy as jnp
from mage_jax.config import MeshConfig
from mage_jax.sharding import make_mesh, param_shardings
from mage_jax.weights.hf_export import export_params
from mage_jax.weights.load import load_model, read_config
from tests.weights import helpers

config = read_config(hf)
shardings = param_shardings(config, make_mesh(MeshConfig(data=1, fsdp=4)))
for name in ("hf", "model"):
    loaded = load_model(f"{work}/{name}", dtype=jnp.float32, shardings=shardings)
    assert not loaded.params["text"]["embed_vd"].is_fully_addressable
    out = f"{work}/out_{name}"
    export_params(loaded.params, out, config=config, source=loaded.source, assets=loaded.assets)
    if process == 0:
        assert helpers.tree_bytes(helpers.Path(hf)) == helpers.tree_bytes(helpers.Path(out))
print("same")
"""


@pytest.mark.slow
def test_two_processes_load_and_export_together(tmp_path):
    hf = helpers.copy_case(helpers.SHARDED, tmp_path / "hf")
    import_hf(hf, tmp_path / "model")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    env = {**ENV, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(i), str(port), str(hf), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for i in range(2)
    ]
    try:
        for process in processes:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0 and "same" in out, err[-3000:]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.slow
def test_sharded_load_and_export_on_eight_devices(tmp_path):
    hf = helpers.copy_case(helpers.SHARDED, tmp_path / "hf")
    env = {**ENV, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", SHARDED_LOAD, str(hf), str(tmp_path)], capture_output=True, text=True, env=env
    )
    assert result.returncode == 0 and "same" in result.stdout, result.stderr[-3000:]
