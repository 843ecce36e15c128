"""AG News: words, a vocabulary from the training rows alone, ids of a fixed length."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.data import DatasetError, load_data
from benchmarks.data.ag_news import build_vocabulary, load_ag_news, read_rows, words_of
from benchmarks.models import FAMILIES
from tests.unit.benchmarks.data.test_data import real

TRAIN = """"3","Oil up","The price of oil is up, up, up"
"1","Talks","Peace talks &lt;A HREF=""x.y""&gt;resume&lt;/A&gt; the #39;talks #39;"
"""
TEST = """"4","New chip","A chip\\the size of oil"
"""


def write_news(folder: Path, train: str = TRAIN, test: str = TEST) -> None:
    (folder / "train_subset.csv.gz").write_bytes(gzip.compress(train.encode()))
    (folder / "test.csv.gz").write_bytes(gzip.compress(test.encode()))


def test_texts_become_ids_of_the_training_rows_words(tmp_path: Path) -> None:
    write_news(tmp_path)
    data = load_ag_news(tmp_path, vocabulary=6, length=7)
    assert (data.format, data.classes, data.vocabulary, data.shape) == ("ag-news", 4, 6, (7,))
    # up 4, talks 3, oil 2, the 2, then the alphabet decides; two ids are not words.
    assert data.train.inputs[0].dtype == np.int64
    up, talks, oil, the = 2, 3, 4, 5
    assert data.train.inputs[0].tolist() == [
        [oil, up, the, 1, 1, oil, 1],
        [talks, 1, talks, 1, the, talks, 0],
    ]
    assert data.train.targets.tolist() == [2, 0]
    assert data.test.inputs[0].tolist() == [[1, 1, 1, 1, the, 1, 1]]
    assert data.test.targets.tolist() == [3]
    assert data.owners is None


def test_folder_is_recognised_plain_or_packed(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text(TRAIN)
    (tmp_path / "test.csv").write_text(TEST)
    assert load_data(tmp_path).shape == (40,)
    (tmp_path / "test.csv").unlink()
    with pytest.raises(DatasetError, match="holds no data that is known"):
        load_data(tmp_path)
    (tmp_path / "train.csv").rename(tmp_path / "train_subset.csv")
    with pytest.raises(DatasetError, match=r"test.csv.gz is missing"):
        load_data(tmp_path)


def test_words_are_lower_case_and_entities_are_none() -> None:
    text = "U.S. #36;5m deal\\signed: &lt;b&gt;BIG&lt;/b&gt; &amp; quot;new quot;"
    assert words_of(text) == ["u", "s", "5m", "deal", "signed", "big", "new"]
    counted = build_vocabulary([["b", "a", "c", "c"], ["a", "b"]], 4)
    assert counted == {"a": 2, "b": 3}


@pytest.mark.parametrize(
    ("train", "complaint"),
    [
        ('"5","a","b"\n', "row 1 is not a class from 1 to 4"),
        (TRAIN + '"1","a"\n', "row 3 is not a class"),
        (TRAIN + '"1","a","b" x\n', "not a CSV file"),
        ("", "is empty"),
    ],
)
def test_rows_that_are_not_news_are_refused(tmp_path: Path, train: str, complaint: str) -> None:
    write_news(tmp_path, train)
    with pytest.raises(DatasetError, match=complaint) as error:
        load_data(tmp_path)
    assert "train_subset.csv.gz" in str(error.value)


def test_vocabulary_without_room_for_a_word_is_refused(tmp_path: Path) -> None:
    write_news(tmp_path)
    with pytest.raises(DatasetError, match="a vocabulary of 2 and a length of 40"):
        load_ag_news(tmp_path, vocabulary=2)


def test_padding_does_not_count_for_the_model() -> None:
    model = FAMILIES["news"].model()
    ids = torch.tensor([[7, 9, 3, 0, 0, 0], [5, 0, 0, 0, 0, 0]])
    for row, words in ((0, 3), (1, 1)):
        alone = model(ids[row : row + 1, :words])
        torch.testing.assert_close(model(ids)[row : row + 1], alone)


def test_real_news_are_balanced_and_mostly_known_words() -> None:
    folder = real("ag_news")
    rows = read_rows(folder / "test.csv.gz")
    assert np.bincount([label for label, _ in rows]).tolist() == [1900] * 4
    ids = build_vocabulary((words for _, words in rows), 5000)
    assert list(ids)[:3] == ["the", "to", "a"]
    known = np.mean([word in ids for _, words in rows for word in words])
    assert 0.8 < known < 0.95
