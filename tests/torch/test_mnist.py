"""The digits: those that ship, the user's own, and every kind of damage."""

import gzip
import hashlib
import struct
import sys
from pathlib import Path

import pytest
import torch

from ddpdiag.errors import UserError
from ddpdiag.workloads.mnist import SHIPPED, DataError, load, read_idx

NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def idx(*shape: int, values: bytes | None = None) -> bytes:
    """An IDX file of that shape; all zeros unless values are given."""
    content = bytes(torch.Size(shape).numel()) if values is None else values
    return struct.pack(f">3xB{len(shape)}I", len(shape), *shape).replace(b"\0\0\0", b"\0\0\x08", 1) + content


def good_files() -> dict[str, bytes]:
    return {name: idx(3, 28, 28) if "images" in name else idx(3, values=b"\x01\x05\x09") for name in NAMES}


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
    notice = (SHIPPED / "NOTICE").read_text()
    for name in NAMES:
        content = gzip.decompress((SHIPPED / f"{name}.gz").read_bytes())
        assert f"{hashlib.sha256(content).hexdigest()}  {name}\n" in notice


def test_shipped_files_carry_no_time_and_no_name():
    for name in NAMES:
        header = (SHIPPED / f"{name}.gz").read_bytes()[:10]
        assert header[3:8] == bytes(5), "flags (3) and modification time (4 to 7) of RFC 1952"


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


@pytest.mark.parametrize("layout", ["", "raw", "MNIST/raw"])
@pytest.mark.parametrize("packed", [False, True])
def test_own_digits_in_every_layout(tmp_path: Path, layout: str, packed: bool):
    files = good_files()
    if packed:
        files = {f"{name}.gz": gzip.compress(content) for name, content in files.items()}
    write(tmp_path / layout, files)
    assert load(str(tmp_path)).test_labels.tolist() == [1, 5, 9]


def test_values_are_read_row_by_row(tmp_path: Path):
    (tmp_path / "a").write_bytes(idx(2, 1, 3, values=bytes([1, 2, 3, 4, 5, 255])))
    assert read_idx(tmp_path / "a").tolist() == [[[1, 2, 3]], [[4, 5, 255]]]


def test_gzip_is_known_by_its_content(tmp_path: Path):
    (tmp_path / "a").write_bytes(gzip.compress(idx(1, values=b"\x07")))
    assert read_idx(tmp_path / "a").tolist() == [7]


PACKED = gzip.compress(idx(9), mtime=0)
DAMAGED = {
    "empty": b"",
    "two zeros": b"\0\0",
    "a page": b"<html>404</html>",
    "floats": b"\0\0\x0d\x01\0\0\0\0",
    "no dimension": b"\0\0\x08\0",
    "65 dimensions": b"\0\0\x08\x41" + b"\0\0\0\x01" * 65 + b"!",
    "half a header": b"\0\0\x08\x03\0\0\0\x01\0",
    "one value short": idx(2, 28, 28)[:-1],
    "one value more": idx(2, 28, 28) + b"!",
    "a promise of 16 EiB": idx(2**32 - 1, 2**32 - 1, values=b""),
    "none": idx(0),
    "gzip cut off": PACKED[:-9],
    "gzip of another length": PACKED[:-1] + b"\xff",
    "gzip with noise": PACKED[:12] + b"\xff" * 9,
    "gzip's first bytes": b"\x1f\x8b",
    "gzip of another method": b"\x1f\x8b\x01" + bytes(20),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_explained(golden, tmp_path: Path, name: str):
    path = tmp_path / "digits"
    path.write_bytes(DAMAGED[name])
    with pytest.raises(DataError) as caught:
        read_idx(path)
    golden(str(caught.value).replace(str(path), "FILE"))
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, UserError)


MISFITS = {
    "two labels of three": ("train-labels-idx1-ubyte", idx(2)),
    "larger images": ("train-images-idx3-ubyte", idx(3, 32, 32)),
    "images of one dimension": ("t10k-images-idx3-ubyte", idx(3)),
    "labels of two dimensions": ("t10k-labels-idx1-ubyte", idx(3, 1)),
    "a label of ten": ("t10k-labels-idx1-ubyte", idx(3, values=b"\x01\x0a\x02")),
}


@pytest.mark.parametrize("case", MISFITS)
def test_files_that_do_not_fit_are_explained(golden, tmp_path: Path, case: str):
    name, content = MISFITS[case]
    write(tmp_path, good_files() | {name: content})
    with pytest.raises(DataError, match=name) as caught:
        load(str(tmp_path))
    golden(str(caught.value).replace(str(tmp_path), "FOLDER"))


@pytest.mark.parametrize("missing", NAMES)
def test_a_missing_file_is_named(tmp_path: Path, missing: str):
    write(tmp_path, good_files())
    (tmp_path / missing).unlink()
    with pytest.raises(DataError, match=missing):
        load(str(tmp_path))


def test_a_missing_folder_and_a_folder_in_place_of_a_file_are_explained(golden, tmp_path: Path):
    write(tmp_path, good_files())
    (tmp_path / NAMES[0]).unlink()
    (tmp_path / NAMES[0]).mkdir()
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(DataError) as caught:
            load(str(folder))
        golden(str(caught.value).replace(str(tmp_path), "FOLDER"))


def test_reading_needs_no_numpy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert len(load().test_labels) == 2000
