"""Load the tenth of MNIST's handwritten digits that ships with ddpdiag. Nothing is ever downloaded.

The format is IDX: two zero bytes, a type byte (8 = unsigned byte), the number of dimensions, each dimension as a
big-endian 32-bit integer, then the values, last dimension fastest.
"""

import gzip
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

DIGITS_FOLDER = Path(__file__).parents[1] / "data" / "mnist"
SIDE = 28
CLASSES = 10


class Digits(NamedTuple):
    """Images, uint8 [n, 28, 28] with 0 for paper and 255 for ink, and their labels, uint8 [n] from 0 to 9."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load() -> Digits:
    """Read the digits. Raises OSError, with the name of the file, if a file is damaged or missing."""
    names = [f"{split}-{kind}" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    return Digits(*(read_idx(DIGITS_FOLDER / f"{name}-ubyte.gz") for name in names))


def read_idx(path: Path) -> Tensor:
    """Read the array of a gzipped IDX file; its header has the shape. Raises OSError for a damaged or missing file."""
    try:
        # A bytearray, because torch.frombuffer warns of read-only memory.
        content = bytearray(gzip.decompress(path.read_bytes()))
        shape = struct.unpack_from(f">{content[3]}I", content, 4)
    except (OSError, EOFError, zlib.error, IndexError) as error:
        raise OSError(f"{path} cannot be read: {error}; copy it from another host") from error
    return torch.frombuffer(content, dtype=torch.uint8, offset=4 + 4 * content[3]).reshape(shape)
