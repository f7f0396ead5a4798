"""The samples payload: one safetensors file that holds exactly what the table in wire.md lists."""

from miles_ref.wire.decode import SamplesReply, decode_samples_and_merge_input_sample
from miles_ref.wire.encode import encode_samples
from miles_ref.wire.spec import (
    COMPUTED_FIELDS,
    COMPUTED_FIELDS_V2,
    EMPTY_REASONS,
    SAMPLES_VALUE_SPEC,
    SAMPLES_VALUE_SPEC_V2,
    ValueSpec,
)

__all__ = [
    "COMPUTED_FIELDS",
    "COMPUTED_FIELDS_V2",
    "EMPTY_REASONS",
    "SAMPLES_VALUE_SPEC",
    "SAMPLES_VALUE_SPEC_V2",
    "SamplesReply",
    "ValueSpec",
    "decode_samples_and_merge_input_sample",
    "encode_samples",
]
