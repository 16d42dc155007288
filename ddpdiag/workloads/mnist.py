"""Handwritten digits: the ones that ship with ddpdiag, or the user's own, in the four files of MNIST.

The format is IDX: two zero bytes, a type byte (8 = unsigned byte), the number of dimensions, each dimension as a
big-endian 32-bit integer, then the values, last dimension fastest. Nothing is ever downloaded.
"""

import gzip
import struct
import zlib
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ddpdiag.codec import open_file
from ddpdiag.errors import UserError

SHIPPED = Path(__file__).parents[1] / "data" / "mnist"
# Where files lie below --data-dir: directly, or as torchvision.datasets.MNIST(root) leaves them.
LAYOUTS = ("", "MNIST/raw", "raw")
GZIP_MAGIC = b"\x1f\x8b"
SIDE = 28
CLASSES = 10
# Five times the training images of MNIST: a small .gz can hold more than there is memory.
MOST_BYTES = 256 << 20
_PIECE_BYTES = 1 << 20


class DataError(UserError):
    """A file of digits is missing or damaged: the sentence says which, what was found, what was expected."""


class Digits(NamedTuple):
    """Images are uint8 [n, 28, 28], 0 is paper and 255 is ink; labels are uint8 [n], 0 to 9."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load(data_dir: str | None = None) -> Digits:
    """The digits in `data_dir`, or those that ship with ddpdiag; DataError if a file is missing or damaged."""
    folder = Path(data_dir) if data_dir is not None else SHIPPED
    return Digits(*_load_split(folder, "train"), *_load_split(folder, "t10k"))


def _load_split(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """Images and labels of "train" or "t10k", as many of one as of the other."""
    images_path = _find(folder, f"{split}-images-idx3-ubyte")
    labels_path = _find(folder, f"{split}-labels-idx1-ubyte")
    images, labels = read_idx(images_path), read_idx(labels_path)
    if images.dim() != 3 or images.shape[1:] != (SIDE, SIDE):
        raise DataError(f"{images_path} holds an array of {_shape(images)}; n x {SIDE} x {SIDE} was expected")
    if labels.dim() != 1:
        raise DataError(f"{labels_path} holds an array of {_shape(labels)}; one label per image was expected")
    if len(images) != len(labels):
        raise DataError(f"{labels_path} holds {len(labels)} labels; {len(images)} were expected, one per image")
    if (largest := int(labels.max())) >= CLASSES:
        raise DataError(f"{labels_path} holds the label {largest}; 0 to {CLASSES - 1} were expected")
    return images, labels


def _find(folder: Path, name: str) -> Path:
    """The file `name`, plain or .gz, in one of the layouts under `folder`."""
    for layout in LAYOUTS:
        for path in (folder / layout / name, folder / layout / f"{name}.gz"):
            if path.exists():
                return path
    raise DataError(f"{folder} has no {name}: expected there or in MNIST/raw, plain or .gz")


def read_idx(path: Path) -> Tensor:
    """The uint8 array in an IDX file, plain or gzip'ed, with the shape that its header gives; DataError otherwise."""
    content = _content(path)
    if len(content) < 4 or content[:3] != b"\x00\x00\x08" or not 1 <= content[3] <= 3:
        found = bytes(content[:4]).hex(" ") or "nothing"
        raise DataError(
            f"{path} begins with {found}; an IDX file of images or labels begins with 00 00 08 03 or 00 00 08 01"
        )
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise DataError(f"{path} ends within its header, after {len(content)} bytes; {start} were expected")
    shape = struct.unpack_from(f">{content[3]}I", content, 4)
    if len(content) - start != prod(shape):
        dimensions = " x ".join(map(str, shape))
        raise DataError(f"{path} holds {len(content) - start} values; its header promises {dimensions} = {prod(shape)}")
    if not prod(shape):
        raise DataError(f"{path} is empty by its own header; at least one item was expected")
    return torch.frombuffer(content, dtype=torch.uint8, offset=start).reshape(shape)


def _content(path: Path) -> bytearray:
    """The file's bytes, unpacked; writable, because torch.frombuffer warns of memory that it must not write."""
    content = bytearray()
    try:
        with open_file(path) as raw:
            packed = raw.peek(len(GZIP_MAGIC)).startswith(GZIP_MAGIC)
            file = gzip.GzipFile(fileobj=raw) if packed else raw
            while len(content) <= MOST_BYTES and (piece := file.read(_PIECE_BYTES)):
                content += piece
    # Before OSError: BadGzipFile is one.
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        size = path.stat().st_size
        raise DataError(f"{path} ({size} bytes) is a damaged gzip file: {error}; copy it anew") from error
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror or error}; a readable IDX file was expected"
        ) from error
    if len(content) > MOST_BYTES:
        unpacked = " when unpacked" if packed else ""
        raise DataError(f"{path} holds more than {MOST_BYTES >> 20} MiB{unpacked}, the most that is read; MNIST has 45")
    return content


def _shape(array: Tensor) -> str:
    return " x ".join(map(str, array.shape))
