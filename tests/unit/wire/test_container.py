"""The safetensors container: what we write is what the library writes, and only whole files are read."""

from __future__ import annotations

import json
import mmap
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load, save

from miles_ref.errors import DecodeError
from miles_ref.wire import container

DTYPES = [np.dtype(name) for name in container.CODES]
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4))
)


@settings(deadline=None)
@given(st.dictionaries(st.text("abcé.012 _", min_size=1, max_size=6), ARRAYS, max_size=6))
def test_a_written_file_is_the_librarys_own_byte_for_byte(arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    ours = container.write([container.Tensor.of(name, array) for name, array in arrays.items()])
    assert ours == save(arrays)


@settings(deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=3).filter(str.isidentifier), ARRAYS, max_size=4))
def test_what_the_library_writes_is_read_with_its_values(arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    read = container.read(save(arrays))
    assert read.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(read[name].array(array.dtype.name), array)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(lambda a: a.T, id="transposed"),
        pytest.param(lambda a: a[::2], id="every-other-row"),
        pytest.param(lambda a: a[:, ::-1], id="reversed"),
        pytest.param(lambda a: np.asfortranarray(a), id="fortran-order"),
        pytest.param(lambda a: a.astype(">i4"), id="big-endian"),
    ],
)
def test_an_array_that_is_not_laid_out_in_order_is_written_with_its_own_values(layout: Any) -> None:
    array = layout(np.arange(24, dtype=np.int32).reshape(4, 6))
    np.testing.assert_array_equal(load(container.write([container.Tensor.of("a", array)]))["a"], array)


def file(header: Any, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def info(start: int, end: int, shape: list[Any] | None = None, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


HOSTILE = {
    "empty": b"",
    "no-header": b"\0" * 8,
    "header-beyond-the-file": (2**63).to_bytes(8, "little") + b"{}",
    "header-is-a-list": file(b"[]"),
    "header-is-no-json": file(b"{]"),
    "header-is-no-utf8": file(b'{"\xff": 1}'),
    "header-with-nan": file(b'{"a": NaN}'),
    "header-nested-without-end": file(b'{"a":' * 100_000),
    "name-twice": file(
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
        b"ab",
    ),
    "name-twice-with-the-same-value": file(
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"a",
    ),
    "key-twice": file(b'{"a":{"dtype":"F8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"a"),
    "overlap": file({"a": info(0, 4), "b": info(2, 6)}, b"abcdef"),
    "hole": file({"a": info(0, 2), "b": info(3, 4)}, b"abcd"),
    "trailing-bytes": file({"a": info(0, 2)}, b"abc"),
    "out-of-range": file({"a": info(0, 5)}, b"abc"),
    "negative-offset": file({"a": info(-1, 1, [2])}, b"ab"),
    "reversed-offsets": file({"a": info(2, 0, [0])}, b"ab"),
    "negative-shape": file({"a": info(0, 4, [-2, -2])}, b"abcd"),
    "huge-shape": file({"a": info(0, 1, [2**62, 2**62])}, b"a"),
    "huge-shape-of-no-bytes": file({"a": info(0, 0, [2**40, 2**40, 0])}, b""),
    "huge-shape-behind-a-zero": file({"a": info(0, 0, [0, 2**70])}, b""),
    "shape-of-another-size": file({"a": info(0, 4, [3])}, b"abcd"),
    "bool-in-shape": file({"a": info(0, 1, [True])}, b"a"),
    "float-in-shape": file({"a": info(0, 1, [1.0])}, b"a"),
    "unknown-dtype": file({"a": info(0, 1, dtype="I4")}, b"a"),
    "dtype-is-a-list": file({"a": {**info(0, 1), "dtype": ["U8"]}}, b"a"),
    "no-offsets": file({"a": {"dtype": "U8", "shape": [0]}}),
    "tensor-is-null": file({"a": None}),
    "metadata-of-numbers": file({"__metadata__": {"a": 1}}),
}


@pytest.mark.parametrize("payload", HOSTILE.values(), ids=HOSTILE)
def test_a_broken_file_is_refused(payload: bytes) -> None:
    with pytest.raises(DecodeError, match="not a safetensors file"):
        container.read(payload)


def test_the_librarys_own_metadata_is_no_tensor() -> None:
    assert container.read(save({"a": np.zeros(1)}, metadata={"made": "elsewhere"})).keys() == {"a"}


@pytest.mark.parametrize(("payload", "said"), [(b"", "0 bytes"), (bytes(7), "7 bytes"), (bytes(8), "header")])
def test_too_short_for_a_headers_length_is_not_an_empty_header(payload: bytes, said: str) -> None:
    with pytest.raises(DecodeError, match=said) as caught:
        container.read(payload)
    assert ("hold no header length" in str(caught.value)) == (len(payload) < 8)


def test_a_header_is_as_long_as_the_library_allows() -> None:
    size = 100_000_001
    with mmap.mmap(-1, 8 + size) as file:  # Nothing of it is touched but the length.
        file[:8] = size.to_bytes(8, "little")
        with pytest.raises(DecodeError, match=f"a header of {size} bytes in a payload of {size + 8}"):
            container.read(memoryview(file))
