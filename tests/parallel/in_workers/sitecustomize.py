"""On PYTHONPATH, makes every launched worker process use `cpu_gloo`; Python imports a module of this name by itself."""

import atexit
import os
import time

if "PADDLE_TRAINER_ID" in os.environ:  # set for workers only
    import cpu_gloo  # noqa: F401

    if os.environ["PADDLE_TRAINER_ID"] == "0":  # it serves the others' connections, so it leaves last
        atexit.register(time.sleep, 1)
