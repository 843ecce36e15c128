"""Convolutions of two dimensions on images in blocks of channels, onnxruntime's NCHWc layout.

The innermost dimension is a block of 8 or 16 channels, as many as the processor computes with at
once. onnxruntime uses these operators itself where a filter is constant; here filters are inputs,
so the graph puts them into blocks: with `ReorderInput`, which does that to images, so no number
here depends on the size of a block.

    image   [n, c, h, w]        → [n, c / block, h, w, block]
    filter  [o, i, h, w]        → [o / block, i / block, h, w, block of i, block of o]
            [c, 1, h, w]        → [c / block, h, w, block], each channel by itself

Channels that do not fill a block are filled up with zeros, but must be a multiple of `ALIGNED`.
Where every channel is by itself, so is every sample: all of them together are the channels of one
image, and only their number must fill blocks (`BLOCK`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coordinator.task.graphs.onnx.builder import Builder, OnnxValue, WayMaker
from coordinator.task.graphs.onnx.operators.registry import fixed
from coordinator.task.graphs.symbols import Shape, Size, multiply
from edge_sdk.protocol.task.graphs import CONTRIBUTED

(DOMAIN,) = CONTRIBUTED
ALIGNED = 4
BLOCK = 16
"""The largest block that there is."""
SMALLEST = 8
"""The smallest block; an image with fewer channels is not put into blocks at all."""
NAME = "blocked"


def is_depthwise(weight: Shape, groups: Size) -> bool:
    """True if every channel is convolved by itself."""
    return weight[0] == groups and weight[1] == 1 and groups != 1


def can_be_blocked(weight: Shape) -> bool:
    """True unless a fixed number of channels never fits."""
    outputs, inputs = weight[:2]
    narrow = isinstance(inputs, int) and inputs < SMALLEST
    sides = (outputs,) if narrow else (outputs, inputs)
    return not any(isinstance(size, int) and size % ALIGNED for size in sides)


def blocked_convolution(
    builder: Builder,
    x: OnnxValue,
    weight: OnnxValue,
    bias: OnnxValue | None,
    result: Shape,
    strides: Sequence[int],
    pads: Sequence[int],
    *,
    depthwise: bool,
    backwards: bool = False,
) -> WayMaker:
    """Convolve; `backwards`: by the mirrored filter from its outputs to its inputs."""
    kernel = fixed(weight.shape[2:], "a kernel's size")
    channels = result[1]
    narrow = isinstance(x.shape[1], int) and x.shape[1] < SMALLEST and not backwards

    def make() -> str:
        b = builder
        if depthwise:
            return _by_channel(b, x, weight, bias, result, strides, pads, backwards)
        if narrow:
            name, filters = b.full(x), _filled_narrow(b, weight, kernel)
        else:
            name = b.emit("ReorderInput", b.full(x), domain=DOMAIN)
            if backwards:
                filters = _mirrored(b, weight, kernel)
            else:
                filters = _filled(b, b.full(weight), weight.shape[0], kernel)
        names = [name, filters]
        if bias is not None:
            filled = b.emit("Reshape", b.full(bias), b.ints([1, -1, 1, 1]))
            filled = b.emit("ReorderInput", filled, domain=DOMAIN)
            names.append(b.emit("Reshape", filled, b.ints([-1])))
        name = b.emit("Conv", *names, domain=DOMAIN, **_sizes(kernel, strides, pads))
        return b.emit("ReorderOutput", name, channels=channels, domain=DOMAIN)

    if depthwise:
        return WayMaker(NAME, make, ((multiply(x.shape[0], channels), BLOCK),))
    sides = (channels,) if narrow else (x.shape[1], channels)
    return WayMaker(NAME, make, tuple((size, ALIGNED) for size in dict.fromkeys(sides)))


def blocked_weight_gradient(
    builder: Builder,
    x: OnnxValue,
    grad: OnnxValue,
    kernel: Sequence[int],
    strides: Sequence[int],
    pads: Sequence[int],
) -> WayMaker:
    """Compute the gradient of a filter: batch and channels swap places, gradients are the filter.

    The image is padded before it is put into blocks: at an edge that the operator pads, it computes
    one position at a time, and here there are hardly any others.
    """
    image = fixed(x.shape[2:], "an image's size")
    out = fixed(grad.shape[2:], "an image's size")
    ends = [
        pad + more
        for pad, more in zip(pads[2:], _rest(kernel, image, out, strides, pads), strict=True)
    ]

    def make() -> str:
        b = builder
        seen = b.emit("Transpose", b.full(x), perm=[1, 0, 2, 3])
        if any((*pads[:2], *ends)):
            seen = b.emit("Pad", seen, b.ints([0, 0, *pads[:2], 0, 0, *ends]))
        seen = b.emit("ReorderInput", seen, domain=DOMAIN)
        filters = b.emit("Transpose", b.full(grad), perm=[1, 0, 2, 3])
        filters = _filled(b, filters, grad.shape[1], out)
        name = b.emit(
            "Conv", seen, filters, domain=DOMAIN, kernel_shape=out, dilations=list(strides)
        )
        name = b.emit("ReorderOutput", name, channels=grad.shape[1], domain=DOMAIN)
        return b.emit("Transpose", name, perm=[1, 0, 2, 3])

    return WayMaker(NAME, make, ((x.shape[0], ALIGNED), (grad.shape[1], ALIGNED)))


def _rest(
    kernel: Sequence[int],
    image: Sequence[int],
    out: Sequence[int],
    strides: Sequence[int],
    pads: Sequence[int],
) -> list[int]:
    """Return the rows that a padded image lacks; below 0: those that no kernel position covers."""
    return [
        k + stride * (o - 1) - size - 2 * pad
        for k, size, pad, stride, o in zip(kernel, image, pads, strides, out, strict=False)
    ]


def depthwise_weight_gradient(
    builder: Builder,
    x: OnnxValue,
    grad: OnnxValue,
    kernel: Sequence[int],
    strides: Sequence[int],
    pads: Sequence[int],
) -> WayMaker:
    """Compute the gradient of a depthwise filter: convolve every image with its gradient."""
    channels = multiply(x.shape[0], x.shape[1])
    image = fixed(x.shape[2:], "an image's size")
    out = fixed(grad.shape[2:], "an image's size")

    def make() -> str:
        b = builder
        seen = b.emit("ReorderInput", _as_one(b, b.full(x), image), domain=DOMAIN)
        filters = b.emit("ReorderInput", _as_one(b, b.full(grad), out), domain=DOMAIN)
        filters = b.emit("Reshape", filters, b.ints([-1, 1, *out]))
        rest = _rest(kernel, image, out, strides, pads)
        ends = [max(0, pad + more) for pad, more in zip(pads[2:], rest, strict=True)]
        covered = [
            k + end - pad - more
            for k, end, pad, more in zip(kernel, ends, pads[2:], rest, strict=True)
        ]
        name = b.emit(
            "Conv",
            seen,
            filters,
            domain=DOMAIN,
            group=channels,
            dilations=list(strides),
            pads=[*pads[:2], *ends],
            kernel_shape=out,
        )
        name = b.emit("ReorderOutput", name, channels=channels, domain=DOMAIN)
        if covered != list(kernel):
            name = b.emit("Slice", name, b.ints([0, 0]), b.ints(kernel), b.ints([2, 3]))
        rows = b.emit("Concat", b.size(x.shape[0]), b.ints([-1]), axis=0)
        name = b.emit("ReduceSum", b.emit("Reshape", name, rows), b.ints([0]), keepdims=0)
        return b.emit("Reshape", name, b.ints([-1, 1, *kernel]))

    return WayMaker(NAME, make, ((channels, BLOCK),))


def _by_channel(
    builder: Builder,
    x: OnnxValue,
    weight: OnnxValue,
    bias: OnnxValue | None,
    result: Shape,
    strides: Sequence[int],
    pads: Sequence[int],
    backwards: bool,
) -> str:
    b = builder
    kernel = fixed(weight.shape[2:], "a kernel's size")
    batch = b.size(x.shape[0])
    name = _as_one(b, b.full(x), fixed(x.shape[2:], "an image's size"))
    name = b.emit("ReorderInput", name, domain=DOMAIN)
    filters = b.full(weight)
    if backwards:
        ends = (b.ints([-1, -1]), b.ints([-(2**31), -(2**31)]))
        filters = b.emit("Slice", filters, *ends, b.ints([2, 3]), b.ints([-1, -1]))
    times = b.emit("Concat", batch, b.ints([1, 1, 1]), axis=0)
    filters = _as_one(b, b.emit("Tile", filters, times), kernel)
    filters = b.emit("ReorderInput", filters, domain=DOMAIN)
    names = [name, b.emit("Reshape", filters, b.ints([-1, 1, *kernel]))]
    if bias is not None:
        names.append(b.emit("Tile", b.full(bias), batch))
    channels = multiply(x.shape[0], result[1])
    name = b.emit("Conv", *names, domain=DOMAIN, group=channels, **_sizes(kernel, strides, pads))
    name = b.emit("ReorderOutput", name, channels=channels, domain=DOMAIN)
    out = fixed(result[2:], "an image's size")
    shape = b.emit("Concat", batch, b.ints([-1, *out]), axis=0)
    return b.emit("Reshape", name, shape)


def _sizes(
    kernel: Sequence[int], strides: Sequence[int], pads: Sequence[int]
) -> dict[str, list[int]]:
    return {"kernel_shape": list(kernel), "strides": list(strides), "pads": list(pads)}


def _as_one(builder: Builder, name: str, image: Sequence[int]) -> str:
    """Make all samples the channels of one image."""
    return builder.emit("Reshape", name, builder.ints([1, -1, *image]))


def _filled(builder: Builder, filters: str, outputs: Size, kernel: Sequence[int]) -> str:
    """Put a filter into blocks: of its inputs first, then of its outputs."""
    b = builder
    name = b.emit("Reshape", filters, b.ints([0, 0, -1, 1]))
    name = b.emit("ReorderInput", name, domain=DOMAIN)
    inputs = b.emit("Shape", name, start=1, end=2)
    rows = b.emit("Concat", b.ints([1]), b.size(outputs), b.ints([-1, 1]), axis=0)
    name = b.emit("ReorderInput", b.emit("Reshape", name, rows), domain=DOMAIN)
    shape = b.emit("Concat", b.ints([-1]), inputs, b.ints(kernel), axis=0)
    return b.emit("Reshape", name, shape)


def _filled_narrow(builder: Builder, weight: OnnxValue, kernel: Sequence[int]) -> str:
    """Put a filter into blocks of its outputs."""
    b = builder
    rows = b.emit("Concat", b.ints([1]), b.size(weight.shape[0]), b.ints([-1, 1]), axis=0)
    name = b.emit("ReorderInput", b.emit("Reshape", b.full(weight), rows), domain=DOMAIN)
    shape = b.emit("Concat", b.ints([-1]), b.size(weight.shape[1]), b.ints(kernel), axis=0)
    return b.emit("Reshape", name, shape)


def _mirrored(builder: Builder, weight: OnnxValue, kernel: Sequence[int]) -> str:
    """Put a filter into blocks whose inputs and outputs change places, last position first."""
    b = builder
    taps = kernel[0] * kernel[1]
    block = b.constant(np.zeros((1, ALIGNED, 1, 1), dtype=np.float32))
    block = b.emit("Shape", b.emit("ReorderInput", block, domain=DOMAIN), start=1, end=2)
    # Blocks of the outputs, which become inputs: [o / block, i, taps, block of o].
    rows = b.emit("Concat", b.ints([1]), b.size(weight.shape[0]), b.ints([-1, 1]), axis=0)
    name = b.emit("ReorderInput", b.emit("Reshape", b.full(weight), rows), domain=DOMAIN)
    inputs = b.emit("Shape", name, start=1, end=2)
    # Then of the inputs: [o / block, i / block, taps, block of o, block of i].
    both = b.emit("Mul", block, b.ints([taps]))
    shape = b.emit("Concat", b.ints([-1]), b.size(weight.shape[1]), both, b.ints([1]), axis=0)
    name = b.emit("ReorderInput", b.emit("Reshape", name, shape), domain=DOMAIN)
    square = b.emit("Mul", block, block)
    shape = b.emit("Concat", b.ints([0, -1, taps]), square, axis=0)
    name = b.emit("Transpose", b.emit("Reshape", name, shape), perm=[1, 0, 2, 3])
    name = b.emit("Gather", name, b.ints(list(range(taps))[::-1]), axis=2)
    shape = b.emit("Concat", b.ints([-1]), inputs, b.ints(kernel), axis=0)
    return b.emit("Reshape", name, shape)
