"""Training: settings, trainer, checkpoints, callbacks, metrics."""
