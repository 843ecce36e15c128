"""Real data for benchmarks, read from the user's files; the project ships none.

    load_data(folder)       the data in a directory, as a `Dataset`; None: scikit-learn's digits
    fit_images(data, shape) the same images in the shape that a model takes

numpy and the standard library are enough, so that small boards can read them too; only the digits
need scikit-learn. Any problem with a file is a `DatasetError`.
"""

from benchmarks.data.dataset import Dataset, DatasetError
from benchmarks.data.find import load_data
from benchmarks.data.fit import fit_images

__all__ = ["Dataset", "DatasetError", "fit_images", "load_data"]
