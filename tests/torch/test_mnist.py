"""The digits that ship."""

import gzip
import hashlib
import struct
import sys
from pathlib import Path

import pytest
import torch

from ddpdiag.workloads.mnist import DIGITS_FOLDER, load, read_idx

NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def idx(*shape: int, values: bytes | None = None) -> bytes:
    """An IDX file of that shape; all zeros unless values are given."""
    content = bytes(torch.Size(shape).numel()) if values is None else values
    return struct.pack(f">3xB{len(shape)}I", len(shape), *shape).replace(b"\0\0\0", b"\0\0\x08", 1) + content


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def test_shipped_digits_are_balanced():
    digits = load()
    assert digits.train_images.shape == (10_000, 28, 28)
    assert digits.test_images.shape == (2_000, 28, 28)
    assert digits.train_images.dtype is torch.uint8
    assert torch.bincount(digits.train_labels.long()).tolist() == [1000] * 10
    assert torch.bincount(digits.test_labels.long()).tolist() == [200] * 10


def test_shipped_digits_are_those_of_the_notice():
    notice = (DIGITS_FOLDER / "NOTICE").read_text()
    for name in NAMES:
        content = gzip.decompress((DIGITS_FOLDER / f"{name}.gz").read_bytes())
        assert f"{hashlib.sha256(content).hexdigest()}  {name}\n" in notice


def test_the_selection_is_reproducible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "tools"))
    import make_mnist_subset

    labels = bytes(range(10)) * 1001
    files = {name: idx(10_010, values=labels) for name in NAMES if "labels" in name}
    files |= {name: idx(10_010, 28, 28) for name in NAMES if "images" in name}
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        make_mnist_subset.make(write(tmp_path / "from", files), tmp_path / folder)
    packed = [{path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()} for folder in ("a", "b")]
    assert packed[0] == packed[1]
    assert read_idx(tmp_path / "a" / "train-labels-idx1-ubyte.gz").tolist() == list(labels[:10_000])


def test_values_are_read_row_by_row(tmp_path: Path):
    (tmp_path / "a").write_bytes(gzip.compress(idx(2, 1, 3, values=bytes([1, 2, 3, 4, 5, 255]))))
    assert read_idx(tmp_path / "a").tolist() == [[[1, 2, 3]], [[4, 5, 255]]]


PACKED = gzip.compress(idx(9), mtime=0)
DAMAGED = {"empty": b"", "cut off": PACKED[:-9], "with noise": PACKED[:12] + b"\xff" * 9, "a page": b"<html>404</html>"}


@pytest.mark.parametrize("content", [*DAMAGED.values(), None], ids=[*DAMAGED, "missing"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None):
    if content is not None:
        (tmp_path / "digits").write_bytes(content)
    with pytest.raises(OSError, match="/digits cannot be read: "):
        read_idx(tmp_path / "digits")


def test_reading_needs_no_numpy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert len(load().test_labels) == 2000
