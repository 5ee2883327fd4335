"""Own data that `experiments.custom` refuses."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from bad_input import Case, Prepare, evil_pickle
from PIL import Image

Row = tuple[str, str, str, Prepare]
"""Fields of a case."""

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


def table(header: str = "age,dose,label,hospital", row: str = "", rows: int = 12) -> str:
    """A good table, with another header or a last row."""
    lines = [f"{number},{number / 2},{['no', 'yes'][number % 2]},{'AB'[number % 2]}" for number in range(rows)]
    return "\n".join([header, *lines, *filter(None, [row])]) + "\n"


def images(*sizes: tuple[str, int, int]) -> Prepare:
    """Writes images of these classes, heights and widths into the folder pets."""

    def write(here: Path) -> None:
        for number, (name, height, width) in enumerate(sizes):
            path = here / "pets" / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((height, width), number, np.uint8)).save(path)

    return write


def _damaged(here: Path) -> None:
    images(("cat", 4, 4), ("dog", 4, 4))(here)
    (here / "pets" / "dog" / "1.png").write_bytes(b"\x89PNG nothing of use")


def last(row: str) -> Prepare:
    """Writes a good table, but for a last row."""
    return text(table(row=row))


def tested(content: str) -> Prepare:
    """Writes a good table, and other.csv for the test."""
    return lambda here: (text(table())(here), text(content, "other.csv")(here))


def _options() -> Iterator[Row]:
    csv, npz_ = "custom --data my.csv", "custom --data my.npz"
    yield f"{npz_} --task multi_label", "its labels are classes", "labels float32 [P] are not several flags", npz()
    yield (
        f"{npz_} --task binary",
        "there are three classes",
        "my.npz: --task binary is for 2 classes, and there are 3",
        npz(y=np.arange(12) % 3),
    )
    yield (
        f"{csv} --client-column hospital --num-clients 5",
        "there are two hospitals",
        "--num-clients 5: hospital names 2 clients, leave it out",
        text(table()),
    )
    yield (
        f"{csv} --client-column hospital --data-digest 0123456789abcdef",
        "",
        "my.csv is not the data of this run",
        text(table()),
    )
    yield f"{npz_} --num-clients 50", "it has twelve rows", "50 clients cannot each have", npz()
    yield (
        f"{npz_} --model fedpac_cnn --num-clients 2",
        "",
        "fedpac_cnn needs images (height, width, channels), not shape (3,)",
        npz(),
    )
    yield f"{npz_} --shift rotation --num-clients 2", "", "shift rotation is for images [H", npz()
    yield (
        f"{npz_} --augment --num-clients 2",
        "",
        "augmentation is for color images, not for images of shape (3,)",
        npz(),
    )


def _tables() -> Iterator[Row]:
    csv = "custom --data my.csv"
    hospital = f"{csv} --client-column hospital"
    yield "custom --data my.parquet", "", "my.parquet has the ending .parquet", text(b"PAR1", "my.parquet")
    yield f"{csv} --label diagnosis", "it has no such column", "my.csv has no column diagnosis", text(table())
    yield f"{csv} --client-column label", "that is the label", "column label is named for two things", text(table())
    yield (
        csv,
        "two columns are not numeric",
        "from 0): sex ('f' in row 0), town ('Rome' in row 0). Leave columns out (--drop)",
        text("age,sex,town,label\n1,f,Rome,0\n2,m,Oslo,1\n3,m,Oslo,0\n4,f,Rome,1\n"),
    )
    yield hospital, "an empty field", "dose (nothing in row 12). Leave columns out (--drop)", last("7,,no,A")
    yield hospital, "a field is missing", "my.csv has 3 fields in line 14, and 4 in its header", last("7,no,A")
    yield hospital, "a row without label", "my.csv: y has None in row 12 (counted from 0)", last("7,1,,A")
    yield (
        hospital,
        "the header alone",
        "my.csv has no rows: give a header and a row for each example",
        text(table(rows=0)),
    )
    yield csv, "a quote is not closed", "my.csv: line 14 is no CSV (unexpected end of data)", last('7,1,"no,A')
    yield (
        csv,
        "the index that pandas writes",
        "like the row numbers that pandas writes",
        text(table(",dose,label,hospital")),
    )
    yield csv, "its separators are semicolons", "separate columns by commas", text(table().replace(",", ";"))
    yield (
        csv,
        "bytes that are no text",
        "'utf-8' codec can't decode byte 0xff in position 8",
        text(b"label,a\n\xff\xfe,1\n"),
    )
    other = table("age,weight,label,hospital")
    words = f"{csv} --client-column hospital --test-data other.csv"
    yield (
        words,
        "its columns have other names",
        "other.csv has the columns age, weight, label, hospital, and my.csv has age, dose",
        tested(other),
    )
    strange = table(row="7,1,no,C")
    yield (
        words,
        "a hospital that no training row has",
        "client has the client C, which no training row has",
        tested(strange),
    )
    few = "age,dose,label,hospital\n1,2,no,A\n"
    yield words, "hospital B has no test rows", "my.csv, tested on other.csv: client B has no test rows", tested(few)


def _arrays() -> Iterator[Row]:
    command = "custom --data my.npz"
    yield command, "no such array", "my.npz has no array y", npz(y=None, labels=Y)
    yield command, "labels with fractions", "give an integer or a word for each row", npz(y=Y / 2)
    yield command, "labels of two columns", "give an integer or a word for each row", npz(y=np.stack([Y, Y], axis=1))
    yield (
        command,
        "one class only",
        "my.npz: y has one class only, 0: there is nothing to tell apart",
        npz(y=np.zeros(12, int)),
    )
    yield command, "a label for each row", "y has 12 different labels in 12 rows", npz(y=np.arange(12))
    yield (
        command,
        "test labels that no training row has",
        "my.npz: y has the label 2, which no training row has (6 such rows)",
        npz(test_x=X, test_y=Y + 1),
    )
    yield (
        command,
        "test rows without labels",
        "my.npz: the test set of my.npz has the columns x, and my.npz has x, y",
        npz(test_x=X),
    )
    yield (
        f"{command} --test-fraction 0.5",
        "it has test rows",
        "my.npz: a test fraction and a test set cannot both be given",
        npz(test_x=X, test_y=Y),
    )
    yield (
        command,
        "it is cut off",
        "File is not a zip file)",
        lambda here: (npz()(here), text((here / "my.npz").read_bytes()[:-40], "my.npz")(here)),
    )
    yield (
        command,
        "it is a pickle",
        "my.npz is damaged, of another format, or holds a pickle, which is never read",
        text(evil_pickle(), "my.npz"),
    )
    yield (
        command,
        "an array of objects",
        "Object arrays cannot be loaded when allow_pickle=False)",
        lambda here: np.savez(here / "my.npz", x=X, y=np.array(["a", None] * 6)),
    )


def _folders() -> Iterator[Row]:
    command = "custom --data pets"
    same = [("cat", 4, 4)] * 6 + [("dog", 4, 4)] * 6
    yield (
        command,
        "an empty folder",
        "give a folder with a sub-folder of images for each class",
        lambda here: (here / "pets").mkdir(),
    )
    yield command, "images of two sizes", "pets/dog/1.png has 5 x 4 pixels", images(("cat", 4, 4), ("dog", 4, 5))
    yield command, "an image is damaged", "cannot identify image file 'pets/dog/1.png')", _damaged
    yield (
        command,
        "one class only",
        "pets: y has one class only, cat: there is nothing to tell apart",
        images(*same[:6]),
    )
    yield f"{command} --client-column owner", "", "pets has one level of folders, which are the classes", images(*same)


def cases() -> Iterator[Case]:
    """All of them."""
    for part in (_options, _tables, _arrays, _folders):
        yield from (Case(*row) for row in part())
