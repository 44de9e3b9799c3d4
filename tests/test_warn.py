"""Warnings point at the user's line, as PyTorch's do."""

import warnings

import pytest

import minamp
import minamp.nn.functional as F
from minamp import nn

x = minamp.ones(2, 3)
WARNING = {
    "x.softmax()": lambda: x.softmax(),
    "F.softmax": lambda: F.softmax(x),
    "nn.Softmax": lambda: nn.Softmax()(x),
    "mse_loss": lambda: F.mse_loss(x, x[:1]),
    "nn.MSELoss": lambda: nn.MSELoss()(x, x[:1]),
    "kl_div": lambda: F.kl_div(x, x),
    "nn.KLDivLoss": lambda: nn.KLDivLoss()(x, x),
    "clip_grad_norm_": lambda: nn.utils.clip_grad_norm_((p for p in []), 1.0),
    "clip_grad_value_": lambda: nn.utils.clip_grad_value_((p for p in []), 1.0),
    "autocast": lambda: minamp.autocast(dtype=minamp.float32),
    "amp.autocast": lambda: minamp.amp.autocast("cuda", dtype=minamp.float32),
}


@pytest.mark.parametrize("name", WARNING)
def test_file_and_line(name):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        WARNING[name]()
    assert [(w.category, w.filename, w.lineno) for w in seen] == [
        (UserWarning, __file__, WARNING[name].__code__.co_firstlineno)
    ]
