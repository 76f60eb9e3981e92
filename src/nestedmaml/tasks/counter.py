"""Random numbers by counter: a pure function of (seed, stream, index), whatever was drawn before.

SplitMix64's finaliser, applied once per key, is enough mixing for drawing tasks, and it is vectorised over all
indices at once, which a generator per task is not.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Shuffle", "bits", "integers", "uniform"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def bits(seed: int, stream: str, *index: ArrayLike) -> NDArray[np.uint64]:
    """64 random bits for every element of the broadcast ``index``."""
    with np.errstate(over="ignore"):
        h = _mix(np.uint64(seed % 2**64) + _GOLDEN * np.uint64(zlib.crc32(stream.encode()) + 1))
        for part in index:
            h = _mix(h + _GOLDEN * (np.asarray(part).astype(np.uint64) + np.uint64(1)))
    return np.asarray(h)


def uniform(seed: int, stream: str, *index: ArrayLike, low: float = 0.0, high: float = 1.0) -> NDArray[np.float64]:
    """Uniform numbers in ``[low, high)``."""
    unit = (bits(seed, stream, *index) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return np.asarray(low + (high - low) * unit, dtype=np.float64)


def integers(seed: int, stream: str, *index: ArrayLike, high: int) -> NDArray[np.int64]:
    """Uniform integers in ``[0, high)``."""
    return np.minimum((uniform(seed, stream, *index) * high).astype(np.int64), high - 1)


class Shuffle:
    """A random permutation of ``range(size)`` that is computed where it is asked for, not stored.

    A four-round Feistel network on the smallest even number of bits that holds ``size``; what falls outside is
    sent through again, which ends since the network is a bijection.
    """

    def __init__(self, size: int, seed: int, stream: str) -> None:
        self.size, self.seed, self.stream = size, seed, stream
        self._half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))

    def __call__(self, index: ArrayLike) -> NDArray[np.int64]:
        """Where the permutation takes each index."""
        out = np.array(index, dtype=np.uint64, ndmin=1)
        if out.size and int(out.max()) >= self.size:
            raise IndexError(f"index {int(out.max())} is outside of 0 ... {self.size - 1}")
        out = self._network(out)
        while (outside := out >= self.size).any():
            out[outside] = self._network(out[outside])
        return out.astype(np.int64).reshape(np.shape(index))

    def _network(self, value: NDArray[np.uint64]) -> NDArray[np.uint64]:
        mask = (np.uint64(1) << self._half) - np.uint64(1)
        left, right = value >> self._half, value & mask
        for r in range(4):
            left, right = right, left ^ (bits(self.seed, self.stream, r, right) & mask)
        return (left << self._half) | right


def _mix(h: Any) -> Any:
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))
