"""RNN, LSTM and GRU over whole sequences, and their cells, which take one step.

In half both products are rounded, an LSTM's sum of them, h and c; what lies between is float32 (ops/cells.py), as in a GPU's
fused steps. Under autocast all of these are half whatever hx is, as in PyTorch. A weight's gradients of all steps are summed in
float32.
"""

import math

from minamp import backends
from minamp.arguments import no_tensor
from minamp.autocast import get_autocast_dtype, is_autocast_enabled
from minamp.formats import bfloat16, float16, float32, float64
from minamp.nn import functional as F
from minamp.nn import init
from minamp.nn.layers import new_parameter
from minamp.nn.module import Module
from minamp.ops.arrange import unbind
from minamp.ops.cells import gru_state, lstm_output, lstm_state
from minamp.ops.shape import cat, stack
from minamp.tensor import Tensor
from minamp.warn import warn

# --------------------------------------------------------- the steps; x: weight_ih @ input + bias_ih; gates lie in torch's order


class _RNNStep:
    gates, states = 1, ("h_0",)

    def _choose(self, nonlinearity):
        if nonlinearity not in ("tanh", "relu"):
            raise ValueError(
                f"{type(self).__name__}: nonlinearity must be 'tanh' or 'relu', got {nonlinearity!r}"
            )
        self.nonlinearity = nonlinearity

    def _step(self, x, weight, bias, h):
        return (getattr(F, self.nonlinearity)(x + F.linear(h, weight, bias)),)


class _LSTMStep:
    gates, states = 4, ("h_0", "c_0")

    def _step(self, x, weight, bias, h, c):
        gates = x + F.linear(h, weight, bias)
        c = lstm_state(gates, c)
        return lstm_output(gates, c), c


class _GRUStep:
    gates, states = 3, ("h_0",)

    def _step(self, x, weight, bias, h):
        return (gru_state(x, F.linear(h, weight, bias), h),)


# --------------------------------------------------------------------------------------------------- what layers and cells share


class _Recurrent(Module):
    def __init__(self, input_size, hidden_size, bias):
        super().__init__()
        owner = type(self).__name__
        if input_size < 1 or hidden_size < 1:
            raise ValueError(f"{owner}: {input_size=} and {hidden_size=} must be at least 1")
        if not isinstance(bias, bool):
            raise TypeError(f"{owner}: bias must be True or False, got {bias!r}")
        self.input_size, self.hidden_size, self.bias = input_size, hidden_size, bias

    def _add(self, suffix, inputs, where):
        rows = self.gates * self.hidden_size
        for name, columns in (("weight_ih", inputs), ("weight_hh", self.hidden_size)):
            self.register_parameter(name + suffix, new_parameter((rows, columns), **where))
        for name in ("bias_ih", "bias_hh"):
            self.register_parameter(name + suffix, new_parameter((rows,), **where) if self.bias else None)

    def _of(self, suffix):
        return [getattr(self, n + suffix) for n in ("weight_ih", "bias_ih", "weight_hh", "bias_hh")]

    def reset_parameters(self):
        """Draw the initial values anew: all uniform within 1/sqrt(hidden_size)."""
        bound = 1 / math.sqrt(self.hidden_size)
        for p in self.parameters():
            init.uniform_(p, -bound, bound)

    def _check(self, input, ndims, shapes):
        if not isinstance(input, Tensor):
            raise no_tensor(type(self).__name__, "input", input)
        if input.ndim not in ndims or input.shape[-1] != self.input_size:
            raise RuntimeError(f"{type(self).__name__}: input has shape {input.shape}: give {shapes}")

    def _first(self, hx, shape, input):
        """The tensors in hx, or zeros, in the dtype that products with input have."""
        owner, cast = type(self).__name__, is_autocast_enabled() and input.dtype != float64
        dtype = get_autocast_dtype() if cast else input.dtype
        if hx is None:
            zero = backends.of(input._data).full(shape, 0.0, float32)  # made there: nothing is copied
            return [Tensor(zero).to(dtype)] * len(self.states)
        hx = hx if len(self.states) > 1 else (hx,)
        if not isinstance(hx, tuple | list) or len(hx) != len(self.states):
            raise TypeError(
                f"{owner}: hx is a {type(hx).__name__}: give the tensors ({', '.join(self.states)})"
            )
        for name, state in zip(self.states, hx, strict=True):
            if not isinstance(state, Tensor):
                raise no_tensor(owner, name, state)
            if state.shape != shape:
                raise RuntimeError(f"{owner}: {name} has shape {state.shape}: give {shape}")
            if state.dtype not in ((float16, bfloat16, float32) if cast else (input.dtype,)):
                raise RuntimeError(
                    f"{owner}: {name} is {state.dtype}, input {input.dtype}: use {name}.to(input.dtype)"
                )
        return [state.to(dtype) for state in hx]

    def _packed(self, states):
        return tuple(states) if len(self.states) > 1 else states[0]

    def extra_repr(self):
        told = ((name, getattr(self, name), usual) for name, usual in self.options.items())
        changed = (f", {name}={value}" for name, value, usual in told if value != usual)
        return f"{self.input_size}, {self.hidden_size}{''.join(changed)}"


class _Layers(_Recurrent):
    options = {"num_layers": 1, "bias": True, "batch_first": False, "dropout": 0, "bidirectional": False}

    def __init__(
        self,
        input_size,
        hidden_size,
        num_layers=1,
        bias=True,
        batch_first=False,
        dropout=0.0,
        bidirectional=False,
        *,
        device=None,
        dtype=None,
    ):
        super().__init__(input_size, hidden_size, bias)
        owner = type(self).__name__
        if num_layers < 1 or not 0 <= dropout <= 1:
            raise ValueError(f"{owner}: {num_layers=} must be at least 1, and {dropout=} lie in [0, 1]")
        if dropout and num_layers == 1:
            warn(
                f"{owner}: {dropout=} is between layers, and there is one: give num_layers=2, or use nn.Dropout"
            )
        self.num_layers, self.batch_first, self.dropout = num_layers, batch_first, dropout
        self.bidirectional, self._directions = bidirectional, ("", "_reverse") if bidirectional else ("",)
        for layer in range(num_layers):
            for direction in self._directions:
                inputs = hidden_size * len(self._directions) if layer else input_size
                self._add(f"_l{layer}{direction}", inputs, {"device": device, "dtype": dtype})
        self.reset_parameters()

    def flatten_parameters(self):
        """Nothing: the weights are used where they lie."""

    def forward(self, input, hx=None):
        """(output, h_n), of an LSTM (output, (h_n, c_n)): the last layer's h at every step, and every layer's last states.

        input (L, N, input_size), with batch_first=True (N, L, input_size), or (L, input_size); output likewise, of hidden_size
        values, twice that if bidirectional. hx, the states before the first step, of an LSTM a tuple (h_0, c_0), is zeros by
        default; states are (num_layers, N, hidden_size), without N where input has none, and twice as many if bidirectional:
        of each layer forward, reverse. dropout is of what one layer hands to the next, in training. RuntimeError for other
        shapes.
        """
        shapes = "(length, batch, {0}), batch first with batch_first=True, or (length, {0})"
        self._check(input, (2, 3), shapes.format(self.input_size))
        batch_first = self.batch_first and input.ndim == 3
        x = input.transpose(0, 1) if batch_first else input
        if not len(x):
            raise RuntimeError(
                f"{type(self).__name__}: input has shape {input.shape}: give at least one step"
            )
        shape = (self.num_layers * len(self._directions), *x.shape[1:-1], self.hidden_size)
        first, last = self._first(hx, shape, x), []
        for layer in range(self.num_layers):
            x, outputs = F.dropout(x, self.dropout, self.training and layer > 0), []
            for direction in self._directions:
                weight_ih, bias_ih, weight_hh, bias_hh = self._of(f"_l{layer}{direction}")
                states, hs, order = (
                    [s[len(last)] for s in first],
                    [],
                    slice(None, None, -1 if direction else 1),
                )
                for step in unbind(F.linear(x, weight_ih, bias_ih))[order]:
                    states = self._step(step, weight_hh, bias_hh, *states)
                    hs.append(states[0])
                outputs.append(stack(hs[order]))
                last.append(states)
            x = cat(outputs, -1) if self.bidirectional else outputs[0]
        return x.transpose(0, 1) if batch_first else x, self._packed(
            [stack(s) for s in zip(*last, strict=True)]
        )


class _Cell(_Recurrent):
    options = {"bias": True}

    def __init__(self, input_size, hidden_size, bias=True, *, device=None, dtype=None):
        super().__init__(input_size, hidden_size, bias)
        self._add("", input_size, {"device": device, "dtype": dtype})
        self.reset_parameters()

    def forward(self, input, hx=None):
        """The next h, (N, hidden_size), of an LSTMCell (h, c), from input (N, input_size) and hx; or all of it without N."""
        self._check(input, (1, 2), f"(batch, {self.input_size}) or ({self.input_size},)")
        states = self._first(hx, (*input.shape[:-1], self.hidden_size), input)
        weight_ih, bias_ih, weight_hh, bias_hh = self._of("")
        return self._packed(self._step(F.linear(input, weight_ih, bias_ih), weight_hh, bias_hh, *states))


# ----------------------------------------------------------------------------------------------------------- under torch's names


class RNN(_RNNStep, _Layers):
    """Layers of h = tanh(W_ih x + b_ih + W_hh h + b_hh) over a sequence (Elman, 1990); nonlinearity: 'tanh' or 'relu'."""

    def __init__(self, input_size, hidden_size, num_layers=1, nonlinearity="tanh", *args, **options):
        super().__init__(input_size, hidden_size, num_layers, *args, **options)
        self._choose(nonlinearity)


class LSTM(_LSTMStep, _Layers):
    """Layers of long short-term memory over a sequence (Hochreiter and Schmidhuber, 1997; forget gate: Gers et al., 2000)."""


class GRU(_GRUStep, _Layers):
    """Layers of gated recurrent units over a sequence (Cho et al., 2014), the reset gate after the product, as in PyTorch."""


class RNNCell(_RNNStep, _Cell):
    """One step of an RNN."""

    options = {"bias": True, "nonlinearity": "tanh"}

    def __init__(self, input_size, hidden_size, bias=True, nonlinearity="tanh", **where):
        super().__init__(input_size, hidden_size, bias, **where)
        self._choose(nonlinearity)


class LSTMCell(_LSTMStep, _Cell):
    """One step of an LSTM."""


class GRUCell(_GRUStep, _Cell):
    """One step of a GRU."""
