"""Several modes at once: what each rank trains, by number of ranks."""

TENSOR, PIPELINE = dict(tensor_parallel_degree=2), dict(pipeline_parallel_degree=2)
SEQUENCE = dict(sequence_parallel=True)
DATA = dict(per_device_train_batch_size=1)  # on two data ranks the same samples a step
SHARED = dict(sharding_parallel_degree=2, **DATA)

COMBINED = {
    4: {
        "tensor_pipeline": {**TENSOR, **SEQUENCE, **PIPELINE},
        "tensor_data": {**TENSOR, **DATA},
        "tensor_stage1": {**TENSOR, **SEQUENCE, **SHARED, "sharding": "stage1"},
        "tensor_stage2": {**TENSOR, **SHARED, "sharding": "stage2"},
        "pipeline_data": {**PIPELINE, **DATA},
        "pipeline_stage1": {**PIPELINE, **SHARED, "sharding": "stage1"},
    },
    8: {"tensor_pipeline_stage1": {**TENSOR, **SEQUENCE, **PIPELINE, **SHARED, "sharding": "stage1"}},
}
