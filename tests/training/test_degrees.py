"""Parallel degrees that fit together, and those that do not."""

import pytest

from ernie35se.training.degrees import Degrees, first_fault


@pytest.mark.parametrize(
    "degrees, devices, extra",
    [
        (Degrees(), 1, {}),
        (Degrees(), 8, {}),
        (Degrees(sharding=8, stage="stage2"), 8, {}),
        (Degrees(tensor=2, pipeline=2, sharding=2, stage="stage1", sequence_parallel=True), 16, dict(seq_length=4096)),
        (Degrees(pipeline=4, virtual=2), 8, dict(accumulation=8)),
        (Degrees(tensor=2, sharding=2, stage="stage2"), 4, {}),
    ],
)
def test_what_fits_is_accepted(degrees, devices, extra):
    assert first_fault(degrees, devices, **extra) is None


@pytest.mark.parametrize(
    "degrees, devices, extra, name, words",
    [
        (Degrees(tensor=2), 1, {}, "tensor_parallel_degree", "the degrees need 2"),
        (Degrees(pipeline=4), 1, {}, "pipeline_parallel_degree", "the degrees need 4"),
        (Degrees(tensor=2, pipeline=3), 8, {}, "tensor_parallel_degree", "x sharding 1 = 6 devices do not divide the 8"),
        (Degrees(tensor=4), 2, {}, "tensor_parallel_degree", "= 4 devices do not divide the 2"),
        (Degrees(sharding=2), 2, {}, "sharding_parallel_degree", "no sharding is on"),
        (Degrees(sequence_parallel=True), 2, {}, "sequence_parallel", "tensor_parallel_degree is 1"),
        (Degrees(tensor=2, sequence_parallel=True), 2, dict(seq_length=513), "max_seq_length", "degree 2"),
        (Degrees(pipeline=2, sharding=2, stage="stage2"), 4, {}, "sharding", "only stage1"),
        (Degrees(tensor=2, sharding=2, stage="stage3"), 4, {}, "sharding", "only stage1 and stage2"),
        (Degrees(virtual=2), 2, {}, "virtual_pp_degree", "no stages to interleave"),
        (Degrees(pipeline=2, virtual=2), 2, dict(accumulation=4), "virtual_pp_degree", "three stages or more"),
        (Degrees(pipeline=4, virtual=2), 4, dict(accumulation=6), "gradient_accumulation_steps", "degree 4"),
    ],
)
def test_what_does_not_fit_is_named_with_the_numbers(degrees, devices, extra, name, words):
    fault = first_fault(degrees, devices, **extra)
    assert fault.name == name and words in fault.expected
