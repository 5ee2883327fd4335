"""Every published accuracy is a command line, and a run of it finds its way back to the accuracy."""

import dataclasses

import pytest

from experiments.cli.presets import DEFAULT_PRESET
from experiments.cli.request import parse
from experiments.papers import published, settings

ROWS = published.load()


def test_every_published_accuracy_has_one_place_and_a_known_setting():
    places = [(row.paper, row.table, row.dataset, row.clients, row.setting, row.method) for row in ROWS]
    assert len(set(places)) == len(places) == 556
    assert all(0 < row.accuracy_percent < 100 for row in ROWS)
    assert {(row.paper, row.table) for row in ROWS} == set(settings.TABLES)
    assert {row.setting for row in ROWS} == set(settings.SETTINGS)
    assert set(settings.ALIASES) <= {row.method for row in ROWS}
    # Two places of a table that were the same run would be one place too many.
    cells = {(row.paper, row.table, row.dataset, row.arguments) for row in ROWS}
    assert len(cells) == len(places)


SETTINGS = {
    "grouped s=20 participation=0.3": {"s": 20.0, "participation": 0.3, "full_last_round": True},
    "grouped s=20 size=50 participation=0.03": {"num_clients": 1000, "train_size": 50, "full_last_round": True},
    "pathological clustered": {"partition": "pathological", "pathological_protocol": "clustered", "train_size": 600},
    "dirichlet beta=1.0 participation=0.3": {"dirichlet_protocol": "fedpac", "train_size": None, "num_clients": 100},
    "dirichlet beta=0.3 participation=0.4": {"dirichlet_protocol": "fedas", "beta": 0.3, "rounds": 40},
}


@pytest.mark.parametrize("setting", settings.SETTINGS)
def test_every_setting_is_a_command_line(setting):
    row = next(row for row in ROWS if row.setting == setting and row.dataset in DEFAULT_PRESET)
    options = vars(parse(row.dataset, row.arguments).options)
    assert (options["num_clients"], options["preset"]) == (row.clients, settings.PRESET[row.paper])
    for name, value in SETTINGS.get(setting, {}).items():
        found = options[name]
        assert (tuple(found) if isinstance(found, list) else found) == value, name


@pytest.mark.parametrize("method", dict.fromkeys(row.method for row in ROWS))
def test_every_method_is_a_command_line(method):
    rows = [row for row in ROWS if row.method == method and row.dataset in DEFAULT_PRESET]
    # What is added to a setting's words does not depend on the setting, so that one of them will do.
    own = {" ".join(row.arguments).replace(settings.SETTINGS[row.setting], "").partition("--num")[0] for row in rows}
    assert len(own) == len({settings.PRESET[row.paper] for row in rows})
    row = next(row for row in rows if row.setting == "grouped s=20" or "beta" in row.setting)
    request = parse(row.dataset, row.arguments)
    assert request.options.method == settings.method_name(method)
    expected = {"fedem_3": ("learners", 3), "fedem_ft_5": ("learners", 5), "hypcluster_5": ("clusters", 5)}.get(method)
    if expected:
        assert request.hyper_parameters[expected[0]] == expected[1]
    off = {name for name, value in request.hyper_parameters.items() if value is False}
    switches = {word[1:] for word in method.split() if word.startswith("-")}
    assert switches <= off
    assert (off & {"alignment", "collaboration", "synchronization"}) == switches


@pytest.mark.slow
def test_every_published_accuracy_is_a_command_line():
    for row in ROWS:
        parse(row.dataset, row.arguments)


@pytest.mark.parametrize(
    ("name", "table", "method"),
    [
        ("fedpac", 3, "fedpac"),
        ("fedpac", 4, "hypcluster_5"),
        ("fedpac", 6, "fedpac"),
        ("fedpac", 7, "fedpac"),
        ("fedpac", 8, "fedpac"),
        ("fedpac", 9, "fedpac"),
        ("fedas", 4, "fedas -synchronization"),
    ],
)
def test_a_run_finds_its_published_figure(name, table, method):
    rows = [row for row in ROWS if (row.paper, row.table, row.method) == (name, table, method)]
    row = next(row for row in rows if row.dataset in DEFAULT_PRESET)
    # FedAS's by both of its procedures.
    for name in settings.PROCEDURES if row.procedure else [""]:
        found = published.find(row._replace(procedure=name).cell(seed=3).request(), is_real=True)
        assert found is not None
        assert found.accuracy_percent == row.accuracy_percent


def test_a_mixture_of_the_print_and_the_release_is_not_the_papers():
    row = next(row for row in ROWS if (row.paper, row.table, row.method) == ("fedas", 4, "fedas"))
    printed = row._replace(procedure="print").cell()
    assert published.find(printed.request(), is_real=True) is not None
    # As printed, with the batches of the release; and all but the alignment in place.
    released_batches = dataclasses.replace(printed, arguments=(*printed.arguments, "--drop-last", "--no-shuffle"))
    for cell in (released_batches, dataclasses.replace(row.cell(), procedure="")):
        assert published.find(cell.request(), is_real=True) is None
