"""A picture looks as its file looks, in whatever mode it is stored and through whatever door it comes."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image
from tables import Frame

from pfl_jax import InvalidInput
from pfl_jax.data import federate, from_arrays, from_clients, from_file, pictures

TURNED = 6
"""EXIF orientation of a picture that is stored a quarter turn counterclockwise."""


def png(image, **options):
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return file.getvalue()


def turned(color):
    exif = Image.Exif()
    exif[0x0112] = TURNED
    return png(color.transpose(Image.Transpose.ROTATE_90), exif=exif)


def cut_out(color):
    """White is transparent, and black below."""
    pixels = np.array(color.convert("RGBA"))
    pixels[(pixels == 255).all(axis=-1)] = 0
    return png(Image.fromarray(pixels))


def tiff(image):
    file = io.BytesIO()
    image.save(file, "TIFF")
    return file.getvalue()


def only_alpha(gray):
    """Black that shines through."""
    return png(Image.merge("LA", (Image.new("L", gray.size), Image.fromarray(255 - np.array(gray)))))


IN_COLOR = {
    "RGB": png,
    "RGBA": lambda color: png(color.convert("RGBA")),
    "palette": lambda color: png(color.quantize(256)),
    "palette with a transparent color": lambda color: png(color.quantize(256), transparency=bytes([255] * 8)),
    "CMYK": lambda color: tiff(color.convert("CMYK")),
    "turned": turned,
    "cut out": cut_out,
}
"""Mode -> content of a file for a picture in color."""

IN_GRAY = {"L": png, "LA": lambda gray: png(gray.convert("LA")), "alpha alone": only_alpha}
"""The same of a gray picture."""


def encoded(contents):
    return [{"bytes": content, "path": None} for content in contents]


def opened(contents):
    return [Image.open(io.BytesIO(content)) for content in contents]


def by_folder(contents, labels, folder):
    for number, (content, label) in enumerate(zip(contents, labels, strict=True)):
        (folder / f"class {label}").mkdir(parents=True, exist_ok=True)
        (folder / f"class {label}" / f"{number:03}.png").write_bytes(content)
    return from_file(folder)


def hugging_face(contents, labels):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    return datasets.Dataset.from_dict({"image": encoded(contents), "label": list(labels)}, features=features)


def by_hugging_face(contents, labels, folder):
    hugging_face(contents, labels).save_to_disk(str(folder))
    return from_file(folder)


def by_flower(contents, labels, folder):
    half = len(labels) // 2
    for number, rows in enumerate((slice(half), slice(half, None))):
        hugging_face(contents[rows], labels[rows]).save_to_disk(str(folder / f"partition_{number}"))
    return from_file(folder)


DOORS = {
    "folder": by_folder,
    "Hugging Face": by_hugging_face,
    "Flower": by_flower,
    "images of Pillow": lambda contents, labels, _: from_arrays(opened(contents), labels),
    "frame": lambda contents, labels, _: from_clients(
        Frame({"image": encoded(contents), "y": labels, "client": labels}), x="image"
    ),
    "clients": lambda contents, labels, _: from_clients(
        [{"x": opened(contents[i::2]), "y": labels[i::2]} for i in (0, 1)]
    ),
}
"""Way in -> (contents of files, labels, folder) -> Dataset."""


def seen(dataset):
    """All pictures of a data set, in the order of their bytes."""
    images = np.concatenate([dataset.train_x, dataset.test_x])
    assert images.dtype == np.uint8
    return images[np.lexsort(images.reshape(len(images), -1).T)]


def same(dataset, images):
    np.testing.assert_array_equal(seen(dataset), images[np.lexsort(images.reshape(len(images), -1).T)])


@pytest.mark.parametrize("door", DOORS)
@settings(max_examples=12, deadline=None)
@given(given=st.data())
def test_modes_change_nothing(door, given, tmp_path_factory):
    labels = np.arange(12) % 2
    color = given.draw(arrays(np.uint8, (12, 3, 2, 3), elements=st.sampled_from([0, 1, 128, 254, 255])))
    gray = given.draw(arrays(np.uint8, (12, 3, 2)))
    # One picture in color makes three channels of all, whichever client has it.
    modes = ["RGB"] + [given.draw(st.sampled_from([*IN_COLOR, *IN_GRAY])) for _ in range(11)]
    order = given.draw(st.permutations(range(12)))
    contents, looks = [], []
    for number in order:
        if (mode := modes[number]) in IN_GRAY:
            contents.append(IN_GRAY[mode](Image.fromarray(gray[number])))
            looks.append(np.repeat(gray[number][..., None], 3, axis=-1))
        else:
            contents.append(IN_COLOR[mode](Image.fromarray(color[number])))
            looks.append(color[number])
    same(DOORS[door](contents, labels, tmp_path_factory.mktemp("pictures") / "of mine"), np.stack(looks))


@pytest.mark.parametrize("door", DOORS)
def test_gray_pictures_have_one_channel(door, tmp_path):
    gray = np.random.default_rng(0).integers(0, 256, (12, 3, 2), dtype=np.uint8)
    gray[::5] = np.where(gray[::5] > 127, 255, 0)
    modes = list(IN_GRAY.values())
    contents = [modes[number % 3](Image.fromarray(one)) for number, one in enumerate(gray)]
    contents[::5] = [png(Image.fromarray(one).convert("1")) for one in gray[::5]]
    same(DOORS[door](contents, np.arange(12) % 2, tmp_path / "of mine"), gray[..., None])


REFUSED = {
    "other size": (png(Image.new("RGB", (5, 4))), r"5 x 4 pixels, and .* 2 x 3: all images must have one size"),
    "turned": (turned(Image.new("RGB", (3, 2))), "3 x 2 pixels, and .* 2 x 3"),
    "damaged": (png(Image.new("RGB", (2, 3)))[:45], "is not an image that can be read"),
    "other bytes": (b"GIF or not", "is not an image that can be read"),
    "floats": (tiff(Image.new("F", (2, 3))), "mode F: its numbers have no brightness"),
    "32 bits": (tiff(Image.new("I", (2, 3))), "mode I: its numbers have no brightness"),
    "16 bits": (png(Image.new("I;16", (2, 3))), "mode I;16: its numbers have no brightness"),
}


@pytest.mark.parametrize("door", [name for name in DOORS if name != "images of Pillow" and name != "clients"])
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_read_is_named(door, what, tmp_path):
    content, text = REFUSED[what]
    contents = [png(Image.new("RGB", (2, 3), (number, 0, 0))) for number in range(12)]
    contents[8] = content
    name = {"folder": "008.png", "Flower": "row 2", "Hugging Face": "row 8", "frame": "row 8"}[door]
    if "can be read" in text and door in ("Flower", "Hugging Face"):
        # Hugging Face's package decodes, and does not say which row it was.
        name, text = "of mine", "is damaged, of another format"
    with pytest.raises(InvalidInput, match=f"{name}.*{text}"):
        DOORS[door](contents, np.arange(12) % 2, tmp_path / "of mine")


def test_missing_pictures_are_named(tmp_path):
    contents = [png(Image.new("L", (2, 3), number)) for number in range(6)]
    table = Frame({"image": [None, *encoded(contents)[1:]], "y": np.arange(6) % 2, "client": np.arange(6) % 2})
    with pytest.raises(InvalidInput, match=r"image of the table in row 0 .* has no picture: leave such rows out"):
        federate(table, x="image")
    rows = hugging_face(contents, np.arange(6) % 2).to_dict()
    rows["image"][4] = None
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "hf"))
    with pytest.raises(InvalidInput, match=r"image of .*hf in row 4 .* has no picture"):
        from_file(tmp_path / "hf")


def test_of_several_frames_the_first_is_read(tmp_path):
    film = [Image.new("L", (2, 3), number) for number in range(4)]
    film[0].save(tmp_path / "film.gif", save_all=True, append_images=film[1:])
    with pytest.warns(UserWarning, match="of pictures with several frames the first is read"):
        assert not pictures.stack([("film.gif", tmp_path / "film.gif")]).any()


def test_a_mode_and_masks_of_hugging_face(tmp_path):
    datasets = pytest.importorskip("datasets")
    mask = Image.new("P", (2, 3), 1)
    mask.putpalette([0, 0, 0, 9, 200, 30])
    features = datasets.Features({"image": datasets.Image(mode="RGB"), "label": datasets.Image()})
    rows = {"image": [Image.new("L", (2, 3), number) for number in range(8)], "label": [mask] * 8}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "hf"))
    dataset = from_file(tmp_path / "hf")
    assert (dataset.input_shape, dataset.num_classes) == ((3, 2, 3), 0)
    np.testing.assert_array_equal(dataset.train_y, np.ones((6, 3, 2)))


def test_gray_test_pictures_beside_color(tmp_path):
    color = [png(Image.new("RGB", (2, 3), (number, 0, 9))) for number in range(6)]
    gray = [png(Image.new("L", (2, 3), number)) for number in range(6)]
    by_folder(color, np.arange(6) % 2, tmp_path / "train")
    by_folder(gray, np.arange(6) % 2, tmp_path / "test")
    dataset = from_file(tmp_path / "train", test_data=tmp_path / "test")
    np.testing.assert_array_equal(dataset.test_x[:, 0, 0], np.repeat(np.array([[0], [2], [4], [1], [3], [5]]), 3, 1))
