"""ernie35se: pretraining, fine-tuning and prediction for ERNIE-3.5-SE on PaddlePaddle."""

__version__ = "0.1.0"
