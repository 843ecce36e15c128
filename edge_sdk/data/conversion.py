"""Raw samples become the task's: types, scales, shapes and class numbers.

What is converted is said once, as a note. What cannot be converted raises `DataError`, which names
the place, the value and what was wanted. Rules:

    shape     sizes of 1 are added or left out; the values of a table's row fill the shape in order
    type      floats are rounded, whole numbers become floats; floats become whole numbers only if
              they are whole
    scale     pixels (uint8 arrays of images too), and everything if `[format] range` is given, are
              scaled to 0 to 1, then to the task's range, or its mean is subtracted and divided by
              its deviation; measured values have mean and deviation applied as they are
    targets   names become the numbers of their classes
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge_sdk.data.block import Block, Values
from edge_sdk.data.errors import DataError
from edge_sdk.data.format import DataFormat
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.task.data_spec import ArraySpec, DataSpec
from edge_sdk.protocol.task.description import InputDescription

MAX_LISTED = 12
"""Most class names that an error lists."""


class Converter:
    """Converts blocks of one source to one task's data, and remembers what it did.

    Not `labelled`: targets that are not the task's are a note, and no more targets are returned.
    """

    def __init__(self, spec: DataSpec, format: DataFormat, *, labelled: bool = True) -> None:
        self._spec = spec
        self._format = format
        self._numbers = {name: number for number, name in enumerate(spec.classes)}
        self._notes: dict[str, None] = {}
        self._must_have_targets = labelled
        self._spans: dict[str, tuple[float, float, float, float]] = {}
        """By input: its lowest and highest value so far, and those of the task's range."""
        self._counts: Array | None = None
        if spec.class_count is not None and _whole_type(spec.targets.dtype):
            self._counts = np.zeros(spec.class_count, np.int64)
        self.samples = 0
        self.without_targets = 0
        """Samples whose targets were not returned."""

    @property
    def notes(self) -> list[str]:
        """Conversions that were made, each said once."""
        return list(self._notes)

    @property
    def counts(self) -> list[int] | None:
        """Samples of every class; None: the targets are not classes."""
        return None if self._counts is None else self._counts.tolist()

    def warnings(self) -> list[str]:
        """Oddities that do not stop a training."""
        found = [
            f"{name}: values from {low:g} to {high:g} leave the task's range {least:g} to "
            f"{most:g}; [format] range = [{low:g}, {high:g}] would scale them"
            for name, (low, high, least, most) in self._spans.items()
            if low < least or high > most
        ]
        if not self._must_have_targets:
            return found
        if self._counts is not None and self.samples and (self._counts > 0).sum() == 1:
            name = self._class_words(int(np.argmax(self._counts)))
            found.append(
                f"all {self.samples} samples are of class {name}: the device learns nothing else"
            )
        return found

    def convert(self, block: Block) -> tuple[tuple[Array, ...], Array | None]:
        """Return a block's inputs and targets in the task's form. Raises `DataError`."""
        spec = self._spec
        if len(block.inputs) != len(spec.inputs):
            raise DataError(
                f"{block.where(0)}: {_count(len(block.inputs), 'input')}, but the task wants "
                f"{len(spec.inputs)}"
            )
        lengths = {len(array) for array in block.inputs}
        if block.targets is not None:
            lengths.add(len(block.targets))
        if len(lengths) > 1:
            raise DataError(
                f"{block.where(0)}: every array needs as many samples as the others, not "
                f"{' and '.join(map(str, sorted(lengths)))}"
            )
        inputs = tuple(
            self._input(number, array, block) for number, array in enumerate(block.inputs)
        )
        targets = self._targets(block)
        self.samples += len(inputs[0])
        self.without_targets += len(inputs[0]) if targets is None else 0
        return inputs, targets

    def _targets(self, block: Block) -> Array | None:
        if self._must_have_targets:
            return None if block.targets is None else self._target(block.targets, block)
        if block.targets is None or self.without_targets:
            return None
        try:
            return self._target(block.targets, block)
        except DataError as error:
            self._note(f"labels are not used: {error}")
            return None

    # -- inputs ---------------------------------------------------------------------------------

    def _input(self, number: int, array: Array, block: Block) -> Array:
        spec = self._spec.inputs[number]
        described = self._spec.descriptions[number] if self._spec.descriptions else None
        field = _Field(f"x{number}", spec, block, block.columns)
        if array.dtype.kind not in "biuf":
            raise DataError(f"{block.where(0)}: {field.name} is {array.dtype.name}, not numbers")
        array = self._shaped(array, field)
        if array.dtype.kind == "f":
            _check_finite(array, field)
        array = self._scaled(array, field, described or InputDescription())
        array = self._typed(array, field)
        if spec.highest is not None:
            _check_bounds(array, 0, spec.highest, field, f"an id from 0 to {spec.highest}")
        return array

    def _shaped(self, array: Array, field: _Field) -> Array:
        has, wanted = array.shape[1:], field.spec.shape
        if has == wanted:
            return array
        row = bool(field.columns) and int(np.prod(has)) == int(np.prod(wanted))
        if row or _without_ones(has) == _without_ones(wanted):
            if not row:
                self._note(f"{field.name} is {_size(has)} and taken as {_size(wanted)}")
            return array.reshape(len(array), *wanted)
        raise DataError(
            f"{field.block.where(0)}: {field.name} is {array.dtype.name} {_size(has)}, the task "
            f"wants {field.spec}"
        )

    def _scaled(self, array: Array, field: _Field, described: InputDescription) -> Array:
        if field.spec.dtype[:5] != "float" or field.block.values == "mels":
            return array if not described.mean else _standardised(array, described)
        bounds = self._bounds(array, field)
        if bounds is not None:
            low, high = bounds
            if field.block.values != "sound":
                _check_bounds(array, low, high, field, f"{low:g} to {high:g}, as range says")
            unit = (array.astype(np.float64) - low) / (high - low)
            if described.range is not None:
                least, most = described.range
                self._note(f"{field.name} is scaled from {low:g}…{high:g} to {least:g}…{most:g}")
                return unit * (most - least) + least
            if field.block.values == "sound":
                unit = array  # −1 to 1 is how sound is
            else:
                self._note(f"{field.name} is scaled from {low:g}…{high:g} to 0…1")
            if described.mean:
                self._note(f"{field.name}: the task's mean and deviation are applied")
                return _standardised(unit, described)
            return unit
        if described.mean and field.block.values == "measured":
            self._note(f"{field.name}: the task's mean and deviation are applied")
            return _standardised(array, described)
        if described.range is not None:
            self._check_range(array, field, described.range)
        return array

    def _bounds(self, array: Array, field: _Field) -> tuple[float, float] | None:
        """Return the lowest and highest raw value; None: values are not scaled."""
        values: Values = field.block.values
        if self._format.range:
            return self._format.range[0], self._format.range[1]
        if values == "pixels":
            return 0.0, 255.0
        if values == "sound":
            return -1.0, 1.0
        if array.dtype == np.uint8 and len(_without_ones(field.spec.shape)) > 1:
            return 0.0, 255.0
        return None

    def _check_range(self, array: Array, field: _Field, wanted: tuple[float, float]) -> None:
        if not array.size:
            return
        least, most = wanted
        low, high = float(array.min()), float(array.max())
        width = most - least
        if low < least - width or high > most + width:
            _check_bounds(
                array,
                least - width,
                most + width,
                field,
                f"values from {least:g} to {most:g}; give the lowest and highest value of your "
                "files as [format] range",
            )
        before = self._spans.get(field.name, (low, high))
        self._spans[field.name] = (min(low, before[0]), max(high, before[1]), least, most)

    def _typed(self, array: Array, field: _Field) -> Array:
        wanted = np.dtype(field.spec.dtype)
        if array.dtype == wanted:
            return array
        if wanted.kind == "f":
            with np.errstate(over="ignore"):
                made = array.astype(wanted)
            if array.dtype.kind == "f":
                self._note_rounding(field)
                if not np.isfinite(made).all():
                    place = _first(~np.isfinite(made))
                    raise DataError(
                        f"{field.place(place)}: {array[place]:g} does not fit {wanted.name}"
                    )
            elif field.block.values == "ready":
                self._note(f"{field.name} is {array.dtype.name} and becomes {wanted.name}")
            return made
        if wanted.kind == "b":
            _check_bounds(array, 0, 1, field, "0 or 1")
        else:
            if array.dtype.kind == "f" and (array != np.floor(array)).any():
                place = _first(array != np.floor(array))
                raise DataError(
                    f"{field.place(place)}: {array[place]:g}: must be a whole number "
                    f"({wanted.name})"
                )
            info = np.iinfo(wanted)
            _check_bounds(array, info.min, info.max, field, f"a number of {wanted.name}")
        if field.block.values == "ready":
            self._note(f"{field.name} is {array.dtype.name} and becomes {wanted.name}")
        return array.astype(wanted)

    def _note_rounding(self, field: _Field) -> None:
        if field.block.values == "ready" and field.original.itemsize > 4:
            self._note(f"{field.name} is {field.original.name} and rounded to {field.spec.dtype}")

    # -- targets --------------------------------------------------------------------------------

    def _target(self, targets: Array, block: Block) -> Array:
        spec = self._spec.targets
        field = _Field("y", spec, block, block.labels)
        if targets.dtype.kind in "USO":
            targets = self._named(targets, field)
        elif targets.dtype.kind not in "biuf":
            raise DataError(f"{block.where(0)}: y is {targets.dtype.name}, not numbers or names")
        targets = self._shaped(targets, field)
        if targets.dtype.kind == "f":
            _check_finite(targets, field)
        if _whole_type(spec.dtype) and spec.highest is not None:
            wanted = f"the task has {spec.highest + 1} classes, 0 to {spec.highest}"
            _check_bounds(targets, 0, spec.highest, field, wanted, bare=True)
        elif spec.highest is not None:
            _check_bounds(targets, 0, spec.highest, field, f"from 0 to {spec.highest}")
        made = self._typed(targets, field)
        if self._counts is not None:
            self._counts += np.bincount(made.reshape(-1), minlength=len(self._counts))
        return made

    def _named(self, targets: Array, field: _Field) -> Array:
        """Return labels in words as numbers."""
        whole = _whole_type(field.spec.dtype)
        by_name = whole or (field.spec.highest == 1 and bool(self._spec.classes))
        texts = [str(each).strip() for each in targets.reshape(-1).tolist()]
        known: dict[str, float] = {}
        for place, text in enumerate(texts):
            if text not in known:
                at = np.unravel_index(place, targets.shape)
                known[text] = self._number(text, at, field, by_name=by_name)
        if by_name and any(str(self._numbers.get(text, text)) != text for text in known):
            self._note("names of classes become their numbers")
        numbers = np.array([known[text] for text in texts], np.int64 if whole else np.float64)
        return numbers.reshape(targets.shape)

    def _number(self, text: str, at: Any, field: _Field, *, by_name: bool) -> float:
        if by_name and text in self._numbers:
            return self._numbers[text]
        number = _number_in(text)
        if number is not None and not _whole_type(field.spec.dtype):
            return number
        if number is not None and number == np.floor(number) and abs(number) < 2**53:
            whole = int(number)
            if not any(name.isdigit() for name in self._numbers):
                return whole
            if str(whole) in self._numbers:  # 2.0 means the class called 2
                return self._numbers[str(whole)]
        found = f"{text!r:.80}" if text else "nothing"
        if not by_name:
            raise DataError(f"{field.place(at)}: {found}: must be a number")
        raise DataError(
            f"{field.place(at)}: {found} is not a class of the task; {self._known(text)}"
        )

    def _known(self, text: str) -> str:
        names = list(self._spec.classes)
        if not names:
            highest = self._spec.targets.highest
            numbers = "numbers" if highest is None else f"numbers from 0 to {highest}"
            return (
                f"its classes have no names: label with {numbers}, or name the classes in the "
                "coordinator's run.toml, [task] classes"
            )
        if close := difflib.get_close_matches(text, names, n=1, cutoff=0.6):
            return f"did you mean {close[0]!r}?"
        more = ", …" if len(names) > MAX_LISTED else ""
        return f"known are {', '.join(names[:MAX_LISTED])}{more}"

    def _class_words(self, number: int) -> str:
        names = self._spec.classes
        return repr(names[number]) if names else str(number)

    def _note(self, text: str) -> None:
        self._notes[text] = None


@dataclass(frozen=True, slots=True)
class _Field:
    """An array of a block, with what the task wants of it, for errors."""

    name: str
    spec: ArraySpec
    block: Block
    columns: tuple[str, ...]

    @property
    def original(self) -> Any:
        """The type that the source has."""
        if self.name == "y":
            return np.dtype(np.float64) if self.block.targets is None else self.block.targets.dtype
        return self.block.inputs[int(self.name[1:])].dtype

    def place(self, at: Sequence[Any]) -> str:
        """Return the place of a value: file, row, column."""
        sample, inner = int(at[0]), tuple(int(each) for each in at[1:])
        where = self.block.where(sample)
        if self.columns:
            flat = int(np.ravel_multi_index(inner, self.spec.shape)) if inner else 0
            if flat < len(self.columns):
                return f"{where}, column {self.columns[flat]!r}"
            return f"{where}, column {self.columns[flat % len(self.columns)]!r}"
        if not inner:
            return f"{where}, y" if self.name == "y" and self.block.values == "ready" else where
        return f"{where}, {self.name}[{', '.join(map(str, inner))}]"


def _standardised(array: Array, described: InputDescription) -> Array:
    mean = np.array(described.mean, np.float64)
    deviation = np.array(described.deviation, np.float64)
    if len(mean) > 1:
        sample = array.shape[1:]
        first = len(mean) == sample[0]
        shape = (len(mean), *[1] * (len(sample) - 1)) if first else (len(mean),)
        mean, deviation = mean.reshape(shape), deviation.reshape(shape)
    made: Array = (array - mean) / deviation
    return made


def _check_finite(array: Array, field: _Field) -> None:
    if not np.isfinite(array).all():
        place = _first(~np.isfinite(array))
        value = array[place]
        words = "nan (not a number)" if np.isnan(value) else str(value)
        raise DataError(f"{field.place(place)}: {words}: must be a finite number")


def _check_bounds(
    array: Array, low: float, high: float, field: _Field, wanted: str, *, bare: bool = False
) -> None:
    if not array.size or (array.min() >= low and array.max() <= high):
        return
    place = _first(~((array >= low) & (array <= high)))
    value = array[place].item()
    said = f"{value:g}" if isinstance(value, float) else str(value)
    if bare:
        raise DataError(f"{field.place(place)}: label {said}: {wanted}")
    raise DataError(f"{field.place(place)}: {said}: must be {wanted}")


def _first(wrong: Array) -> tuple[int, ...]:
    return tuple(int(at) for at in np.unravel_index(int(np.argmax(wrong)), wrong.shape))


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


def _whole_type(dtype: str) -> bool:
    return not dtype.startswith("float")


def _size(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "numbers"


def _number_in(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
