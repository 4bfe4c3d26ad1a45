"""On PYTHONPATH, makes every launched worker process use `cpu_gloo`; Python imports a module of this name by itself."""

import os

if "PADDLE_TRAINER_ID" in os.environ:  # set for workers only
    import cpu_gloo  # noqa: F401
