"""Paddle's AdamW with its clipping and its update in one op, where the CPU ops are built.

Paddle's clipping reads all gradients and writes a clipped copy of each; the update then reads those, tensor by tensor. Here
the gradients are read once for their norm, and once in the update, which multiplies by the clip's factor as it goes.
"""

from __future__ import annotations

from typing import Dict, List, Optional, Tuple

import numpy as np
import paddle
from paddle.base import framework
from paddle.base.layer_helper import LayerHelper
from paddle.nn import ClipGradByGlobalNorm

from .. import cpu_ops

Pairs = List[Tuple[paddle.Tensor, paddle.Tensor]]  # (parameter, its gradient)


class AdamW(paddle.optimizer.AdamW):
    """paddle.optimizer.AdamW: same arguments, same results to rounding, same state; each can continue from the other's.

    Float32 training on CPU in one process takes the op. All else is Paddle's own: many processes, other devices and
    dtypes, parameter groups, sparse gradients, regularizers, clipping of another kind, a gradient scaler. The gradients
    themselves stay unclipped, as Paddle leaves them.
    """

    def _apply_optimize(self, loss, startup_program, params_grads, param_group_idx=0):
        ops = self._ops_for(params_grads)
        if ops is None:
            return super()._apply_optimize(loss, startup_program, params_grads, param_group_idx)
        self.helper = LayerHelper(type(self).__name__)  # what makes the moments; Paddle makes one a step as well
        params = [param for param, _ in params_grads]
        self._create_accumulators(framework.default_main_program().global_block(), params)
        kinds = (self._moment1_acc_str, self._moment2_acc_str, self._beta1_pow_acc_str, self._beta2_pow_acc_str)
        states = [[self._get_accumulator(kind, param) for param in params] for kind in kinds]
        scales = self._clip_factors(ops, params_grads)
        ops.cpu_adamw_(
            [param.detach() for param in params],  # the same memory; custom ops do not write to what wants gradients
            *states,
            [grad for _, grad in params_grads],
            self._beta1,
            self._beta2,
            self._epsilon,
            [self.get_lr() * _rate_factor(param) for param in params],
            [self._weight_decay if self._decays(param) else 0.0 for param in params],
            [scales.get(param.name, 1.0) for param in params],
        )
        return None

    def _ops_for(self, params_grads):
        """The module of CPU ops where it can do this step, else None."""
        clip = self._grad_clip
        if (
            not isinstance(params_grads, list)  # a parameter group
            or not params_grads
            or not framework.in_dygraph_mode()
            or paddle.distributed.get_world_size() > 1
            or not (clip is None or type(clip) is ClipGradByGlobalNorm)
            or self._amsgrad
            or self._multi_precision
            or self._lr_ratio is not None
            or self._use_fusion_storage
            or self._get_auxiliary_var("found_inf") is not None
            or not all(isinstance(value, float) for value in (self._beta1, self._beta2, self._epsilon))
            or not all(_is_ordinary(param, grad) for param, grad in params_grads)
        ):
            return None
        return cpu_ops.usable(*(tensor for pair in params_grads for tensor in pair))

    def _clip_factors(self, ops, params_grads: Pairs) -> Dict[str, float]:
        """What ClipGradByGlobalNorm multiplies gradients with, by parameter's name; those without need_clip are not in it."""
        clipped = [(param, grad) for param, grad in params_grads if getattr(param, "need_clip", True)]
        if self._grad_clip is None or not clipped:
            return {}
        norm = np.sqrt(ops.cpu_squared_norm([grad for _, grad in clipped]).item())
        limit = self._grad_clip.clip_norm
        factor = float(limit / np.maximum(norm, limit))  # NaN stays NaN, as in Paddle
        return {param.name: factor for param, _ in clipped}

    def _decays(self, param) -> bool:
        return self._apply_decay_param_fun is None or self._apply_decay_param_fun(param.name)


def with_fused_update(optimizer: Optional[paddle.optimizer.Optimizer]):
    """Paddle's AdamW becomes the one above; any other optimizer stays what it is. Returns the same object."""
    if type(optimizer) is paddle.optimizer.AdamW:
        optimizer.__class__ = AdamW  # which adds methods only
    return optimizer


SLICE = "slice@"  # what Paddle puts before the name of a weight that sharding stage 3 has sliced


def decays_slices(optimizer: Optional[paddle.optimizer.Optimizer]):
    """Under sharding stage 3 a slice decays as its weight: the rule knows whole weights' names, so that Paddle would
    leave out every slice without a word. Returns the same object."""
    rule = getattr(optimizer, "_apply_decay_param_fun", None)
    if rule is not None:
        optimizer._apply_decay_param_fun = lambda name: rule(name[len(SLICE) :] if name.startswith(SLICE) else name)
    return optimizer


def _is_ordinary(param, grad) -> bool:
    return (
        not grad.is_selected_rows()
        and grad.is_dense()
        and param.is_dense()
        and param.is_contiguous()  # of a view in a list, a custom op would write to a copy
        and getattr(param, "regularizer", None) is None
        and isinstance(_rate_factor(param), (int, float))
    )


def _rate_factor(param):
    """The parameter's own factor of the learning rate."""
    return (getattr(param, "optimize_attr", None) or {}).get("learning_rate", 1.0)
