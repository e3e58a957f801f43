"""Short texts that MLX takes for a program that it has loaded.

MLX 0.32 keeps a loaded program under its kernel's name and the hash of its machine code, and to find it hashes that
code at every launch: 7 us of the host for 40 KB, as long as all the rest of a launch. A text of eight bytes with the
same hash finds it as well.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable

_LIBRARY = "libstdc++.so.6"
_HASH = "_ZSt11_Hash_bytesPKvmm"
_SEED = 0xC70F6907
"""Seed of `std::hash<std::string>` in libstdc++."""
_FACTOR = 0xC6A4A7935BD1E995
_WORD = (1 << 64) - 1
_INVERSE = pow(_FACTOR, -1, 1 << 64)
_BYTES = 8

Hash = Callable[[bytes], int]


def library_hash() -> Hash:
    """Return `std::hash<std::string>` of the C++ library that MLX uses. Raises OSError and AttributeError where there
    is another one."""
    function = getattr(ctypes.CDLL(_LIBRARY), _HASH)
    function.restype = ctypes.c_size_t
    function.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t]

    def hashed(text: bytes) -> int:
        return int(function(text, len(text), _SEED))

    return hashed


def short_name(image: bytes, hashed: Hash) -> bytes:
    """Return eight bytes with the hash of `image`: MurmurHash64A of one word, computed backwards.

    Raises ValueError where `hashed` is another function, and returns an image as short as that itself.
    """
    if len(image) <= _BYTES:
        return image
    wanted = hashed(image)
    mixed = _unmixed(wanted) * _INVERSE & _WORD
    last = _unmixed(mixed) * _INVERSE & _WORD
    word = _unmixed((last ^ _SEED ^ _BYTES * _FACTOR & _WORD) * _INVERSE & _WORD) * _INVERSE & _WORD
    name = struct.pack("<Q", word)
    if hashed(name) != wanted:
        raise ValueError(f"the hash of {_LIBRARY} is not MurmurHash64A")
    return name


def _unmixed(word: int) -> int:
    """Undo the shift of the upper bits into the lower ones, which undoes itself."""
    return word ^ word >> 47
