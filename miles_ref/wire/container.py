"""The safetensors container: written in one join, read strictly (wire.md, layout).

A file is the header's length (8 bytes, little-endian), a JSON header, and the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from miles_ref.errors import DecodeError
from miles_ref.limits import MAX_ARRAY_BYTES

CODES = {"int64": "I64", "float64": "F64", "int32": "I32", "uint8": "U8"}
"""numpy dtype -> safetensors' code, in the order in which tensors are laid out."""

_ORDER = {code: at for at, code in enumerate(CODES.values())}
_CODES_BY_WIDTH = {
    1: ("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"),
    2: ("I16", "U16", "F16", "BF16"),
    4: ("I32", "U32", "F32"),
    8: ("I64", "U64", "F64", "C64"),
}
_WIDTHS = {code: width for width, codes in _CODES_BY_WIDTH.items() for code in codes}
_ALIGNMENT = 8
_MAX_HEADER = 100_000_000  # safetensors' own limit
_INFO_KEYS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to be written. `chunks` are its little-endian bytes in C order, in pieces."""

    name: str
    code: str
    shape: tuple[int, ...]
    chunks: Sequence[bytes | memoryview]

    @classmethod
    def of(cls, name: str, array: npt.NDArray[Any]) -> Tensor:
        """The tensor of an array of one of the CODES' types, made contiguous."""
        flat = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        return cls(name, CODES[array.dtype.name], array.shape, [flat.reshape(-1).view(np.uint8).data])


def write(tensors: Sequence[Tensor]) -> bytes:
    """The file: tensors ordered by type, then by name as text; no metadata; header padded with spaces to 8 bytes."""
    header: dict[str, Any] = {}
    chunks: list[bytes | memoryview] = []
    offset = 0
    for tensor in sorted(tensors, key=lambda one: (_ORDER[one.code], one.name)):
        size = sum(len(chunk) for chunk in tensor.chunks)
        header[tensor.name] = {
            "dtype": tensor.code,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        chunks.extend(tensor.chunks)
        offset += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return b"".join((len(text).to_bytes(8, "little"), text, *chunks))


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file; `raw` is a view of its bytes."""

    code: str
    shape: tuple[int, ...]
    raw: memoryview

    def array(self, dtype: str) -> npt.NDArray[Any]:
        """The values, as a view of the file's bytes. `dtype` must be the one of the code."""
        return np.frombuffer(self.raw, dtype=np.dtype(dtype).newbyteorder("<")).reshape(self.shape)


def read(payload: bytes | bytearray | memoryview) -> dict[str, StoredTensor]:
    """The tensors of a file by name. Raises DecodeError for anything that is not a whole, gapless safetensors file."""
    view = memoryview(payload).cast("B")
    if len(view) < 8:
        raise _malformed(f"{len(view)} bytes hold no header length")
    size = int.from_bytes(view[:8], "little")
    if size > min(len(view) - 8, _MAX_HEADER):
        raise _malformed(f"a header of {size} bytes in a payload of {len(view)}")
    header = _header(bytes(view[8 : 8 + size]))
    data = view[8 + size :]
    spans: list[tuple[int, int, str]] = []
    tensors = {}
    for name, info in header.items():
        if name == "__metadata__":
            _check_metadata(info)
            continue
        code, shape, start, end = _info(name, info)
        spans.append((start, end, name))
        tensors[name] = StoredTensor(code, shape, data[start:end])
    _check_gapless(spans, len(data))
    return tensors


def _header(raw: bytes) -> Mapping[str, Any]:
    if raw[:1] != b"{":
        raise _malformed("the header is not a JSON object")
    try:
        header: dict[str, Any] = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError as error:
        raise _malformed("the header is nested too deeply") from error
    except ValueError as error:
        raise _malformed(f"the header is not JSON: {error}") from error
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r:.100} is there twice")
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _check_metadata(info: Any) -> None:
    if not isinstance(info, dict) or not all(isinstance(value, str) for value in info.values()):
        raise _malformed("__metadata__ is not an object of texts")


def _info(name: str, info: Any) -> tuple[str, tuple[int, ...], int, int]:
    if not isinstance(info, dict) or info.keys() != _INFO_KEYS:
        raise _malformed(f"tensor {name!r:.100} is described by {info!r:.100}")
    code, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(code, str) or code not in _WIDTHS:
        raise _malformed(f"tensor {name!r:.100} has dtype {code!r:.100}")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise _malformed(f"tensor {name!r:.100} has shape {shape!r:.100} and data_offsets {offsets!r:.100}")
    start, end = offsets
    if prod(filter(None, shape)) * _WIDTHS[code] > MAX_ARRAY_BYTES:
        # No array can have such a shape, also where another dimension is 0 and there are no bytes at all.
        raise _malformed(f"tensor {name!r:.100} of {code} has shape {shape!r:.100}, which is beyond any memory")
    if end - start != prod(shape) * _WIDTHS[code]:
        raise _malformed(f"tensor {name!r:.100} of {code} and shape {shape!r:.100} has {end - start} bytes")
    return code, tuple(shape), start, end


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_gapless(spans: list[tuple[int, int, str]], size: int) -> None:
    covered = 0
    for start, end, name in sorted(spans):
        if start != covered:
            raise _malformed(f"tensor {name!r:.100} begins at byte {start}, the bytes before it end at {covered}")
        covered = end
    if covered != size:
        raise _malformed(f"the tensors have {covered} bytes, the file has {size}")


def _malformed(what: str) -> DecodeError:
    return DecodeError(f"samples payload: not a safetensors file: {what}")
