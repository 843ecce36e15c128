"""`tessera-bench partition`: who has which classes, and how many samples."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report.command import Measured, add_command
from benchmarks.report.options import count

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.table import Table

    from benchmarks.data import Dataset
    from benchmarks.data.dealing import DataPartition

PARTITIONS = ("iid", "dirichlet", "labels", "shards", "key")
QUICK_SHARE = 10
"""With `--quick`, one of this many samples is dealt out."""
SHOWN_DEVICES = 40
"""Most devices in the printed table; the plot and the file have all."""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "partition",
        _measure,
        help="deal out a data set to devices, and show who has what",
        description=(
            "Deals out the training samples of a data set to devices as `coordinator` does for "
            "simulations, and shows how many of each class every device has."
        ),
        example="partition --data ~/data/cifar10 --partition dirichlet --alpha 0.3 --plot who.svg",
        quick=f"only every {QUICK_SHARE}th sample",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="a directory with a known data set (default: the digits of scikit-learn)",
    )
    parser.add_argument(
        "--partition",
        choices=PARTITIONS,
        default="dirichlet",
        help="how to deal out (default dirichlet); key: one device for each person",
    )
    parser.add_argument("--devices", type=count, default=20, help="how many (default 20)")
    parser.add_argument(
        "--alpha", type=float, default=0.3, help="of dirichlet: small is uneven (default 0.3)"
    )
    parser.add_argument("--classes", type=count, default=2, help="of labels, each (default 2)")
    parser.add_argument("--shards", type=count, default=2, help="of shards, each (default 2)")
    parser.add_argument(
        "--least", type=int, default=1, help="fewest samples of a device (default 1)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default 0)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it: .svg, .png or .pdf")


def _measure(arguments: argparse.Namespace) -> Measured:
    from benchmarks.data import load_data
    from benchmarks.report.drawing import check_plot

    check_plot(arguments.plot)
    data = load_data(arguments.data, arguments.seed)
    held = held_counts(data, arguments)
    title = f"{data.name}: {partition_of(arguments)}, {len(held)} devices"
    if arguments.plot is not None:
        save_partition_plot(held, arguments.plot, title)
    shown: list[Table | str] = [_table(held, title)]
    if len(held) > SHOWN_DEVICES:
        shown.append(f"The first {SHOWN_DEVICES} of {len(held)} devices; --json has all.")
    keys = ("partition", "devices", "alpha", "classes", "shards", "least", "seed")
    return Measured(
        figures=[],
        shown=shown,
        packages=("numpy",),
        config={"data": data.name, **{key: getattr(arguments, key) for key in keys}},
        data={"counts": held.tolist()},
    )


def held_counts(data: Dataset, options: argparse.Namespace) -> NDArray[np.int64]:
    """Deal out the training samples and count them: devices × classes.

    Raises `DatasetError` where nobody owns samples, `ConfigError` where there are too few.
    """
    import numpy as np

    from edge_sdk import stream

    every = QUICK_SHARE if options.quick else 1
    partition = partition_of(options)
    labels = data.train.targets[::every]
    owners = None if data.owners is None else data.owners[::every]
    devices = None if partition.partition == "key" else options.devices
    random = stream(options.seed, "partition", partition.partition)
    parts = partition.deal(labels, devices, random, owners)
    return np.stack([np.bincount(labels[rows], minlength=data.classes) for rows in parts])


def partition_of(options: argparse.Namespace) -> DataPartition:
    """Return the partition that the options describe."""
    from benchmarks.data.dealing import DataPartition

    return DataPartition(
        partition=options.partition,
        alpha=options.alpha,
        classes=options.classes,
        shards=options.shards,
        least=options.least,
    )


def save_partition_plot(held: NDArray[np.int64], path: Path, title: str) -> None:
    """Draw a bubble for each class on each device; its area is the number of samples."""
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    from benchmarks.report.drawing import PALETTE, panels, save

    devices, classes = held.shape
    wide, high = max(6.4, 0.22 * devices + 1.5), max(2.9, 0.3 * classes + 1.0)
    figure, (axes,) = panels(1, wide=wide, high=high)
    device, label = np.nonzero(held)
    # The largest bubble just fills its cell; 72 points are an inch.
    side = 72 * min((wide - 1.2) / devices, (high - 0.6) / classes)
    areas = held[device, label] / held.max() * (0.95 * side) ** 2
    axes.scatter(device, label, s=areas, color=PALETTE[0], linewidths=0)
    axes.set_xlim(-0.6, devices - 0.4)
    axes.set_ylim(classes - 0.4, -0.6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_yticks(range(classes))
    axes.set_xlabel(f"device (the largest bubble is {held.max():,} samples)")
    axes.set_ylabel("class")
    axes.set_axisbelow(True)
    axes.grid(alpha=0.2)
    figure.suptitle(title, fontsize="large")
    save(figure, path)


def _table(held: NDArray[np.int64], title: str) -> Table:
    from benchmarks.report.tables import make_table

    classes: Sequence[str] = [str(label) for label in range(held.shape[1])]
    table = make_table(title, "device", "samples", *classes)
    for device, row in enumerate(held[:SHOWN_DEVICES].tolist()):
        table.add_row(str(device), f"{sum(row):,}", *(f"{each:,}" if each else "·" for each in row))
    return table
