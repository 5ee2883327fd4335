"""What a person reads of objects and of the help: short, and in words."""

import pydoc

import jax
import pytest
from problems import HYPER_PARAMETERS, tiny_federation, tiny_model

import pfl_jax
from pfl_jax import Settings, data, methods
from pfl_jax.validation import NotNegative, Positive


@pytest.mark.without_f1_auc
def test_objects_are_shown_in_a_few_lines():
    dataset = data.load("digits")
    assert "train_x: uint8 [1287, 8, 8, 1]" in repr(dataset)
    federation = tiny_federation()
    result = next(pfl_jax.run(methods.local(tiny_model()), federation, Settings(rounds=1), jax.random.key(0)))
    assert f"{federation.num_clients} clients" in repr(federation)
    assert f"received accuracy {result.received['accuracy'].mean():.4g}" in repr(result)
    assert "outputs, task classification" in repr(tiny_model())
    assert all(repr(one).count("\n") < 16 for one in (dataset, federation, result, tiny_model()))
    # Names of very many clients are counted.
    many = federation._replace(client_names=data.federated.ClientNames(map(str, range(1000))))
    assert "client_names: 1000, the first '0'" in repr(many)


def test_help_has_ranges_in_words():
    text = pydoc.plain(pydoc.render_doc(Settings))
    assert "participation: typing.Annotated[float, above 0 and at most 1] = 1.0" in text
    assert [repr(kind.__metadata__[0]) for kind in (NotNegative, Positive)] == ["at least 0", "positive"]


@pytest.mark.without_f1_auc
def test_a_run_shows_its_progress_if_asked(capsys):
    method = methods.make_method("fedavg", tiny_model(), **HYPER_PARAMETERS)

    def play(rounds, **options):
        results = pfl_jax.run(method, tiny_federation(), Settings(rounds=rounds), jax.random.key(0), **options)
        return list(results), capsys.readouterr().out

    (*_, last), shown = play(2)
    assert not shown
    for rounds, options in ((2, {}), (3, {"state": last.state})):
        # Of a run that goes on, the rounds that are left.
        results, shown = play(rounds, progress=True, **options)
        assert results[-1].round == rounds
        assert shown.startswith("rounds")
        assert "100%" in shown
