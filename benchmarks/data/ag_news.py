"""AG News: headlines with the first lines of their articles, in four classes; two CSV files.

A row is a class from 1 to 4, a title and a description, each in quotes. The text is title and
description, in lower case, as words of letters and digits; entities such as `&amp;` and ` #39;`,
which the files spell in several ways, and HTML are no words.

    0  padding, behind the last word
    1  a word that is not in the vocabulary
    2… the most frequent words of the training rows, the most frequent first

The vocabulary comes from the training rows alone; words that are equally frequent are in
alphabetical order, so the same files give the same ids. A text has a fixed length: its first words.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.data.dataset import Dataset, DatasetError
from benchmarks.data.packed import find_packed, read_packed
from edge_sdk.data.arrays import ArrayData

FILES = re.compile(r"train_subset\.csv(\.gz)?|(train|test)\.csv\.gz")
"""File names, one of which identifies a folder of this format."""
PLAIN = {"train.csv", "test.csv"}
"""File names that identify it together: either alone could be anything."""
ENDINGS = (".gz", "")
CLASSES = 4
MOST_BYTES = 1 << 26
"""Most bytes in one file; the full training file has 30 MB."""
PADDING, UNKNOWN = 0, 1
WORDS = 2
"""Id of the most frequent word."""

_NOT_WORDS = re.compile(r"&lt;.*?&gt;|<[^>]*>|&\w+;|&?#\d+;|\b(?:lt|gt|quot|amp);")
_WORD = re.compile(r"[a-z0-9]+")


def load_ag_news(folder: Path, *, vocabulary: int = 5000, length: int = 40) -> Dataset:
    """Load the two files of a folder as token ids; `vocabulary` counts padding and unknown too.

    Raises `DatasetError`.
    """
    if vocabulary <= WORDS or length < 1:
        raise DatasetError(
            f"a vocabulary of {vocabulary} and a length of {length} leave nothing to read: give "
            f"more than {WORDS} and at least 1"
        )
    train = read_rows(find_packed(folder, ["train.csv", "train_subset.csv"], ENDINGS))
    test = read_rows(find_packed(folder, ["test.csv"], ENDINGS))
    ids = build_vocabulary((words for _, words in train), vocabulary)
    return Dataset(
        folder.resolve().name,
        "ag-news",
        _data(train, ids, length),
        _data(test, ids, length),
        CLASSES,
        vocabulary=vocabulary,
    )


def read_rows(path: Path) -> list[tuple[int, list[str]]]:
    """Read the class, from 0, and the words of every row. Raises `DatasetError`."""
    content = read_packed(path, MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise DatasetError(f"{path} has more than {MOST_BYTES:,} bytes: this is not AG News")
    rows: list[tuple[int, list[str]]] = []
    try:
        for number, row in enumerate(csv.reader(io.StringIO(content.decode()), strict=True), 1):
            if len(row) != 3 or row[0] not in ("1", "2", "3", "4"):
                raise DatasetError(
                    f"{path}: row {number} is not a class from 1 to {CLASSES}, a title and a "
                    "description: get it anew"
                )
            rows.append((int(row[0]) - 1, words_of(f"{row[1]} {row[2]}")))
    except (csv.Error, UnicodeDecodeError) as error:
        raise DatasetError(f"{path} is not a CSV file ({error}): get it anew") from error
    if not rows:
        raise DatasetError(f"{path} is empty: get it anew")
    return rows


def words_of(text: str) -> list[str]:
    """Split a text into words of letters and digits, in lower case."""
    return _WORD.findall(_NOT_WORDS.sub(" ", text.lower().replace("\\", " ")))


def build_vocabulary(texts: Iterable[Sequence[str]], size: int) -> dict[str, int]:
    """Number the most frequent words; ids stay below `size`."""
    counts = Counter(word for words in texts for word in words)
    ordered = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: number for number, word in enumerate(ordered[: size - WORDS], WORDS)}


def _data(
    rows: Sequence[tuple[int, Sequence[str]]], ids: Mapping[str, int], length: int
) -> ArrayData:
    tokens: NDArray[np.int64] = np.full((len(rows), length), PADDING, np.int64)
    for number, (_, words) in enumerate(rows):
        found = [ids.get(word, UNKNOWN) for word in words[:length]]
        tokens[number, : len(found)] = found
    return ArrayData((tokens,), np.array([label for label, _ in rows], np.int64))
