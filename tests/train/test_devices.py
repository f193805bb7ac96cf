"""One and four simulated devices, in a process of its own: same gradients, same metrics, any mesh."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

PROGRAM = """
import dataclasses, json
import jax, numpy as np
from mage_jax.config import MeshConfig, OptimizerConfig
from mage_jax.params import flatten
from mage_jax.sharding import make_mesh
from mage_jax.train.loop import device_batch
from mage_jax.train.optimizer import make_optimizer
from mage_jax.train.state import bytes_per_device, state_from_params
from mage_jax.train.step import make_train_step, summarize
from tests.train.helpers import packed_batch, random_params, tiny_train_config

assert len(jax.devices()) == 4
report = {}
reference = None
for name, data, fsdp, micro in (("1", 1, 1, 1), ("data4", 4, 1, 1), ("fsdp4", 1, 4, 1), ("2x2", 2, 2, 2)):
    config = tiny_train_config(micro_batches=micro, optimizer=OptimizerConfig(clip_norm=0, warmup_steps=1, beta1=0.5))
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, rows=8))
    mesh = make_mesh(MeshConfig(data=data, fsdp=fsdp), jax.devices()[: data * fsdp])
    optimizer = make_optimizer(config.optimizer, model=config.model, total_steps=config.steps)
    with jax.set_mesh(mesh):
        state = state_from_params(config, optimizer, mesh, random_params(config.model))
        batch = device_batch(packed_batch(rows=8), mesh)
        step = make_train_step(config, optimizer=optimizer, mesh=mesh)
        state, metrics = step(state, batch)
        # Without clipping, the first moment after one step is the gradient times (1 - beta1).
        moments = flatten(state.opt_state[0].mu)
        grads = {path: 2 * np.asarray(m, np.float64) for path, m in moments.items()}
        size = bytes_per_device(moments)
        step(state, batch)
    reference = reference or grads
    report[name] = {
        "worst": float(max(np.linalg.norm(g - reference[p]) / np.linalg.norm(reference[p]) for p, g in grads.items())),
        "least": float(min(np.linalg.norm(g) for g in grads.values())),
        "metrics": summarize(jax.device_get(metrics)),
        "moment": str(moments["text.embed_vd"].sharding.spec),
        "bytes": size,
        "compiled": step._cache_size(),
    }
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def report(compilation_cache):
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": str(compilation_cache),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("mesh", ["data4", "fsdp4", "2x2"])
def test_devices_change_neither_gradients_nor_metrics(report, mesh):
    assert report[mesh]["worst"] <= 1e-5 and report[mesh]["least"] > 0
    for name, value in report["1"]["metrics"].items():
        assert report[mesh]["metrics"][name] == pytest.approx(value, rel=1e-5, abs=1e-7), name


def test_state_is_sharded_like_the_parameters_and_stays_so(report):
    assert {result["compiled"] for result in report.values()} == {1}, "the second step saw other shardings"
    assert "fsdp" in report["fsdp4"]["moment"]
    assert report["data4"]["bytes"] == report["1"]["bytes"]
    assert report["fsdp4"]["bytes"] < 0.3 * report["1"]["bytes"]
