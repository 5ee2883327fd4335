"""tensorflow-datasets builder of CINIC-10 (Darlow, Crowley, Antoniou, Storkey 2018), which that package lacks.

The published archive has folders train/, valid/ and test/, each with a folder of 9,000 PNG images for each of the ten
classes of CIFAR-10. TensorFlow is imported only when the builder is requested.
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
    """(folder, class, file name) of an image in the archive; None for other files and for hidden files.

    Args:
      path: path of the file in the archive.
    """
    parts = PurePosixPath(path).parts[-3:]
    if len(parts) < 3 or parts[0] not in FOLDERS.values() or parts[1] not in CLASSES:
        return None
    return None if parts[2].startswith(".") or not parts[2].endswith(".png") else (parts[0], parts[1], parts[2])


def check_picture(path: str, content: bytes) -> None:
    """Raise ValueError that names the path, unless the content decodes to an image of 32 x 32 pixels.

    tensorflow-datasets does not decode the files when it prepares them, so it would not notice damage then.
    """
    # Imported here because it is needed only to prepare the dataset.
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
    """Builder class, which is defined and registered with tensorflow-datasets on the first call.

    Args:
      url: address of the archive.
    """
    import tensorflow_datasets as tfds

    class Cinic10(tfds.core.GeneratorBasedBuilder):
        """CINIC-10: images of CIFAR-10's classes from CIFAR-10 and ImageNet."""

        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            return tfds.core.DatasetInfo(
                builder=self,
                description="270,000 color images of 32 x 32 pixels in the ten classes of CIFAR-10.",
                features=tfds.features.FeaturesDict(
                    {"image": tfds.features.Image(shape=(32, 32, 3)), "label": tfds.features.ClassLabel(names=CLASSES)}
                ),
                supervised_keys=("image", "label"),
                homepage="https://doi.org/10.7488/ds/2448",
            )

        def _split_generators(self, dl_manager):
            archive = dl_manager.download(url)
            # The archive is read member by member and not unpacked onto the disk.
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
