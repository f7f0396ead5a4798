"""The safetensors container: 8 bytes of header length, a JSON header, the tensors' bytes (wire.md, Layout).

Written here rather than through the library, because one join of buffers is the only copy that a payload needs; the
tests hold the bytes against the library's. Read here, because a payload comes from outside: every offset is checked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from miles_ref.errors import DecodeError
from miles_ref.wire.spec import DTYPES

Array = npt.NDArray[Any]

_ORDER = {name: place for place, name in enumerate(DTYPES)}
_MAX_HEADER = 100_000_000  # bytes; the format's own limit


def write(tensors: Iterable[tuple[str, str, Array]]) -> bytes:
    """Lay out (name, dtype name, array) by dtype, then by name. Views are made contiguous."""
    entries: list[str] = []
    buffers: list[Any] = []
    at = 0
    for name, dtype, array in sorted(tensors, key=lambda tensor: (_ORDER[tensor[1]], tensor[0])):
        contiguous = np.ascontiguousarray(array)
        shape = ",".join(map(str, array.shape))
        entries.append(
            f'{json.dumps(name)}:{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[{at},{at + array.nbytes}]}}'
        )
        if array.nbytes:
            buffers.append(contiguous.reshape(-1).view(np.uint8).data)
        at += array.nbytes
    header = f"{{{','.join(entries)}}}".encode()
    header += b" " * (-len(header) % 8)
    return b"".join([len(header).to_bytes(8, "little"), header, *buffers])


def read(payload: bytes | bytearray | memoryview) -> dict[str, tuple[str, Array]]:
    """name -> (dtype name, array view on the payload). Raises DecodeError for anything that is not a container."""
    view = memoryview(payload).cast("B")
    if len(view) < 8:
        raise DecodeError(f"not a safetensors file: {len(view)} bytes, at least 8 are needed")
    size = int.from_bytes(view[:8], "little")
    if size > min(_MAX_HEADER, len(view) - 8):
        raise DecodeError(f"not a safetensors file: a header of {size} bytes in a file of {len(view)} bytes")
    header = _header(bytes(view[8 : 8 + size]))
    data = view[8 + size :]
    tensors: dict[str, tuple[str, Array]] = {}
    at = 0
    for begin, end, name, dtype, shape in sorted(_entry(name, entry) for name, entry in header.items()):
        if begin != at:
            raise DecodeError(f"tensor {name!r} begins at byte {begin}; the tensor before it ends at {at}")
        if end > len(data):
            raise DecodeError(f"tensor {name!r} ends at byte {end}; the file has {len(data)} bytes of tensors")
        kind = DTYPES[dtype]
        tensors[name] = dtype, np.frombuffer(data[begin:end], dtype=kind).reshape(shape)
        at = end
    if at != len(data):
        raise DecodeError(f"{len(data) - at} bytes after the last tensor belong to no tensor")
    return tensors


def _header(raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"not a safetensors file: the header is not JSON ({error})") from error
    if not isinstance(header, dict) or not raw.startswith(b"{"):
        raise DecodeError("not a safetensors file: the header is not a JSON object")
    header.pop("__metadata__", None)
    return header


def _entry(name: str, entry: Any) -> tuple[int, int, str, str, tuple[int, ...]]:
    """(begin, end, name, dtype, shape), checked against each other."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise DecodeError(
            f"tensor {name!r}: the header entry must hold dtype, shape and data_offsets, not {entry!r:.80}"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise DecodeError(f"tensor {name!r}: dtype {dtype!r:.40} is not one of {', '.join(DTYPES)}")
    if not _counts(shape) or len(shape) > 8:
        raise DecodeError(f"tensor {name!r}: shape {shape!r:.80} is not a short list of counts")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise DecodeError(f"tensor {name!r}: data_offsets {offsets!r:.80} are not [begin, end]")
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != needed:
        raise DecodeError(f"tensor {name!r}: {dtype} of shape {shape} takes {needed} bytes, its offsets are {offsets}")
    return offsets[0], offsets[1], name, dtype, tuple(shape)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
