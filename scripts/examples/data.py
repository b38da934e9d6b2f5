"""Images for the examples: digits, files in MNIST's layout, or synthetic ones. Knows nothing of ranks.

Every image is a float tensor of channels x height x width with mean 0 and variance 1 over the training set.
"""

from __future__ import annotations

import gzip
from collections.abc import Sized
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Sampler, TensorDataset

FASHION = Path("/usr/share/datasets/fashion-mnist")  # where Debian's dataset-fashion-mnist puts it
CHOICES = "digits, fashion, or a folder with MNIST's idx files (.gz or not)"


class Images(NamedTuple):
    """A training set and a test set, each of (image, label) pairs."""

    train: TensorDataset
    test: TensorDataset
    channels: int
    size: int
    classes: int


def load(source: str, synthetic_size: int = 32) -> Images:
    """The data named by --data: "digits", "fashion", "synthetic", or the name of a folder."""
    if source == "digits":
        return _digits()
    if source == "synthetic":
        return _synthetic(synthetic_size)
    folder = FASHION if source == "fashion" else Path(source)
    if not folder.is_dir():
        hint = " (Debian: apt-get install dataset-fashion-mnist)" if source == "fashion" else ""
        raise SystemExit(f"no data: there is no folder {folder}{hint}")
    return _images(*(_idx(folder, part, kind) for part in ("train", "t10k") for kind in ("images", "labels")))


def batches(
    dataset: TensorDataset, sampler: Sampler[int], batch_size: int, drop_last: bool = False
) -> DataLoader[tuple[Tensor, ...]]:
    """Batches of a dataset in the sampler's order; each is cut out in one piece, which is far faster than by image."""
    return DataLoader(dataset, sampler=BatchSampler(sampler, batch_size, drop_last), batch_size=None)


def length(sized: object) -> int:
    """How many batches or samples there are; for loaders and samplers, which torch does not type as Sized."""
    assert isinstance(sized, Sized)
    return len(sized)


def _images(train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor) -> Images:
    if train.dim() == 3:
        train, test = train.unsqueeze(1), test.unsqueeze(1)
    mean, std = train.float().mean(), train.float().std()
    return Images(
        TensorDataset((train.float() - mean) / std, train_labels.long()),
        TensorDataset((test.float() - mean) / std, test_labels.long()),
        channels=train.shape[1],
        size=train.shape[2],
        classes=int(train_labels.max()) + 1,
    )


def _digits() -> Images:
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels; every fifth is for testing."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise SystemExit("--data digits needs scikit-learn (pip install scikit-learn)") from error
    images, labels = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
    images = images.reshape(-1, 8, 8)
    testing = torch.arange(len(labels)) % 5 == 4
    return _images(images[~testing], labels[~testing], images[testing], labels[testing])


def _synthetic(size: int) -> Images:
    """Colour images of pure noise, but for a faint pattern of its own in each of ten classes."""
    random = torch.Generator().manual_seed(0)
    patterns = torch.randn(10, 3, size, size, generator=random)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.arange(count) % 10
        return torch.randn(count, 3, size, size, generator=random) + 0.3 * patterns[labels], labels

    return _images(*draw(1000), *draw(200))


def _idx(folder: Path, part: str, kind: str) -> Tensor:
    """One idx file: two zero bytes, type 8 (uint8), number of dimensions, each as big-endian int32, then the data."""
    found = sorted(folder.glob(f"{part}-{kind}?idx*-ubyte*"))
    if not found:
        raise SystemExit(f"no data: {folder} has no file {part}-{kind}-idx{3 if kind == 'images' else 1}-ubyte[.gz]")
    raw = gzip.decompress(found[0].read_bytes()) if found[0].suffix == ".gz" else found[0].read_bytes()
    if raw[:3] != b"\0\0\x08":
        raise SystemExit(f"no data: {found[0]} is not an idx file of unsigned bytes")
    start = 4 + 4 * raw[3]
    shape = [int.from_bytes(raw[i : i + 4], "big") for i in range(4, start, 4)]
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8, offset=start).reshape(shape)
