"""How ``json_codec`` writes single values: text, numbers, and arrays bit for bit.

Each function takes a value, checks it and returns its other form; ``Mismatch`` says what is wrong.
"""

from __future__ import annotations

import binascii
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

_ARRAY_TYPES = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64"),
    )
}
_ARRAY_NAMES = {
    dtype.newbyteorder(order): name for name, dtype in _ARRAY_TYPES.items() for order in "<>"
}
_KNOWN_ARRAYS = ", ".join(_ARRAY_TYPES)


class Codec(NamedTuple):
    """Two inverse functions; both raise ``Mismatch``."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


class Mismatch(Exception):
    """What is wrong; the path is collected while it travels up (no cost while all is well)."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text
        self.path: list[str] = []

    def at(self, step: str) -> Mismatch:
        self.path.append(step)
        return self

    def where(self, cls: type) -> str:
        return cls.__name__ + "".join(reversed(self.path))


def expected(what: str, value: object) -> Mismatch:
    """The mismatch of a value that has the wrong type."""
    return Mismatch(f"expected {what}, got {type(value).__name__}")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise expected("text", value)
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise expected("true or false", value)
    return value


def _whole(value: Any) -> int:
    if type(value) is int:
        return value
    if not isinstance(value, np.integer):
        raise expected("a whole number", value)
    return int(value)


def _number(value: Any) -> float:
    if type(value) is not float:
        if isinstance(value, bool) or not isinstance(value, int | float | np.number):
            raise expected("a number", value)
        try:
            value = float(value)
        except OverflowError as e:
            raise Mismatch(f"{value} is too large") from e
    if not math.isfinite(value):
        raise Mismatch(f"{value} is not a finite number")
    return value


def _plain(value: Any) -> Any:
    """Free-form JSON (a model's configuration): tuples become lists, nothing else converts."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {_text(key): _plain(item) for key, item in value.items()}
    return _whole(value) if isinstance(value, int | np.integer) else _number(value)


def _encode_array(value: Any) -> dict[str, Any]:
    if not isinstance(value, np.ndarray):
        raise expected("a numpy array", value)
    name = _ARRAY_NAMES.get(value.dtype)
    if name is None:
        raise Mismatch(f"arrays of {value.dtype} cannot be stored; known: {_KNOWN_ARRAYS}")
    raw = value.astype(_ARRAY_TYPES[name], copy=False).tobytes()
    data = binascii.b2a_base64(raw, newline=False).decode("ascii")
    return {"data": data, "dtype": name, "shape": list(value.shape)}


def _decode_array(tree: Any) -> np.ndarray:
    if type(tree) is not dict or tree.keys() != {"data", "dtype", "shape"}:
        raise Mismatch("expected an array as an object with data, dtype and shape")
    name, shape, data = tree["dtype"], tree["shape"], tree["data"]
    if type(name) is not str or name not in _ARRAY_TYPES:
        raise Mismatch(f"unknown array type {name!r}; known: {_KNOWN_ARRAYS}")
    if type(shape) is not list or any(type(n) is not int or n < 0 for n in shape):
        raise Mismatch(f"{shape!r} is not an array shape")
    dtype = _ARRAY_TYPES[name]
    try:
        raw = binascii.a2b_base64(data, strict_mode=True)
    except (ValueError, TypeError) as e:
        raise Mismatch(f"array data is not base64: {e}") from e
    if len(raw) != math.prod(shape) * dtype.itemsize:
        raise Mismatch(f"array of shape {shape} and type {name} cannot have {len(raw)} bytes")
    return np.frombuffer(raw, dtype).reshape(shape)


LEAVES: dict[Any, Codec] = {
    str: Codec(_text, _text),
    bool: Codec(_flag, _flag),
    int: Codec(_whole, _whole),
    float: Codec(_number, _number),
    object: Codec(_plain, _plain),
    np.ndarray: Codec(_encode_array, _decode_array),
}
