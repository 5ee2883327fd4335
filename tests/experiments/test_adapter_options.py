"""--weights, --adapter, --targets and --personal: pretrained models on own tokens, from the run to the export."""

import functools

import jax
import numpy as np
import pytest
from rich.console import Console
from run_folders import log
from safetensors.numpy import save_file
from tiny_bert import write_bert

from experiments.cli.command import main, parse
from experiments.export import main as export
from experiments.run import build, models
from experiments.run.loaded_run import load_run
from experiments.run.records import check_identity, identity
from experiments.sweep import main as sweep
from pfl_jax import InvalidInput
from pfl_jax.networks.pretrained import read_weights

DATA = ["--data", "texts.npz", "--num-clients", "3", "--partition", "iid", "--no-compilation-cache"]
BERT = ["--model", "bert", "--weights", "model.npz", "--rounds", "2", "--epochs", "1"]
MODEL = [*BERT, "--adapter", "lora:2", "--targets", "layer_2"]
RUN, LAST = [*DATA, *BERT], [*DATA, *MODEL]


@pytest.fixture(scope="module", autouse=True)
def here(tmp_path_factory):
    """A folder with the weights of a tiny BERT, and tokens of two classes that differ in their words."""
    folder, rng = tmp_path_factory.mktemp("adapters"), np.random.default_rng(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PFL_JAX_CACHE", str(folder / "cache"))
        write_bert(folder)
        y = rng.integers(0, 2, 90)
        x = rng.integers(1, 15, (90, 5)) + 15 * y[:, None]
        np.savez("texts.npz", x=np.where(np.arange(5) < rng.integers(2, 6, 90)[:, None], x, 0).astype(np.int32), y=y)
        yield folder


def scores(folder):
    return [line["received"] for line in log(folder)]


def built(*words):
    return build.build_experiment(parse("custom", [*DATA, *words]), Console(quiet=True))


@functools.cache
def experiment(*words):
    return built(*MODEL, *words)


def test_states_below_the_lowest_adapter_are_computed_once_and_change_nothing(here, monkeypatch):
    first = experiment("--method", "fedper")
    (stored,) = (here / "cache/states").iterdir()
    stamp = stored.stat().st_mtime_ns
    again = built(*MODEL, "--method", "fedper")
    assert stored.stat().st_mtime_ns == stamp
    monkeypatch.setattr(models, "MOST_STATES", 0)
    whole = built(*MODEL, "--method", "fedper")
    assert [one.dataset.input_shape for one in (first, again, whole)] == [(5, 8), (5, 8), (5,)]
    # What the clients begin with classifies the states as it does the tokens, split by split.
    key = jax.random.key(0)
    wanted = [
        jax.jit(lambda *inputs, method=one.method: [method.predict(method.init_server(key), x) for x in inputs])(
            one.dataset.train_x, one.dataset.test_x
        )
        for one in (first, again, whole)
    ]
    for one in wanted[:2]:
        for split, tokens in zip(one, wanted[2], strict=True):
            np.testing.assert_allclose(split, tokens, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "layers"),
    [
        ("lora:2 --targets layer_2", 2),
        ("lora:2 --targets words|layer_2", 0),
        ("bottleneck:3 --targets layer_2", 2),
        ("prompts:2", 0),
        ("linear_probe", 3),
        ("none", 0),
    ],
)
def test_layers_that_no_training_changes(words, layers):
    assert models.frozen_layers(parse("custom", [*RUN, "--adapter", *words.split()])) == layers


def test_a_linear_probe_begins_with_the_states_of_all_layers():
    first = built(*BERT, "--adapter", "linear_probe", "--method", "fedavg")
    assert first.traffic.up == 4 * (8 + 1) * 2
    base = built(*BERT, "--method", "fedavg")
    backbone = base.method.init_server(jax.random.key(0)), first.method.init_server(jax.random.key(0))
    wanted, found = (
        one.method.work.model.features(server["backbone"], one.dataset.test_x)
        for one, server in zip((base, first), backbone, strict=True)
    )
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_the_frozen_parameters_have_the_type_of_the_option(monkeypatch):
    words = ("--method", "fedper", "--frozen-dtype", "bfloat16")
    frozen = experiment(*words).method.frozen
    assert {leaf.dtype.name for leaf in jax.tree.leaves(frozen.read())} == {"bfloat16"}
    # Those below the lowest adapter too: its states are those of rounded weights.
    tokens = np.load("texts.npz")["x"]
    states = models.bert_states("model.npz", tokens, 2, frozen_dtype="bfloat16")
    dataset = experiment(*words).dataset
    found = np.sort(np.concatenate([dataset.train_x, dataset.test_x]), axis=0)
    np.testing.assert_allclose(found, np.sort(states, axis=0), atol=1e-6)
    assert np.abs(states - models.bert_states("model.npz", tokens, 2)).max() > 1e-4


def test_the_first_matrices_of_ffa_stay_as_they_are_drawn_for_every_seed():
    def trained(*words):
        method = experiment(*words, "--method", "fedper").method
        params = jax.eval_shape(method.work.model.init, jax.random.key(0))
        return {
            jax.tree_util.keystr(path[-1:], simple=True) for path, _ in jax.tree.leaves_with_path(params["backbone"])
        }

    first = ("--adapter", "ffa_lora:2")
    assert trained() == {"lora_a", "lora_b"}
    assert trained(*first) == {"lora_b"}
    made = [experiment(*first, *words, "--method", "fedper") for words in ((), ("--seed", "1"))]
    jax.tree.map(np.testing.assert_array_equal, *(one.method.frozen.read()["adapters"] for one in made))


def test_personal_parts_stay_at_the_clients():
    # A of rank 2 beside four layers of 8 inputs, one of 8 and one of 12; all else is personal.
    fedsa = experiment("--method", "fedper", "--personal", "lora_b|^head")
    assert fedsa.traffic.up == 4 * 2 * (4 * 8 + 8 + 12)
    assert experiment("--method", "fedper").traffic.up == fedsa.traffic.up + 4 * 2 * (4 * 8 + 12 + 8)


@pytest.mark.slow
def test_a_run_with_adapters_is_resumed_exported_and_loaded(here):
    words = [*LAST, "--method", "fedper", "--held-out-clients", "1", "--compress", "quantize:8"]
    assert main("custom", [*words, "--out", "run"]) == 0
    assert main("custom", ["--resume", "run", "--rounds", "3"]) == 0
    assert len(scores(here / "run")) == 3
    assert export(["run", "--client", "1", "--to", "exported.safetensors"]) == 0
    names = set(read_weights("exported.safetensors"))
    assert any("lora_a" in name for name in names)
    assert not any("embeddings" in name for name in names)
    loaded = load_run("run")
    own = loaded.client_data(1)
    accuracy = 100 * np.mean(np.argmax(loaded.predict(1, own.x), axis=1) == own.y)
    assert accuracy == pytest.approx(log(here / "run")[-1]["received_per_client"][1], abs=1e-3)


@pytest.mark.slow
def test_a_sweep_with_adapters_is_its_runs(here):
    words = [*LAST, "--method", "fedper"]
    assert sweep(["--dataset", "custom", *words, "--seeds", "2", "--out", "both"]) == 0
    assert main("custom", [*words, "--seed", "1", "--out", "alone"]) == 0
    (together,) = here.glob("both/*/seed-1")
    for one, other in zip(scores(together), scores(here / "alone"), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-3)


def test_checkpoints_know_the_weights_that_are_used_by_default(here, tmp_path, monkeypatch):
    def stored_beside(factor):
        stored = {name: factor * array for name, array in np.load("model.npz").items()}
        save_file(stored, tmp_path / "model.safetensors")
        return built(*words, "--method", "fedper")

    words = [word for word in MODEL if word not in ("--weights", "model.npz")]
    (tmp_path / "config.json").write_bytes((here / "config.json").read_bytes())
    monkeypatch.setattr(models, "minilm_folder", lambda: tmp_path)
    before = identity(stored_beside(1))
    check_identity({"identity": before}, stored_beside(1), tmp_path, pytest.fail)
    with pytest.raises(InvalidInput, match="of another run: they were written with weights"):
        check_identity({"identity": before}, stored_beside(2), tmp_path, pytest.fail)


def test_prompts_and_bert_are_for_tokens():
    with pytest.raises(InvalidInput, match="prompts is for --model bert"):
        built("--adapter", "prompts:2", "--model", "text_mean")
    with pytest.raises(InvalidInput, match="vit needs --weights"):
        built("--model", "vit")
    request = parse("digits", ["--model", "bert", "--weights", "model.npz"])
    with pytest.raises(InvalidInput, match="is for tokens"):
        build.build_experiment(request, Console(quiet=True))


def test_a_folder_of_weights_is_its_model_file(tmp_path):
    folder = tmp_path / "minilm"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"")
    words = [*DATA, "--model", "bert", "--weights", str(folder)]
    assert models.weights_of(parse("custom", words)) == folder / "model.safetensors"
