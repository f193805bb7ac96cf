"""The commands as users run them, from another folder."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from convert import bench_convert, hf_to_orbax, make_random_hf, orbax_to_hf
from mage_jax.weights.errors import HfConfigError, SafetensorsError, WeightsError
from mage_jax.weights.hf_import import import_hf
from mage_jax.weights.load import read_config
from mage_jax.weights.model_dir import resolve, start_run_folder
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


def test_an_output_inside_a_copied_folder_is_refused(tmp_path):
    """It would copy itself; nothing is written. Other places inside a model folder are allowed."""
    hf, model = helpers.copy_case(helpers.SINGLE, tmp_path / "hf"), tmp_path / "model"
    import_hf(hf, model)
    before = helpers.tree_bytes(tmp_path)
    (tmp_path / "alias").symlink_to(hf)
    config = read_config(hf)
    for use in (
        lambda: hf_to_orbax.main(["--hf", str(hf), "--out", str(hf / "new" / "orbax"), "--quiet"]),
        lambda: hf_to_orbax.main(["--hf", str(hf), "--out", str(tmp_path / "alias" / "orbax"), "--quiet"]),
        lambda: orbax_to_hf.main(["--ckpt", str(model), "--out", str(model / "assets" / "hf"), "--quiet"]),
        lambda: start_run_folder(hf / "run", config=config, assets=hf),
    ):
        with pytest.raises(WeightsError, match=r"lies inside .*choose an output folder outside") as caught:
            use()
        assert "\n" not in str(caught.value)
    (tmp_path / "alias").unlink()
    (hf / "link").symlink_to(tmp_path / "runs")
    (tmp_path / "runs").mkdir()
    with pytest.raises(WeightsError, match=r"hf/link links to .*runs"):
        import_hf(hf, tmp_path / "runs" / "orbax")
    (hf / "link").unlink()
    assert helpers.tree_bytes(tmp_path) == before and not (hf / "new").exists() and not (hf / "run").exists()
    orbax_to_hf.main(["--ckpt", str(model), "--out", str(model / "hf"), "--quiet"])
    hf_to_orbax.main(["--hf", str(model / "hf"), "--out", str(model / "reimported"), "--quiet"])
    assert helpers.tree_bytes(hf) == helpers.tree_bytes(model / "hf")


@pytest.mark.parametrize("value", ["inf", "nan", "0", "-1", "big"])
def test_the_shard_limit_is_a_positive_number(value, capsys):
    for command in (orbax_to_hf, make_random_hf):
        with pytest.raises(SystemExit) as stop:
            command.main(["--out=o", f"--max_shard_gb={value}", *(["--ckpt=c"] if command is orbax_to_hf else [])])
        error = capsys.readouterr().err
        assert stop.value.code == 2 and "--max_shard_gb" in error and value in error


def test_the_wrong_paths_are_named(tmp_path, capsys):
    hf, (file, folder) = helpers.copy_case(helpers.SINGLE, tmp_path / "hf"), (tmp_path / "file", tmp_path / "folder")
    file.touch()
    for path, words in ((tmp_path / "absent", "absent does not exist"), (file, "file is not a folder")):
        with pytest.raises(HfConfigError, match=words):
            import_hf(path, tmp_path / "out")
    import_hf(hf, tmp_path / "run")
    (tmp_path / "run" / "checkpoints").mkdir()
    with pytest.raises(WeightsError, match=r"give the run folder .*run or one of its steps"):
        resolve(tmp_path / "run" / "checkpoints")
    (hf / "model.safetensors").rename(folder)
    (hf / "model.safetensors").mkdir()
    for read in (read_config, lambda path: import_hf(path, tmp_path / "out")):
        with pytest.raises(SafetensorsError, match=r"model\.safetensors: is a folder"):
            read(hf)
    with pytest.raises(OSError, match=r"cannot be created, a part of the path is a file.*file/out") as caught:
        import_hf(helpers.GOLDEN / helpers.SINGLE, file / "out")
    assert "tmp-" not in str(caught.value)
    with pytest.raises(SystemExit) as stop:
        bench_convert.main(["--dir", str(tmp_path / "absent")])
    assert stop.value.code == 2 and "does not exist; create it" in capsys.readouterr().err


def test_an_output_that_cannot_be_made_is_named_as_given(tmp_path, monkeypatch):
    def refuse(self, *args, **kwargs):
        if ".tmp-" in self.name:
            raise PermissionError(13, "Permission denied", str(self))
        return real(self, *args, **kwargs)

    real = Path.mkdir
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(PermissionError, match=f"cannot be created.*{tmp_path / 'out'}") as caught:
        import_hf(helpers.GOLDEN / helpers.SINGLE, tmp_path / "out")
    assert "tmp-" not in str(caught.value).replace(str(tmp_path), "")


@pytest.mark.parametrize("section", ["text_config", "vision_config"])
def test_senseless_layer_fields_are_refused(section, tmp_path):
    hf = helpers.copy_case(helpers.SINGLE, tmp_path / "hf")
    helpers.edit_json(hf / "config.json", text_config__layer_types=[{}, []])
    with pytest.raises(HfConfigError, match=r"config\.json: text_config\.layer_types"):
        read_config(hf)
    helpers.edit_json(hf / "config.json", remove="text_config.layer_types")
    helpers.edit_json(hf / "config.json", **{f"{section}__num_hidden_layers": 10**9})
    with pytest.raises(HfConfigError, match=rf"config\.json: {section}\.num_hidden_layers is 1000000000, .* hold \d "):
        read_config(hf)


SHARDED_LOAD = """
import sys
import jax, jax.numpy as jnp
from mage_jax.config import MeshConfig
from mage_jax.params import flatten
from mage_jax.sharding import make_mesh, param_shardings
from mage_jax.weights.hf_export import export_params
from convert import bench_convert, hf_to_orbax, make_random_hf, orbax_to_hf
from mage_jax.weights.errors import HfConfigError, SafetensorsError, WeightsError
from mage_jax.weights.hf_import import import_hf
from mage_jax.weights.load import read_config
from mage_jax.weights.model_dir import resolve, start_run_folder
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
