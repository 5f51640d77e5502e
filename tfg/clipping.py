# SPDX-License-Identifier: BSD-3-Clause
"""clipping: tfg.clip_grad_norm_. torch.nn.utils.clip_grad_norm_'s meaning, in two passes over memory and one when nothing is clipped."""

import types

import torch
from torch.nn.utils import clip_grad_norm_ as stock

from ._engine import C


def clip_grad_norm_(parameters, max_norm, norm_type=2.0, error_if_nonfinite=False, foreach=None):
    """Scale all gradients by min(1, max_norm / (norm + 1e-6)), in place, and return the norm. As torch.nn.utils.clip_grad_norm_.

    parameters           a tensor, or an iterable of tensors; those without a gradient are passed over
    max_norm             1.0 in most recipes; up to 5.0 where gradients are meant to be noisy; float("inf"): only measure
    norm_type            2, 1 and inf are done here, other orders by torch
    error_if_nonfinite   RuntimeError for a norm that is NaN or infinite, with no gradient touched; the only thing that waits for a GPU
    foreach              True or False: torch's function is called instead

    What differs from torch are roundings. The norm is a sum in float64 in an order that depends on the sizes alone, so it has the same
    bits whatever the number of threads, and is rounded once, to the dtype that torch returns: float16 and bfloat16 gradients are scaled
    by the norm itself, not by its rounding to eight bits, and squares of large float32 numbers do not overflow. A norm that the returned
    dtype can not hold is infinite, and then counts as infinite (everything becomes zero, as in torch). When there is nothing to clip,
    no gradient is written.

    Mixed dtypes are fine. torch's function is called, with its results and its errors, for gradients that are sparse, complex, on
    several devices or on other devices than the CPU, that overlap or have gaps between their elements, under a dispatch or function
    mode, and inside a tfg region. So it is for DTensor (FSDP2, tensor parallelism): the norm is then the whole model's and a DTensor.
    FSDP1 and ZeRO give each process plain tensors that hold only its share: neither function can know, use the engine's own
    (`model.clip_grad_norm_`, DeepSpeed's `gradient_clipping`).
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    elif isinstance(parameters, types.GeneratorType):
        parameters = list(parameters) or (p for p in ())  # torch warns of an empty generator
    elif not isinstance(parameters, list):
        parameters = list(parameters)
    norm = None
    if foreach is None and isinstance(parameters, list) and not torch.compiler.is_compiling():
        norm = _clip([p.grad for p in parameters if p.grad is not None], max_norm, norm_type, error_if_nonfinite)
    return stock(parameters, max_norm, norm_type, error_if_nonfinite, foreach) if norm is None else norm


def _clip(gradients, max_norm, norm_type, error_if_nonfinite):
    """The norm, or None where torch is to do it, which also has the words for a bad argument."""
    try:
        norm_type, max_norm = float(norm_type), float(max_norm)
    except (TypeError, ValueError):
        return None
    if not gradients:
        return None
    with torch.no_grad():
        return C.clip(gradients, norm_type, max_norm, bool(error_if_nonfinite))
