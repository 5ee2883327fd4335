"""Two fake CPU devices (or $PFL_JAX_TEST_DEVICES), and one set of JAX settings, for every test: a plugin of pytest that
pyproject.toml loads, since tests stand in tests/, lab/tests/ and the docstrings of pfl_jax/."""

import gc
import os
from importlib import metadata

# Both must be set before jax is imported anywhere.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        f"--xla_force_host_platform_device_count={os.environ.get('PFL_JAX_TEST_DEVICES', '2')}",
        # Half the time to compile, and half the memory maps, for programs that run for milliseconds. Later versions
        # of XLA don't know the first flag, and end the process for it.
        "--xla_cpu_use_fusion_emitters=false" if metadata.version("jaxlib").startswith("0.10.") else "",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# XLA logs an error for every program that it loads from a compilation cache on a CPU, although nothing is wrong.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Batched LAPACK runs hundreds of times slower when OpenBLAS starts its own threads inside XLA's.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import contextlib
import functools
import inspect
import resource
import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pfl_jax import tasks

# Many tests compile the same program anew; each of pytest-xdist's workers keeps what it has compiled.
_programs = Path(tempfile.gettempdir()) / f"pfl_jax_tests_{os.environ.setdefault('PFL_JAX_TESTS', str(os.getpid()))}"
jax.config.update("jax_compilation_cache_dir", str(_programs / os.environ.get("PYTEST_XDIST_WORKER", "main")))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
# The programs here are tiny: compiling them is most of the time, and optimizing them gains nothing.
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_traceback_in_locations_limit", 0)
# Tracing makes many small objects, few of them in cycles: a tenth of the time went into looking for those.
gc.set_threshold(100_000, 20, 100)
# Parsing a command line reads docstrings in the source of the same classes; finding them was half of its time.
inspect.getsourcelines = functools.cache(inspect.getsourcelines)


QUICK = (
    *("test_docs", "test_errors", "test_golden", "test_lengths"),
    *("test_mutants", "test_streams"),
    *("data/test_arrays", "engine/test_communication"),
    *("methods/test_data_use", "methods/test_equations"),
    *("primitives/test_batches", "primitives/test_feature_statistics"),
    *("primitives/test_local_training", "primitives/test_losses_aggregation_scores"),
    "primitives/test_robust_means",
)
"""Files whose tests `pytest -m quick` runs, less the slow ones: they depend on most of the code, and compile little."""

TESTS = Path(__file__).parents[1]
QUICK_FILES = {TESTS / f"{name}.py" for name in QUICK}


def pytest_ignore_collect(collection_path, config):
    """Reads no other file for `-m quick`: importing all of them takes as long as the tests."""
    is_file = collection_path.suffix == ".py" and collection_path not in QUICK_FILES
    return True if is_file and config.option.markexpr == "quick" else None


WITHOUT_F1_AUC = {TESTS / name for name in ("engine", "methods", "wrappers")}
"""Folders of which no test compares macro-F1 or AUC."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks the tests of the files in QUICK, and those without macro-F1 and AUC."""
    for item in items:
        if item.path.parent in WITHOUT_F1_AUC:
            item.getparent(pytest.Module).add_marker("without_f1_auc")
        if item.path in QUICK_FILES and not any(map(item.get_closest_marker, ("slow", "lab", "real_data"))):
            item.add_marker(pytest.mark.quick)


MAPS = 20_000
"""Memory maps of a process from which on its compiled programs are dropped; Linux allows it 65,530."""


@pytest.fixture(autouse=True, scope="module")
def _drop_programs():
    """Lets go of compiled programs once they hold many memory maps: dropping them always would also drop JAX's own."""
    yield
    maps = Path("/proc/self/maps")
    if not maps.exists() or maps.read_bytes().count(b"\n") > MAPS:
        jax.clear_caches()


@pytest.fixture(autouse=True, scope="module")
def _precision():
    """Puts back the precision of products, which commands that run within the tests set for their process."""
    before = jax.config.jax_default_matmul_precision
    yield
    jax.config.update("jax_default_matmul_precision", before)


def _zero(*_):
    return jnp.float32(0)


def _without_f1_auc(scope):
    """Fixture with constants in place of macro-F1 and AUC for what is marked `without_f1_auc`."""

    @pytest.fixture(autouse=True, scope=scope)
    def patched(request):
        with pytest.MonkeyPatch.context() as patch:
            if request.node.get_closest_marker("without_f1_auc"):
                for name in ("macro_f1", "macro_auc"):
                    patch.setattr(tasks, name, _zero)
            yield

    return patched


_in_marked_tests = _without_f1_auc("function")
# Also for a file's own fixtures.
_in_marked_files = _without_f1_auc("module")


@pytest.fixture
def full_disk():
    """A context in which files take no more than so many bytes, as on a full disk: full_disk(100)."""

    @contextlib.contextmanager
    def limited(size):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited


def pytest_unconfigure(config):
    """Removes the session's compiled programs, once all workers are done."""
    if not hasattr(config, "workerinput"):
        shutil.rmtree(_programs, ignore_errors=True)
