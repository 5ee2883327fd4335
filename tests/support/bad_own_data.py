"""Own data that `experiments.custom` refuses."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from bad_input import Case, Prepare, evil_pickle, folder
from PIL import Image

X = np.arange(36, dtype=np.float32).reshape(12, 3)
Y = np.arange(12) % 2


def npz(**arrays: object) -> Prepare:
    """Writes my.npz with twelve good rows of two classes, but for the arrays given."""
    whole = {name: value for name, value in ({"x": X, "y": Y} | arrays).items() if value is not None}
    return lambda here: np.savez(here / "my.npz", **whole)


def text(content: str | bytes, name: str = "my.csv") -> Prepare:
    """Writes a file."""
    content = content.encode() if isinstance(content, str) else content
    return lambda here: (here / name).write_bytes(content)


def table(header: str = "age,dose,label,hospital", row: str = "") -> str:
    """A good table, with another header or a last row."""
    lines = [f"{number},{number / 2},{['no', 'yes'][number % 2]},{'AB'[number % 2]}" for number in range(12)]
    return "\n".join([header, *lines, *filter(None, [row])]) + "\n"


def images(*sizes: tuple[str, int, int]) -> Prepare:
    """Writes images of these classes, heights and widths into the folder pets."""

    def write(here: Path) -> None:
        for number, (name, height, width) in enumerate(sizes):
            path = here / "pets" / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((height, width), number, np.uint8)).save(path)

    return write


def last(row: str) -> Prepare:
    """Writes a good table, but for a last row."""
    return text(table(row=row))


def tested(content: str) -> Prepare:
    """Writes a good table, and other.csv for the test."""
    return lambda here: (text(table())(here), text(content, "other.csv")(here))


CSV, NPZ, FOLDER = "custom --data my.csv", "custom --data my.npz", "custom --data pets"
HOSPITAL = f"{CSV} --client-column hospital"
TESTED = f"{HOSPITAL} --test-data other.csv"
CATS = [("cat", 4, 4)] * 6
THREE = npz(y=np.arange(12) % 3)
STRANGE = tested(table(row="7,1,no,C"))
OTHERWISE_NAMED = tested(table("age,weight,label,hospital"))


def _cut_off(here: Path) -> None:
    npz()(here)
    (here / "my.npz").write_bytes((here / "my.npz").read_bytes()[:-40])


MESSAGES: dict[str, list[tuple[str, str, Prepare]]] = {
    f"{NPZ} --task multi_label": [("its labels are classes", "labels float32 [P] are not several flags", npz())],
    f"{NPZ} --task binary": [("there are three classes", "--task binary is for 2 classes, and there are 3", THREE)],
    f"{NPZ} --model fedpac_cnn --num-clients 2": [
        ("", "needs images (height, width, channels), not shape (3,)", npz())
    ],
    f"{NPZ} --shift rotation --num-clients 2": [("", "shift rotation is for images [H", npz())],
    f"{NPZ} --test-fraction 0.5": [
        ("it has test rows", "a test fraction and a test set cannot both be given", npz(test_x=X, test_y=Y))
    ],
    NPZ: [
        ("no such array", "my.npz has no array y", npz(y=None, labels=Y)),
        ("one class only", "y has one class only, 0: there is nothing to tell apart", npz(y=np.zeros(12, int))),
        ("a label for each row", "y has 12 different labels in 12 rows", npz(y=np.arange(12))),
        ("other test labels", "6 test rows have a label that no training row has: 2", npz(test_x=X, test_y=Y + 1)),
        ("test rows without labels", "the test set of my.npz lacks y, unlike my.npz", npz(test_x=X)),
        ("it is cut off", "File is not a zip file)", _cut_off),
        ("it is a pickle", "or holds a pickle, which is never read", text(evil_pickle(), "my.npz")),
        ("an array of objects", "save numbers as x.astype(np.float32)", npz(y=np.array(["a", None] * 6))),
    ],
    f"{HOSPITAL} --num-clients 5": [("there are two", "hospital names 2 clients, leave it out", text(table()))],
    f"{HOSPITAL} --data-digest 0123456789abcdef": [("", "my.csv is not the data of this run", text(table()))],
    "custom --data my.parquet": [("", "my.parquet has the ending .parquet", text(b"PAR1", "my.parquet"))],
    f"{CSV} --label diagnosis": [("no such column", "my.csv has no column diagnosis", text(table()))],
    f"{CSV} --client-column label": [("that is the label", "label is named for two things", text(table()))],
    CSV: [
        ("a quote is not closed", "my.csv: line 14 is not CSV (unexpected end of data)", last('7,1,"no,A')),
        ("an index", "like the row numbers that pandas writes", text(table(",dose,label,hospital"))),
        ("no text", "'utf-8' codec can't decode byte 0xff in position 8", text(b"label,a\n\xff\xfe,1\n")),
    ],
    HOSPITAL: [
        ("a row without label", "my.csv: y has None in row 12 (counted from 0)", last("7,1,,A")),
    ],
    TESTED: [
        ("columns of other names", "other.csv lacks dose and also has weight, unlike my.csv", OTHERWISE_NAMED),
        ("a strange hospital", "test rows have a client that no training row has: C", STRANGE),
    ],
    FOLDER: [
        ("empty", "give a folder with a sub-folder of images for each class", folder("pets")),
    ],
    f"{FOLDER} --client-column owner": [("", "has one level of folders, which are the", images(*CATS, ("dog", 4, 4)))],
}
"""Command -> states of the files that it meets in words, part of the message, and what makes the state."""


def cases() -> Iterator[Case]:
    """All of them."""
    for command, rows in MESSAGES.items():
        yield from (Case(command, *row) for row in rows)
