"""Recognises the data in a directory by the names of its files."""

from __future__ import annotations

from pathlib import Path

from benchmarks.data import ag_news, cifar10, idx, uci_har
from benchmarks.data.dataset import Dataset, DatasetError, Format
from benchmarks.data.digits import load_digits

KNOWN = (
    "MNIST or Fashion-MNIST (train-images-idx3-ubyte, train-labels-idx1-ubyte, "
    "t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte, each also .gz), "
    "CIFAR-10 binary (data_batch_1.bin to data_batch_5.bin, test_batch.bin, each also .xz or .gz), "
    f"UCI HAR ({uci_har.FILE}), "
    "AG News (train.csv or train_subset.csv, test.csv, each also .gz)"
)


def load_data(folder: Path | None, seed: int = 0) -> Dataset:
    """Load the data set in a directory; None: the digits of scikit-learn, split by `seed`.

    Raises `DatasetError`, which names the file, the problem and what to do.
    """
    if folder is None:
        return load_digits(seed)
    match _format_of(folder):
        case "idx":
            return idx.load_idx(folder)
        case "cifar-10":
            return cifar10.load_cifar10(folder)
        case "ag-news":
            return ag_news.load_ag_news(folder)
        case _:
            return uci_har.load_uci_har(folder)


def _format_of(folder: Path) -> Format:
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise DatasetError(
            f"{folder} is not a directory that can be read ({error.strerror}): give one that "
            f"holds {KNOWN}"
        ) from error
    found: list[Format] = []
    if any(idx.FILES.fullmatch(name) for name in names):
        found.append("idx")
    if any(cifar10.FILES.fullmatch(name) for name in names):
        found.append("cifar-10")
    if uci_har.FILE in names:
        found.append("uci-har")
    if any(ag_news.FILES.fullmatch(name) for name in names) or {*names} >= ag_news.PLAIN:
        found.append("ag-news")
    if len(found) > 1:
        raise DatasetError(f"{folder} holds {' and '.join(found)}: give each its own directory")
    if not found:
        there = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
        raise DatasetError(
            f"{folder} holds no data that is known, only {there or 'nothing at all'}; looked for: "
            f"{KNOWN}"
        )
    return found[0]
