"""Builder of CINIC-10 (Darlow, Crowley, Antoniou, Storkey 2018) for tensorflow-datasets, which has none.

The published archive holds train/, valid/ and test/, each with a folder of 9,000 PNG pictures for each of the ten
classes of CIFAR-10. Import this module freely: TensorFlow is imported only when the builder is requested.
"""

import functools
import io
from pathlib import PurePosixPath
from typing import Any

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
"""Folder names in the order of their labels, which is CIFAR-10's."""

FOLDERS = {"train": "train", "validation": "valid", "test": "test"}
"""Split -> its folder in the archive."""


def member(path: str) -> tuple[str, str, str] | None:
    """(folder, class, file name) of a picture in the archive; None for other files, hidden ones included.

    Args:
      path: of the file in the archive, below any folder.
    """
    parts = PurePosixPath(path).parts[-3:]
    if len(parts) < 3 or parts[0] not in FOLDERS.values() or parts[1] not in CLASSES:
        return None
    return None if parts[2].startswith(".") or not parts[2].endswith(".png") else (parts[0], parts[1], parts[2])


def check_picture(path: str, content: bytes) -> None:
    """Raise ValueError, with the path, unless the content decodes to a picture of 32 x 32 pixels.

    tensorflow-datasets keeps the files as they are, and would notice damage only when all of them are read.
    """
    # Imported here: needed only to prepare the dataset.
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content), formats=("PNG",)) as picture:
            picture.load()
            size = picture.size
    # Pillow raises SyntaxError for broken PNG chunks.
    except (OSError, ValueError, SyntaxError) as error:
        raise ValueError(f"the picture {path} in the archive is damaged ({error})") from None
    if size != (32, 32):
        raise ValueError(f"the picture {path} in the archive has {size[0]} x {size[1]} pixels, not 32 x 32")


@functools.cache
def builder_class(url: str) -> Any:
    """Class of the builder, defined and registered with tensorflow-datasets on the first call.

    Args:
      url: of the archive.
    """
    import tensorflow_datasets as tfds

    class Cinic10(tfds.core.GeneratorBasedBuilder):
        """CINIC-10: pictures of CIFAR-10's classes from CIFAR-10 and ImageNet."""

        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            return tfds.core.DatasetInfo(
                builder=self,
                description="270,000 color pictures of 32 x 32 pixels in the ten classes of CIFAR-10.",
                features=tfds.features.FeaturesDict(
                    {"image": tfds.features.Image(shape=(32, 32, 3)), "label": tfds.features.ClassLabel(names=CLASSES)}
                ),
                supervised_keys=("image", "label"),
                homepage="https://doi.org/10.7488/ds/2448",
            )

        def _split_generators(self, dl_manager):
            archive = dl_manager.download(url)
            # Read member by member: nothing is unpacked onto the disk.
            return {
                split: self._generate_examples(dl_manager.iter_archive(archive), folder)
                for split, folder in FOLDERS.items()
            }

        def _generate_examples(self, files, folder):
            for path, file in files:
                found = member(path)
                if found is not None and found[0] == folder:
                    content = file.read()
                    check_picture(path, content)
                    yield f"{found[1]}/{found[2]}", {"image": io.BytesIO(content), "label": found[1]}

    return Cinic10
