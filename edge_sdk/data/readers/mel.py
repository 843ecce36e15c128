"""Log-mel frames of sound, with numpy.

A frame is `frame` samples times a Hann window (periodic); frames start `hop` samples apart. Its
power spectrum |DFT|² is summed in `mels` triangles that overlap by half and are evenly spaced from
0 Hz to half the sample rate on the mel scale 2595 · log₁₀(1 + f / 700); the result is the natural
logarithm of that sum, of at least 10⁻¹⁰.
"""

from __future__ import annotations

import numpy as np

from edge_sdk.protocol.plan.layout import Array

FLOOR = 1e-10
"""Least power of a band; its logarithm is −23."""


def mel_filters(sample_rate: int, frame: int, mels: int) -> Array:
    """Return the weights of the spectrum's lines in each band: bands × lines, float64."""
    lines = np.arange(frame // 2 + 1) * (sample_rate / frame)
    top = 2595.0 * np.log10(1.0 + sample_rate / 2 / 700.0)
    edges = 700.0 * (10.0 ** (np.linspace(0.0, top, mels + 2) / 2595.0) - 1.0)
    low, centre, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising = (lines - low) / (centre - low)
    falling = (high - lines) / (high - centre)
    weights: Array = np.maximum(0.0, np.minimum(rising, falling))
    return weights


def log_mels(samples: Array, sample_rate: int, frame: int, hop: int, mels: int) -> Array:
    """Return the log-mel frames of sound: bands × frames, float64.

    `samples` are one channel, from −1 to 1; there are 1 + (samples − frame) // hop frames.
    """
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(frame) / frame)
    frames = np.lib.stride_tricks.sliding_window_view(samples, frame)[::hop]
    power = np.abs(np.fft.rfft(frames * window, axis=-1)) ** 2
    bands = power @ mel_filters(sample_rate, frame, mels).T
    made: Array = np.log(np.maximum(bands, FLOOR)).T
    return made
