"""Every op at the limits of half: a gradient that exists and fits is finite there.

Each case of op_cases.py runs once more with its first input replaced by 0, the largest halfs, and points at which a careless
formula overflows on the way (148 squared sums past 65504, 6e4 doubles past it). float64 says which gradients exist.
"""

import itertools

import numpy as np
import pytest
from minamp_kit import Kit
from op_cases import CASES, Constants, make, shape_of

import minamp
from minamp import autocast, bfloat16, float16, float64
from minamp.op import Op

LARGEST = 65504.0
POINTS = {"A": [0.0, LARGEST, -LARGEST, 148.0, -148.0, 6e4, -6e4], "P": [LARGEST, 148.0, 6e4, 2.0**-24, 1.0]}
# Functions made of ops are run under autocast only: outside, what one of their ops gives may already be beyond half, as in
# cross_entropy of logits 131,008 apart.
RUNS = [(k, True) for k, c in CASES.items() if c.check == "values" and c.inputs and c.inputs[0][0] in POINTS]
RUNS += [(k, False) for k, _ in RUNS if isinstance(Kit.find(CASES[k].op), Op)]


def gradients(case, arrays, dtype, region):
    tensors = [minamp.tensor(a, dtype=dtype).requires_grad_() for a in arrays]
    with autocast(dtype=dtype if region else None, enabled=region):
        y = case.call(Constants(minamp), Kit.find(case.op), *tensors)
    y = y if isinstance(y, tuple | list) else (y,)
    # Summed in float64, so that only the op itself can overflow.
    sum((part.double().sum() for part in y if part.requires_grad), minamp.zeros((), dtype=float64)).backward()
    return [None if t.grad is None else t.grad.double().numpy() for t in tensors], y


@pytest.mark.parametrize("dtype", [float16, bfloat16], ids=str)
@pytest.mark.parametrize("key, region", RUNS)
def test_gradients_at_the_limits(key, region, dtype):
    case = CASES[key]
    if region and case.op == "binary_cross_entropy":
        return  # refused there
    arrays = [make(key, i, text) for i, text in enumerate(case.inputs)]
    kind, shape = case.inputs[0][0], shape_of(case.inputs[0])
    size = int(np.prod(shape, dtype=int))
    points = itertools.cycle(POINTS[kind])
    for _ in range(len(POINTS[kind])):  # every place of the input sees every point
        arrays[0] = np.array([next(points) for _ in range(size)]).reshape(shape)
        next(points)
        halves = [minamp.tensor(a, dtype=dtype).double().numpy() for a in arrays]
        exact, _ = gradients(case, halves, float64, region=False)
        half, _ = gradients(case, arrays, dtype, region)
        for i, (e, h) in enumerate(zip(exact, half, strict=True)):
            if e is not None:
                fits = np.isfinite(e) & (np.abs(e) <= LARGEST)
                assert np.isfinite(h[fits]).all(), (
                    f"input {i} at {halves[0].tolist()}: {h.tolist()}, exactly {e.tolist()}"
                )
