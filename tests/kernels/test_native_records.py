"""The records that Python and the native library share."""

import ctypes

import pytest

from lorikeet.kernels.activation import Activation
from lorikeet.kernels.native import load_library, supported_instruction_sets
from lorikeet.kernels.native_records import RECORDS, LayerRecord, NativeActivation, NativeRecord, differing_record


@pytest.mark.parametrize("instruction_set", supported_instruction_sets())
def test_records_have_the_size_of_the_structs_of_the_library(instruction_set: str) -> None:
    record_bytes = load_library(instruction_set).lorikeet_record_bytes
    assert differing_record(record_bytes) is None
    assert record_bytes(b"Nothing") == 0


@pytest.mark.parametrize("changed", RECORDS, ids=lambda record: record.native_name)
def test_a_record_of_another_size_is_named(changed: type[NativeRecord]) -> None:
    sizes = {record.native_name: ctypes.sizeof(record) for record in RECORDS}
    sizes[changed.native_name] += 8
    assert differing_record(lambda name: sizes[name.decode()]) == changed.native_name


def test_every_activation_has_a_number() -> None:
    assert [NativeActivation.of(each) for each in Activation] == [0, 1]


def test_a_missing_tensor_is_null() -> None:
    assert LayerRecord(window=4).q_norm is None
