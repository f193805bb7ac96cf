"""Compilation dominates these tests: each function is compiled once a session, with the cheap code generator."""

import functools

import jax
import pytest

from mage_jax.train import state, step

QUICK = {"xla_backend_optimization_level": 0}


class _QuickJax:
    """The jax module, but its ``jit`` compiles fast. Results differ from the default's in rounding only."""

    jit = staticmethod(functools.partial(jax.jit, compiler_options=QUICK))

    def __getattr__(self, name):
        return getattr(jax, name)


@pytest.fixture(scope="package", autouse=True)
def quick_compilation():
    with pytest.MonkeyPatch.context() as patch:
        for module in (state, step):
            patch.setattr(module, "jax", _QuickJax())
        yield


@pytest.fixture(scope="package", autouse=True)
def compilation_cache(tmp_path_factory):
    """Folder of compiled functions, which processes started by tests may share."""
    folder = tmp_path_factory.mktemp("compilation-cache")
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    yield folder
    for name, value in before.items():
        jax.config.update(name, value)
