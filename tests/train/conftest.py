"""One compilation of each function for the whole session, and for the processes that tests start."""

import jax
import pytest


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compilation-cache")
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    yield folder
    for name, value in before.items():
        jax.config.update(name, value)
