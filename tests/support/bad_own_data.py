"""Own data that `experiments.custom` refuses; a part of the list in `bad_input.py`."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

Prepare = Callable[[Path], object]
Row = tuple[str, str, Prepare]
"""Command, the state of the files it meets in words, and what makes that state."""

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


def both(*steps: Prepare) -> Prepare:
    """One after another."""
    return lambda here: [step(here) for step in steps]


def changed(**places: object) -> np.ndarray:
    """The good inputs with a value in the fifth row."""
    x = X.astype(np.float64)
    x[4, 1] = places["value"]
    return x


def _options() -> Iterator[Row]:
    csv, npz_ = "custom --data my.csv", "custom --data my.npz"
    yield f"{npz_} --task multi_label", "its labels are classes", npz()
    yield f"{npz_} --task binary", "there are three classes", npz(y=np.arange(12) % 3)
    yield f"{csv} --client-column hospital --num-clients 5", "there are two hospitals", text(table())
    yield f"{csv} --client-column hospital --data-digest 0123456789abcdef", "", text(table())
    yield f"{npz_} --num-clients 50", "it has twelve rows", npz()
    yield f"{npz_} --model fedpac_cnn --num-clients 2", "", npz()
    yield f"{npz_} --shift rotation --num-clients 2", "", npz()
    yield f"{npz_} --augment --num-clients 2", "", npz()


def _tables() -> Iterator[Row]:
    csv = "custom --data my.csv"
    yield "custom --data my.parquet", "", text(b"PAR1", "my.parquet")
    yield f"{csv} --label diagnosis", "it has no such column", text(table())
    yield f"{csv} --client-column clinic", "it has no such column", text(table())
    yield f"{csv} --client-column label", "that is the label", text(table())
    yield (
        csv,
        "two columns are not numeric",
        text("age,sex,town,label\n1,f,Rome,0\n2,m,Oslo,1\n3,m,Oslo,0\n4,f,Rome,1\n"),
    )
    yield f"{csv} --client-column hospital", "an empty field", text(table(row="7,,no,A"))
    yield f"{csv} --client-column hospital", "a field is missing", text(table(row="7,no,A"))
    yield f"{csv} --client-column hospital", "nan for a number", text(table(row="7,nan,no,A"))
    yield f"{csv} --client-column hospital", "a row without label", text(table(row="7,1,,A"))
    yield f"{csv} --client-column hospital", "a row without client", text(table(row="7,1,no,"))
    yield f"{csv} --client-column hospital", "a hospital with one row", text(table(row="7,1,no,C"))
    yield f"{csv} --client-column hospital", "the header alone", text(table(rows=0))
    yield csv, "a quote is not closed", text(table(row='7,1,"no,A'))
    yield csv, "a quote is closed a line later", text(table(row='7,1,"no\n8,1,no",A'))
    yield csv, "a quote within a field", text(table(row='7,1,"no"t,A'))
    words = f"{csv} --label hospital"
    yield words, "its last label is cut off", text("a,hospital\n1,Rome\n2,Oslo\n3,Rome\n4,Oslo\n5,Oslo\n6,Ro")
    yield csv, "the index that pandas writes", text(table(",dose,label,hospital"))
    yield csv, "its separators are semicolons", text(table().replace(",", ";"))
    yield f"{csv} --client-column hospital", "a number beyond float32", text(table(row="7,1e39,no,A"))
    yield csv, "two columns of one name", text(table("age,age,label,hospital"))
    yield csv, "bytes that are no text", text(b"label,a\n\xff\xfe,1\n")
    other = table("age,weight,label,hospital")
    words = f"{csv} --client-column hospital --test-data other.csv"
    yield words, "its columns have other names", both(text(table()), text(other, "other.csv"))
    strange = table(row="7,1,maybe,A")
    yield words, "a label that no training row has", both(text(table()), text(strange, "other.csv"))
    strange = table(row="7,1,no,C")
    yield words, "a hospital that no training row has", both(text(table()), text(strange, "other.csv"))
    few = "age,dose,label,hospital\n1,2,no,A\n"
    yield words, "hospital B has no test rows", both(text(table()), text(few, "other.csv"))


def _arrays(evil_pickle: Callable[[], bytes]) -> Iterator[Row]:
    command = "custom --data my.npz"
    yield command, "no such array", npz(y=None, labels=Y)
    yield command, "a number beyond float32", npz(x=changed(value=1e39))
    yield command, "labels with fractions", npz(y=Y / 2)
    yield command, "labels of two columns", npz(y=np.stack([Y, Y], axis=1))
    yield command, "one class only", npz(y=np.zeros(12, int))
    yield command, "a label for each row", npz(y=np.arange(12))
    yield command, "test labels that no training row has", npz(test_x=X, test_y=Y + 1)
    yield command, "test rows without labels", npz(test_x=X)
    yield f"{command} --test-fraction 0.5", "it has test rows", npz(test_x=X, test_y=Y)
    yield f"{command} --client-column user", "no such array", npz()
    yield f"{command} --client-column user", "no clients of test rows", npz(user=Y, test_x=X, test_y=Y)
    yield (
        command,
        "it is cut off",
        lambda here: (npz()(here), text((here / "my.npz").read_bytes()[:-40], "my.npz")(here)),
    )
    yield command, "it is a pickle", text(evil_pickle(), "my.npz")
    yield command, "an array of objects", lambda here: np.savez(here / "my.npz", x=X, y=np.array(["a", None] * 6))


def _folders() -> Iterator[Row]:
    command = "custom --data pets"
    same = [("cat", 4, 4)] * 6 + [("dog", 4, 4)] * 6
    yield command, "an empty folder", lambda here: (here / "pets").mkdir()
    yield command, "images of two sizes", images(("cat", 4, 4), ("dog", 4, 5))
    yield command, "an image is damaged", _damaged
    yield command, "one class only", images(*same[:6])
    yield f"{command} --client-column owner", "", images(*same)


def cases(evil_pickle: Callable[[], bytes]) -> Iterator[Row]:
    """All of them, one with the content of a pickle that must not be read."""
    yield from _options()
    yield from _tables()
    yield from _arrays(evil_pickle)
    yield from _folders()
