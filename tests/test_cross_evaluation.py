"""Scores on other clients' examples and on corrupted images."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pages import block, executed
from problems import HYPER_PARAMETERS, tiny_federation, tiny_model
from rounds import last_round

from pfl_jax import InvalidInput, Settings, data, files, mixed, models, run
from pfl_jax.cross_evaluation import cross_scores
from pfl_jax.data import client_data
from pfl_jax.data.corruption import STRENGTHS, corrupted
from pfl_jax.methods import METHODS, make_method
from pfl_jax.primitives import class_counts


def test_each_model_is_scored_on_the_examples_of_each_client():
    federation, more = tiny_federation(), tiny_federation((6, 7), seed=3)
    last = last_round(METHODS["fedper"], federation, 5, 2, **HYPER_PARAMETERS)
    method = make_method("fedper", tiny_model(), **HYPER_PARAMETERS)
    own, other = (cross_scores(method, federation, last.state, on)["accuracy"] for on in (None, more))
    np.testing.assert_array_equal(np.diag(own), last.received["accuracy"])
    for on, accuracy in ((federation, own), (more, other)):
        assert accuracy.shape == (4, on.num_clients)
        for number in range(4):
            kept = jax.tree.map(lambda leaf, row=number: leaf[row], last.state.clients)
            personal = method.personalize(None, last.state.server, kept, None)
            for column in range(on.num_clients):
                test = client_data(on, column, "test")
                right = np.asarray(method.predict(personal, test.x)).argmax(axis=1) == np.asarray(test.y)
                assert accuracy[number, column] == pytest.approx(right[np.asarray(test.mask)].mean())


NETWORKS = (0, 0, 1, 2)


def of_its_labels(model):
    """LG-FedAvg whose clients add their numbers of labels to the bias: an attacker of labels deploys another model."""
    method = make_method("lg_fedavg", model, **HYPER_PARAMETERS)

    def personalize(key, server, client, data):
        params = method.personalize(key, server, client, data)
        head = params["head"] | {"bias": params["head"]["bias"] + class_counts(data.y, data.mask, 3)}
        return {**params, "head": head}

    return method._replace(personalize=personalize)


def test_models_of_different_networks_and_of_attackers_are_scored_alike():
    federation = tiny_federation()
    method = mixed(of_its_labels, [tiny_model(), *(models.mlp((6,), 3, hidden=(n, 4)) for n in (5, 6))], NETWORKS)
    settings = Settings(rounds=2, attack="labels", attackers=0.5)
    *_, last = run(method, federation, settings, jax.random.key(0))
    scores = cross_scores(method, federation, last.state, settings=settings)
    np.testing.assert_allclose(np.diag(scores["loss"]), last.received["loss"], rtol=1e-5)
    # An exported model is the one that is scored.
    for client, network in enumerate(NETWORKS):
        params = files.client_params(method, federation, last.state, client, settings)
        for column in range(4):
            test = client_data(federation, column, "test")
            right = np.asarray(method.methods[network].predict(params, test.x)).argmax(axis=1) == np.asarray(test.y)
            assert scores["accuracy"][client, column] == pytest.approx(right[np.asarray(test.mask)].mean())


def test_the_page_shows_that_models_are_better_on_their_own_examples(capsys):
    executed(block("docs/evaluation.md", "cross_scores("))
    first, *kinds = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert float(first[1]) > float(first[3]) + 0.1
    assert [kind for kind, _ in kinds] == list(STRENGTHS)


IMAGES = data.load("digits")
FEDERATION = data.federate(IMAGES, data.partition.iid(IMAGES, 2, train_size=20, test_size=10))
PIXELS = np.asarray(FEDERATION.x, np.float64) / 255


def changed(kind, severity=5, **options):
    return np.asarray(corrupted(FEDERATION, kind, severity, **options).x, np.float64) / 255


@pytest.mark.parametrize("kind", [kind for kind in STRENGTHS if kind != "pixelate"])
def test_images_are_worse_with_each_severity(kind):
    distances = [np.abs(changed(kind, severity) - PIXELS).mean() for severity in (1, 3, 5)]
    assert 0 < distances[0] < distances[1] < distances[2]
    changed_data = corrupted(FEDERATION, kind, 5)
    assert changed_data.x.dtype == jnp.uint8
    np.testing.assert_array_equal(changed_data.y, FEDERATION.y)


def test_contrast_brightness_noise_and_blur_have_their_equations():
    mean = PIXELS.mean(axis=(1, 2), keepdims=True)
    np.testing.assert_allclose(changed("contrast"), mean + 0.15 * (PIXELS - mean), atol=0.5 / 255 + 1e-6)
    np.testing.assert_allclose(changed("brightness"), np.minimum(PIXELS + 0.3, 1), atol=0.5 / 255 + 1e-6)
    # Where nothing is cut off.
    noise = (changed("noise") - PIXELS)[(PIXELS > 0.4) & (PIXELS < 0.6)]
    assert noise.std() == pytest.approx(0.1, rel=0.1)
    assert not np.array_equal(changed("noise"), changed("noise", seed=1))
    # The middle of a lone pixel's blur.
    weights = np.exp(-(np.arange(-4, 5) ** 2) / 2)
    lone = FEDERATION._replace(x=jnp.zeros((1, 9, 9, 1), jnp.uint8).at[0, 4, 4].set(255))
    found = np.asarray(corrupted(lone, "blur", 5).x)[0, :, :, 0] / 255
    np.testing.assert_allclose(found, np.outer(weights, weights) / weights.sum() ** 2, atol=0.5 / 255 + 1e-6)


def test_fewer_pixels_are_left():
    random = np.random.default_rng(0).integers(0, 256, (2, 20, 40, 3))
    found = np.asarray(corrupted(FEDERATION._replace(x=jnp.asarray(random, jnp.uint8)), "pixelate", 5).x)
    # 65 % of the rows and of the columns.
    assert len(np.unique(found[0], axis=0)) == 13
    assert len(np.unique(found[0], axis=1)[0]) == 26
    even = corrupted(FEDERATION._replace(x=jnp.full((1, 20, 20, 1), 77, jnp.uint8)), "pixelate", 5)
    np.testing.assert_array_equal(even.x, 77)


def test_only_images_are_corrupted():
    with pytest.raises(InvalidInput, match=r"images \[H, W, C\] of uint8"):
        corrupted(FEDERATION._replace(x=FEDERATION.x.astype(jnp.float32)), "blur")
    with pytest.raises(InvalidInput, match="severity"):
        corrupted(FEDERATION, "blur", 6)
