"""Recurrent layers and cells: against loops over NumPy's float64, central differences, dtypes in half, a training, errors."""

import math

import numpy as np
import pytest

import minamp
import minamp.nn.functional as F
from minamp import GradScaler, autocast, bfloat16, float16, float32, float64, nn, optim, tensor
from minamp.autograd import check_grads
from minamp.methods import OPS
from minamp.tensor import Tensor

_rng = np.random.default_rng(5)
KINDS = ["RNN", "RNN relu", "LSTM", "GRU"]


def a(*shape):
    return _rng.standard_normal(shape)


def make(kind, *sizes, cell=False, **options):
    name, *nonlinearity = kind.split()
    options |= {"nonlinearity": nonlinearity[0]} if nonlinearity else {}
    minamp.manual_seed(0)
    return getattr(nn, name + "Cell" * cell)(*sizes, **options)


def states_of(hx):
    return hx if isinstance(hx, tuple) else (hx,)


# ------------------------------------------------------------------------------------------------------------------- in NumPy


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def one_step(kind, x, states, w_ih, w_hh, b_ih=0.0, b_hh=0.0):
    """The states after the input x (N, in), as a tuple."""
    h, c = states[0], states[-1]
    a, b = x @ w_ih.T + b_ih, h @ w_hh.T + b_hh
    if kind == "LSTM":
        i, f, g, o = np.split(a + b, 4, -1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        return sigmoid(o) * np.tanh(c), c
    if kind == "GRU":
        (ar, az, an), (br, bz, bn) = np.split(a, 3, -1), np.split(b, 3, -1)
        z, n = sigmoid(az + bz), np.tanh(an + sigmoid(ar + br) * bn)
        return ((1 - z) * n + z * h,)
    return (np.maximum(a + b, 0) if "relu" in kind else np.tanh(a + b),)


def all_layers(kind, weights, x, states, directions):
    """(output, last states) of x (L, N, in); weights: one list per layer and direction, in PyTorch's order."""
    last = []
    while len(last) < len(weights):
        sides = []
        for direction in range(directions):
            now, seen = tuple(s[len(last)] for s in states), []
            for step in x[:: 1 - 2 * direction]:
                now = one_step(kind, step, now, *weights[len(last)])
                seen.append(now[0])
            sides.append(np.stack(seen[:: 1 - 2 * direction]))
            last.append(now)
        x = np.concatenate(sides, -1)
    return x, [np.stack(s) for s in zip(*last, strict=True)]


def weights_of(layer, n):
    """Its parameters in float64, n lists of them."""
    arrays = [p.detach().numpy().astype(float) for p in layer.parameters()]
    each = len(arrays) // n
    return [arrays[i : i + each] for i in range(0, len(arrays), each)]


@pytest.mark.parametrize("given", [False, True], ids=["zeros", "hx"])
@pytest.mark.parametrize("bias", [False, True], ids=["without-bias", "bias"])
@pytest.mark.parametrize("layers, directions", [(1, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_loops_over_steps(kind, layers, directions, bias, given):
    options = dict(num_layers=layers, bidirectional=directions == 2, bias=bias)
    layer, n = make(kind, 5, 4, dtype=float64, **options), layers * directions
    x, hx = a(6, 3, 5), [a(n, 3, 4) if given else np.zeros((n, 3, 4)) for _ in layer.states]
    output, last = all_layers(kind, weights_of(layer, n), x, hx, directions)
    given = [Tensor(h) for h in hx] if given else None
    y, after = layer(tensor(x), given if kind == "LSTM" or not given else given[0])
    assert isinstance(after, tuple) == (kind == "LSTM")
    for found, right in zip((y, *states_of(after)), (output, *last), strict=True):
        assert found.shape == right.shape and found.dtype == float64
        np.testing.assert_allclose(found.detach(), right, rtol=1e-12, atol=1e-14)
    y, after = layer.float()(tensor(x).float(), None if not given else layer_states(kind, given, float32))
    np.testing.assert_allclose(y.detach(), output, atol=1e-6)
    # batch first: only input and output are turned, not the states
    turned = make(kind, 5, 4, batch_first=True, dtype=float64, **options)
    y, again = turned(tensor(x).transpose(0, 1), layer_states(kind, given, float64) if given else None)
    np.testing.assert_allclose(y.transpose(0, 1).detach(), output, rtol=1e-12, atol=1e-14)
    assert states_of(again)[0].shape == (n, 3, 4)


def layer_states(kind, states, dtype):
    """hx as the layer takes it."""
    states = [s.to(dtype) for s in states]
    return tuple(states) if kind == "LSTM" else states[0]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cell_is_one_step(kind, bias):
    cell = make(kind, 5, 4, cell=True, bias=bias, dtype=float64)
    x, hx, now = a(3, 5), [a(3, 4) for _ in cell.states], None
    for states in ([np.zeros((3, 4))] * len(hx), hx):
        right = one_step(kind, x, states, *weights_of(cell, 1)[0])
        found = states_of(cell(tensor(x), now))
        for y, expected in zip(found, right, strict=True):
            np.testing.assert_allclose(y.detach(), expected, rtol=1e-12, atol=1e-14)
        now = layer_states(kind, [Tensor(h) for h in hx], float64)
    alone = states_of(cell(tensor(x)[1], layer_states(kind, [Tensor(h[1]) for h in hx], float64)))
    np.testing.assert_allclose(alone[0].detach(), right[0][1], rtol=1e-12)
    assert alone[-1].shape == (4,)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_without_a_batch(kind):
    layer = make(kind, 5, 4, num_layers=2, bidirectional=True, batch_first=True)
    x, hx = tensor(a(6, 5)).float(), layer_states(kind, [Tensor(a(4, 4)) for _ in layer.states], float32)
    (y, last), (whole, lasts) = layer(x, hx), layer(x.unsqueeze(0), batched(hx))
    assert y.shape == (6, 8) and states_of(last)[0].shape == (4, 4)
    np.testing.assert_allclose(y.detach(), whole[0].detach(), atol=1e-6)
    np.testing.assert_allclose(states_of(last)[-1].detach(), states_of(lasts)[-1][:, 0].detach(), atol=1e-6)


def batched(hx):
    return tuple(h.unsqueeze(1) for h in hx) if isinstance(hx, tuple) else hx.unsqueeze(1)


# ------------------------------------------------------------------------------------------------------------------- gradients


def with_weights(layer, weights):
    """The layer with these tensors for its parameters, which keep their histories."""
    vars(layer)["_parameters"].update(zip(dict(layer.named_parameters()), weights, strict=True))
    return layer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}])
def test_gradients(kind, options):
    """Of input, states and every weight, through the output and the last states."""
    layer = make(kind, 2, 2, dtype=float64, **options)
    n, weights = 4 if options else 1, [p.detach().numpy() for p in layer.parameters()]

    def outputs(x, *rest):
        hx, weights = rest[: len(layer.states)], rest[len(layer.states) :]
        y, last = with_weights(layer, weights)(x, hx if kind == "LSTM" else hx[0])
        return minamp.cat([t.reshape(-1) for t in (y, *states_of(last))])

    hx = [a(n, 2, 2) for _ in layer.states]
    check_grads(outputs, a(2, 2, 2) if options else a(3, 2, 2), *hx, *weights, order=1 if options else 2)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_a_cell(kind):
    cell = make(kind, 3, 2, cell=True, dtype=float64)
    weights = [p.detach().numpy() for p in cell.parameters()]

    def outputs(x, *rest):
        hx, weights = rest[: len(cell.states)], rest[len(cell.states) :]
        return minamp.cat(states_of(with_weights(cell, weights)(x, hx if kind == "LSTM" else hx[0])))

    check_grads(outputs, a(2, 3), *[a(2, 2) for _ in cell.states], *weights)


def test_backward_twice():
    layer, x = make("LSTM", 3, 2, num_layers=2), tensor(a(4, 2, 3)).float()
    y, (h, c) = layer(x)
    loss = (y * y).sum() + h.sum() + c.sum()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in layer.parameters()]
    loss.backward()
    for p, g in zip(layer.parameters(), once, strict=True):
        np.testing.assert_allclose(p.grad, 2 * g, rtol=1e-6)
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


# ------------------------------------------------------------------------------------------------------ parameters, dropout, repr


def test_parameters_are_torchs():
    layer = nn.LSTM(5, 4, num_layers=2, bidirectional=True)
    names = [
        f"{n}_l{i}{d}"
        for i in (0, 1)
        for d in ("", "_reverse")
        for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    ]
    assert [*layer.state_dict()] == [n for n, _ in layer.named_parameters()] == names
    assert layer.weight_ih_l0.shape == (16, 5) and layer.weight_ih_l1_reverse.shape == (16, 8)
    assert layer.weight_hh_l1.shape == (16, 4) and layer.bias_hh_l0.shape == (16,)
    assert [*nn.GRU(5, 4, bias=False).state_dict()] == ["weight_ih_l0", "weight_hh_l0"]
    assert {n: p.shape for n, p in nn.GRUCell(5, 4).named_parameters()} == {
        "weight_ih": (12, 5),
        "weight_hh": (12, 4),
        "bias_ih": (12,),
        "bias_hh": (12,),
    }
    assert nn.RNN(5, 4).weight_ih_l0.shape == (4, 5) and nn.RNNCell(5, 4, bias=False).bias_hh is None
    half = nn.GRU(5, 4, dtype=float16, device="cpu")
    assert {p.dtype for p in half.parameters()} == {float16}
    assert layer.flatten_parameters() is None


@pytest.mark.parametrize("cell", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_initial_values_are_uniform_and_the_generators(kind, cell):
    layer, again = make(kind, 50, 100, cell=cell), make(kind, 50, 100, cell=cell)
    for p, q in zip(layer.parameters(), again.parameters(), strict=True):
        values = p.detach().numpy() * 10
        assert np.abs(values).max() <= 1 and abs(values.std() - 1 / math.sqrt(3)) < 0.06
        assert p.tolist() == q.tolist()
    layer.reset_parameters()
    assert next(layer.parameters()).tolist() != next(again.parameters()).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_is_between_layers_and_in_training_only(kind):
    layer, x = make(kind, 5, 4, num_layers=2, dropout=1.0), tensor(a(6, 3, 5)).float()
    y, last = layer(x)
    above = make(kind, 4, 4)
    above.load_state_dict({n.replace("l1", "l0"): p for n, p in layer.state_dict().items() if "l1" in n})
    assert y.tolist() == above(minamp.zeros(6, 3, 4))[0].tolist(), "all that the second layer is given is 0"
    assert states_of(last)[0][0].abs().max().item() > 0, "the first layer's own states are not dropped"
    layer.eval()
    plain = make(kind, 5, 4, num_layers=2)
    plain.load_state_dict(layer.state_dict())
    assert layer(x)[0].tolist() == plain(x)[0].tolist()


def test_dropout_of_one_layer_warns():
    with pytest.warns(UserWarning, match="GRU: dropout=0.5 is between layers, and there is one") as seen:
        nn.GRU(5, 4, dropout=0.5)
    assert seen[0].filename == __file__


def test_reprs():
    assert repr(nn.LSTM(5, 4)) == "LSTM(5, 4)" and repr(nn.GRUCell(5, 4)) == "GRUCell(5, 4)"
    layer = nn.GRU(5, 4, 2, False, True, 0.5, True)
    assert repr(layer) == (
        "GRU(5, 4, num_layers=2, bias=False, batch_first=True, dropout=0.5, bidirectional=True)"
    )
    assert repr(nn.RNNCell(5, 4, False, "relu")) == "RNNCell(5, 4, bias=False, nonlinearity=relu)"
    assert nn.RNN(5, 4, 1, "relu", False).nonlinearity == "relu"


# ------------------------------------------------------------------------------------------------------------------------ half


@pytest.mark.parametrize("dtype", [None, float32, float16, bfloat16], ids=str)
@pytest.mark.parametrize("half_input", [False, True])
@pytest.mark.parametrize("cell", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast_everything_is_half_whatever_hx_is(kind, cell, half_input, dtype):
    """PyTorch's CUDA lists have lstm_cell, gru_cell and the two of RNN under lower_precision_fp, and cuDNN casts as they do."""
    layer, lead = make(kind, 5, 4, cell=cell), (3,) if cell else (1, 3)
    x = tensor(a(3, 5) if cell else a(6, 3, 5)).float()
    hx = None if dtype is None else layer_states(kind, [Tensor(a(*lead, 4)) for _ in layer.states], dtype)
    with autocast(dtype=float16):
        out = layer(x.half() if half_input else x, hx)
    out = states_of(out) if cell else (out[0], *states_of(out[1]))
    assert {t.dtype for t in out} == {np.dtype(float16)}
    exact = layer(x, None if hx is None else layer_states(kind, states_of(hx), float32))
    exact = states_of(exact) if cell else (exact[0], *states_of(exact[1]))
    for y, right in zip(out, exact, strict=True):
        np.testing.assert_allclose(y.float().detach(), right.detach(), atol=1e-2)
    sum(t.float().sum() for t in out).backward()
    assert {p.grad.dtype for p in layer.parameters()} == {np.dtype(float32)}


@pytest.mark.parametrize("dtype", [float16, bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_half_layer(kind, dtype):
    layer, x = make(kind, 5, 4, num_layers=2, bidirectional=True), tensor(a(6, 3, 5)).float()
    y, last = layer(x)
    (y * y).sum().backward()
    grads = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    half, after = layer.to(dtype)(x.to(dtype))
    assert half.dtype == dtype and {s.dtype for s in states_of(after)} == {np.dtype(dtype)}
    (half.float() ** 2).sum().backward()
    tolerance = 0.02 if dtype == float16 else 0.1
    np.testing.assert_allclose(half.float().detach(), y.detach(), atol=tolerance)
    for p, g in zip(layer.parameters(), grads, strict=True):
        assert p.grad.dtype == dtype
        np.testing.assert_allclose(p.grad.float(), g, rtol=tolerance, atol=tolerance)


def test_a_float64_layer_stays_float64_under_autocast():
    layer = make("GRU", 5, 4, dtype=float64)
    with autocast():
        y, h = layer(tensor(a(6, 3, 5)))
    assert y.dtype == h.dtype == float64


@pytest.mark.parametrize("kind", KINDS)
def test_training_under_a_scaler(kind):
    """Which of 8 inputs came first, 12 steps ago."""
    minamp.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(8, 16)
            self.recurrent, self.head = make(kind, 16, 24, batch_first=True), nn.Linear(24, 8)

        def forward(self, ids):
            return self.head(self.recurrent(self.embedding(ids))[0][:, -1])

    ids = tensor(np.random.default_rng(0).integers(0, 8, (32, 12)))
    net = Net()
    optimizer, scaler, losses = optim.Adam(net.parameters(), lr=1e-2), GradScaler(init_scale=2.0**24), []
    for _ in range(60):
        with autocast():
            loss = F.cross_entropy(net(ids), ids[:, 0])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0] and scaler.get_scale() < 2.0**24


# ---------------------------------------------------------------------------------------------------------------------- errors


X = tensor(a(6, 3, 5)).float()
Z = minamp.zeros
GIVE = r"give \(length, batch, 5\), batch first with batch_first=True, or \(length, 5\)"


@pytest.mark.parametrize(
    "call, kind, text",
    [
        (lambda: nn.LSTM(0, 4), ValueError, "LSTM: input_size=0 and hidden_size=4 must be at least 1"),
        (lambda: nn.LSTM(5, 4, 0), ValueError, "LSTM: num_layers=0 must be at least 1"),
        (lambda: nn.GRU(5, 4, 2, dropout=1.5), ValueError, r"GRU: .*dropout=1.5 lie in \[0, 1\]"),
        (lambda: nn.GRU(5, 4, 2, 0.5), TypeError, "GRU: bias must be True or False, got 0.5"),
        (lambda: nn.RNN(5, 4, 1, True), ValueError, "RNN: nonlinearity must be 'tanh' or 'relu', got True"),
        (lambda: nn.RNNCell(5, 4, nonlinearity="sigmoid"), ValueError, "RNNCell: nonlinearity .* 'sigmoid'"),
        (lambda: nn.LSTM(5, 4, proj_size=2), TypeError, "proj_size"),
        (lambda: nn.LSTM(5, 4)(a(6, 3, 5)), TypeError, "LSTM: input is a NumPy array, not a Tensor"),
        (lambda: nn.LSTM(5, 4)(X[..., :4]), RuntimeError, r"LSTM: input has shape \(6, 3, 4\): " + GIVE),
        (lambda: nn.GRU(5, 4)(X[0, 0]), RuntimeError, r"GRU: input has shape \(5,\): " + GIVE),
        (
            lambda: nn.RNN(5, 4)(X[:0]),
            RuntimeError,
            r"RNN: input has shape \(0, 3, 5\): give at least one step",
        ),
        (
            lambda: nn.LSTM(5, 4)(X, Z(1, 3, 4)),
            TypeError,
            r"LSTM: hx is a Tensor: give the tensors \(h_0, c_0\)",
        ),
        (lambda: nn.LSTM(5, 4)(X, (Z(1, 3, 4), 0)), TypeError, "LSTM: c_0 is a int, not a Tensor"),
        (
            lambda: nn.LSTM(5, 4)(X, (Z(1, 3, 4), Z(1, 4))),
            RuntimeError,
            r"LSTM: c_0 has shape \(1, 4\): give \(1, 3, 4\)",
        ),
        (
            lambda: nn.GRU(5, 4, 2, batch_first=True, bidirectional=True)(X, Z(6, 4, 4)),
            RuntimeError,
            r"GRU: h_0 has shape \(6, 4, 4\): give \(4, 6, 4\)",
        ),
        (lambda: nn.RNN(5, 4)(X[0], Z(1, 3, 4)), RuntimeError, r"RNN: h_0 .*: give \(1, 4\)"),
        (
            lambda: nn.LSTM(5, 4)(X, (Z(1, 3, 4), Z(1, 3, 4).double())),
            RuntimeError,
            r"LSTM: c_0 is float64, input float32: use c_0\.to\(input\.dtype\)",
        ),
        (lambda: nn.GRU(5, 4)(X.half()), RuntimeError, r"linear: tensors of different dtypes \(x float16"),
        (
            lambda: nn.LSTMCell(5, 4)(X),
            RuntimeError,
            r"LSTMCell: input has shape \(6, 3, 5\): give \(batch, 5\) or \(5,\)",
        ),
        (
            lambda: nn.GRUCell(5, 4)(X[0], Z(4)),
            RuntimeError,
            r"GRUCell: h_0 has shape \(4,\): give \(3, 4\)",
        ),
    ],
)
def test_errors(call, kind, text):
    with pytest.raises(kind, match=text):
        call()


def test_what_autocast_does_not_cast_is_refused():
    with autocast(), pytest.raises(RuntimeError, match="GRU: h_0 is float64, input float32"):
        nn.GRU(5, 4)(X, Z(1, 3, 4).double())


def test_no_sequences():
    y, (h, c) = nn.LSTM(5, 4)(X[:, :0])
    assert y.shape == (6, 0, 4) and h.shape == c.shape == (1, 0, 4)


@pytest.mark.parametrize(
    "name, shapes", [("lstm_state", (8, 2)), ("lstm_output", (8, 2)), ("gru_state", (6, 6, 2))]
)
def test_the_gradients_of_a_step(name, shapes):
    rng = np.random.default_rng(4)
    for lead in ((), (3,), (2, 3)):
        check_grads(OPS[name], *(rng.standard_normal((*lead, n)) for n in shapes))
