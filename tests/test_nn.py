"""Modules, parameters, layers, initialisation, saving and loading, clipping."""

import copy
import math
import pickle
from collections import OrderedDict

import numpy as np
import pytest

import minamp
import minamp.nn.functional as F
from minamp import nn

f16, f32, f64 = np.float16, np.float32, np.float64


def make_net():
    return nn.Sequential(
        nn.Linear(4, 3), nn.ReLU(), nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2, bias=False))
    )


NAMES = ["0.weight", "0.bias", "2.0.weight", "2.0.bias", "2.1.weight"]
STATE = NAMES[:4] + ["2.0.running_mean", "2.0.running_var", "2.0.num_batches_tracked", "2.1.weight"]

# -- Parameter


def test_parameter_wraps_tensors_and_arrays():
    p = nn.Parameter(minamp.tensor([1.0, 2.0]))
    assert isinstance(p, minamp.Tensor) and p.requires_grad and p.is_leaf
    assert repr(p).startswith("Parameter containing:\ntensor([1., 2.]") and "requires_grad=True" in repr(p)
    assert nn.Parameter().shape == (0,)
    assert not nn.Parameter(np.ones(2, f32), requires_grad=False).requires_grad
    with pytest.raises(RuntimeError, match="only floating tensors"):
        nn.Parameter(np.array([1, 2]))


# -- registration


def test_parameters_in_order_with_dotted_names():
    net = make_net()
    assert [n for n, _ in net.named_parameters()] == NAMES
    assert [n for n, _ in net.named_buffers()] == STATE[4:7]
    assert [n for n, _ in net.named_modules()] == ["", "0", "1", "2", "2.0", "2.1"]
    assert [n for n, _ in net.named_children()] == ["0", "1", "2"]
    assert len(list(net.parameters())) == 5 and len(list(net[2].parameters(recurse=False))) == 0
    assert next(net.named_parameters(prefix="net"))[0] == "net.0.weight"


def test_a_shared_parameter_is_listed_once_but_saved_under_both_names():
    a, b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    b.weight = a.weight
    net = nn.Sequential(a, b, a)
    assert [n for n, _ in net.named_parameters()] == ["0.weight"] and len(list(net.modules())) == 3
    assert list(net.state_dict()) == ["0.weight", "1.weight", "2.weight"]
    net.half()
    assert b.weight is a.weight and a.weight.dtype == f16


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(np.array(2.0, f32))
        self.register_buffer("seen", minamp.zeros(1))
        self.register_buffer("scratch", minamp.zeros(1), persistent=False)
        self.register_parameter("extra", None)
        self.note = "plain"

    def forward(self, x, shift=0.0):
        return x * self.scale + shift


def test_attributes_go_to_their_tables():
    m = Custom()
    assert list(m.state_dict()) == ["scale", "seen"] and m.extra is None and m.note == "plain"
    assert {"scale", "seen", "extra"} <= set(dir(m))
    m.extra = nn.Parameter(np.ones(1, f32))
    m.seen = minamp.ones(1)
    assert list(m.state_dict()) == ["scale", "extra", "seen"] and m.state_dict()["seen"].item() == 1
    m.extra = None
    del m.seen
    m.note = nn.Linear(1, 1)
    m.scale = None
    assert list(m.state_dict()) == ["note.weight", "note.bias"] and not hasattr(m, "seen")


def test_what_is_set_anew_keeps_its_place():
    net = nn.Sequential(nn.Linear(2, 2), nn.Sigmoid())
    net[0].weight = nn.Parameter(minamp.ones(2, 2))
    assert [n for n, _ in net.named_parameters()] == ["0.weight", "0.bias"]
    net[0] = nn.Identity()
    assert [type(m).__name__ for m in net] == ["Identity", "Sigmoid"]
    ms = nn.ModuleList([nn.ReLU(), nn.Tanh()])
    ms[0] = nn.Identity()
    assert [type(m).__name__ for m in ms] == ["Identity", "Tanh"]
    m = Custom()
    m.register_buffer("more", minamp.zeros(1))
    m.seen = minamp.ones(1)
    assert list(m.state_dict()) == ["scale", "seen", "more"]
    m.scratch = nn.Parameter(minamp.ones(1))  # another table: out of the one it was in, and saved now
    assert list(m.state_dict()) == ["scale", "scratch", "seen", "more"] and "scratch" not in m._buffers


def test_registration_errors():
    m = Custom()
    with pytest.raises(TypeError, match="Custom: can't set 'scale' to a Tensor: give a Parameter or None"):
        m.scale = minamp.ones(1)
    with pytest.raises(TypeError, match="can't set 'scale' to a Identity: give a Parameter or None"):
        m.scale = nn.Identity()
    with pytest.raises(TypeError, match="can't set 'seen' to a int: give a Tensor or None"):
        m.seen = 3
    with pytest.raises(TypeError, match="parameter 'w' must be a Parameter or None, got Tensor"):
        m.register_parameter("w", minamp.ones(1))
    with pytest.raises(TypeError, match="buffer 'w' must be a Tensor or None, got float"):
        m.register_buffer("w", 1.0)
    with pytest.raises(TypeError, match="module 'w' must be a Module or None, got int"):
        m.add_module("w", 3)
    with pytest.raises(KeyError, match="attribute 'note' exists already"):
        m.add_module("note", nn.Identity())
    with pytest.raises(KeyError, match="without a dot"):
        m.register_buffer("a.b", None)
    with pytest.raises(AttributeError, match="'Custom' object has no attribute 'nothing'"):
        _ = m.nothing
    with pytest.raises(NotImplementedError, match=r"Module has no forward\(\)"):
        nn.Module()(1)

    class Early(nn.Module):
        def __init__(self):
            self.w = nn.Parameter(np.ones(1, f32))

    with pytest.raises(AttributeError, match=r"Early: can't set 'w' before super\(\).__init__\(\) has run"):
        Early()


def test_forward_hooks_see_and_replace_and_come_off():
    m, calls = Custom(), []
    pre = m.register_forward_pre_hook(lambda mod, args: (args[0] + 1.0,))
    post = m.register_forward_hook(lambda mod, args, out: calls.append((args[0].item(), out.item())))
    last = m.register_forward_hook(lambda mod, args, out: out * 10.0)
    assert m(minamp.tensor(1.0), shift=0.5).item() == 45.0 and calls == [(2.0, 4.5)]
    for handle in (pre, post, last):
        handle.remove()
        handle.remove()
    assert m(minamp.tensor(1.0)).item() == 2.0 and len(calls) == 1


def test_a_hook_may_take_itself_off():
    m, calls = Custom(), []

    def once(name):
        def hook(*args):
            calls.append(name)
            handles[name].remove()

        return hook

    x = minamp.ones(1, requires_grad=True) * 1.0
    register = {
        "pre": m.register_forward_pre_hook,
        "post": m.register_forward_hook,
        "gradient": x.register_hook,
    }
    handles = {name: add(once(name)) for name, add in register.items()}
    for name, add in register.items():  # the next one is not passed over
        add(lambda *args, name=name: calls.append(name + " next"))
    y = m(x)
    y.sum().backward(retain_graph=True)
    assert calls == [n + after for n in register for after in ("", " next")]
    calls.clear()
    m(x)
    y.sum().backward()
    assert calls == [n + " next" for n in register]


def test_train_eval_apply_zero_grad_requires_grad():
    net = make_net()
    assert net.training and net.eval() is net and not any(m.training for m in net.modules())
    net[2].train()
    assert net[2][0].training and not net[0].training
    with pytest.raises(ValueError, match="mode must be True or False"):
        net.train(1)
    order = []
    assert net.apply(lambda m: order.append(type(m).__name__)) is net
    assert order == ["Linear", "ReLU", "BatchNorm1d", "Linear", "Sequential", "Sequential"]
    net.train()(minamp.randn(5, 4)).sum().backward()
    net.zero_grad(set_to_none=False)
    assert all(p.grad.shape == p.shape and not p.grad.numpy().any() for p in net.parameters())
    net.zero_grad()
    assert all(p.grad is None for p in net.parameters())
    assert not any(p.requires_grad for p in net.requires_grad_(False).parameters())


# -- containers


@pytest.mark.parametrize("dtype", [f32, f16])
def test_trunc_normal_stays_within_its_limits(dtype):
    minamp.manual_seed(0)
    w = nn.Parameter(np.zeros((100, 100), dtype))
    assert nn.init.trunc_normal_(w, mean=0.5, std=2.0, a=0.0, b=1.0) is w and w.dtype == dtype
    assert 0.0 <= w.min().item() < 0.05 and 0.95 < w.max().item() <= 1.0
    assert abs(w.float().std().item() - 0.2874) < 0.005  # 2 sqrt(1 - 0.5 phi(0.25) / (2 Phi(0.25) - 1))
    nn.init.trunc_normal_(w, std=0.02)
    assert abs(w.float().std().item() - 0.02) < 0.001
    with pytest.raises(ValueError, match=r"hardly a value of mean 9.0 and std 1.0 lies in \[-2.0, 2.0\]"):
        nn.init.trunc_normal_(w, mean=9.0)
    with pytest.raises(ValueError, match="hardly a value"):
        nn.init.trunc_normal_(w, a=1.0, b=-1.0)


@pytest.mark.parametrize("shape", [(4, 4), (3, 8), (8, 3), (2, 3, 2, 2), (0, 3)])
def test_orthogonal_rows_or_columns(shape):
    minamp.manual_seed(0)
    w = nn.init.orthogonal_(nn.Parameter(np.zeros(shape, f32)), gain=2.0)
    flat = w.detach().numpy().reshape(shape[0], math.prod(shape[1:]))
    product = flat @ flat.T if flat.shape[0] <= flat.shape[1] else flat.T @ flat
    np.testing.assert_allclose(product, 4.0 * np.eye(min(flat.shape)), atol=1e-5)
    with pytest.raises(
        ValueError, match=r"orthogonal_: needs at least 2 dimensions, this tensor has shape \(3,\)"
    ):
        nn.init.orthogonal_(nn.Parameter(np.zeros(3, f32)))


def test_orthogonal_matrices_have_no_favourite_sign():
    minamp.manual_seed(0)
    first = [nn.init.orthogonal_(minamp.zeros(2, 2))[0, 0].item() for _ in range(400)]
    assert 150 < sum(v > 0 for v in first) < 250


def test_sequential_takes_a_module_in_its_middle():
    net = nn.Sequential(nn.ReLU(), nn.Tanh())
    net.insert(1, nn.Sigmoid())
    assert [type(m).__name__ for m in net] == ["ReLU", "Sigmoid", "Tanh"] and list(net._modules) == [
        "0",
        "1",
        "2",
    ]


def test_parameter_list():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.ws = nn.ParameterList([nn.Parameter(np.full(2, i, f32)) for i in range(2)])

        def forward(self, x):
            return sum(w * x for w in self.ws)

    net = Net()
    net.ws.append(minamp.full((2,), 2.0)).extend(nn.Parameter(np.zeros(2, f32)) for _ in range(1))
    assert [n for n, _ in net.named_parameters()] == ["ws.0", "ws.1", "ws.2", "ws.3"] and len(net.ws) == 4
    net(minamp.ones(2)).sum().backward()
    assert all(w.grad.tolist() == [1.0, 1.0] for w in net.ws) and isinstance(net.ws[2], nn.Parameter)
    net.ws[-1] = minamp.ones(2)
    assert list(net.state_dict()) == ["ws.0", "ws.1", "ws.2", "ws.3"] and net.ws[3].tolist() == [1.0, 1.0]
    part = net.ws[1:3]
    assert isinstance(part, nn.ParameterList) and part[0] is net.ws[1] and len(part) == 2
    with pytest.raises(IndexError, match="ParameterList: index 4 is out of range, it has 4 parameters"):
        net.ws[4]
    with pytest.raises(TypeError, match="Parameter: needs numbers or bools, got str"):
        net.ws.extend([minamp.ones(2), "w"])
    assert len(net.ws) == 4


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.BatchNorm1d(3),
        lambda: nn.BatchNorm2d(3, affine=False),
        lambda: nn.BatchNorm1d(3, track_running_stats=False),
        lambda: nn.LayerNorm(3),
        lambda: nn.LayerNorm(3, bias=False),
        lambda: nn.RMSNorm(3),
        lambda: nn.GroupNorm(1, 3, affine=False),
        lambda: nn.GroupNorm(1, 3),
        lambda: nn.PReLU(2, init=0.1),
    ],
)
def test_reset_parameters_is_a_fresh_start(make):
    layer, fresh = make(), make()
    for t in layer.state_dict().values():
        t.fill_(7)
    layer.reset_parameters()
    for name, t in fresh.state_dict().items():
        assert layer.state_dict()[name].tolist() == t.tolist(), name


def test_an_embedding_is_drawn_anew_but_for_its_padding():
    layer = nn.Embedding(50, 20, padding_idx=-1)
    layer.weight.data.fill_(7.0)
    layer.reset_parameters()
    assert abs(layer.weight[:-1].std().item() - 1.0) < 0.1 and not layer.weight[-1].any()


def test_sequential_indexes_slices_and_grows():
    net = make_net()
    assert net[0] is net[-3] and len(net) == 3 and list(net)[1] is net[1]
    assert (
        isinstance(net[:2], nn.Sequential) and net[1:][0] is net[1] and list(net[1:]._modules) == ["1", "2"]
    )
    assert net.append(nn.Identity()) is net and isinstance(net[3], nn.Identity)
    net[3] = nn.Tanh()
    del net[1]
    assert [type(m).__name__ for m in net] == ["Linear", "Sequential", "Tanh"] and list(net._modules) == [
        "0",
        "1",
        "2",
    ]
    with pytest.raises(IndexError, match="Sequential: index 3 is out of range, it has 3 modules"):
        net[3]
    named = nn.Sequential(OrderedDict(fc=nn.Linear(2, 2), act=nn.ReLU()))
    assert [n for n, _ in named.named_parameters()] == ["fc.weight", "fc.bias"] and named.act is named[1]


def test_module_list():
    ms = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
    first = ms[0]
    ms.append(nn.ReLU())
    ms.extend([nn.Tanh()])
    ms.insert(0, nn.Identity())
    assert len(ms) == 5 and ms[1] is first and isinstance(ms[1:3], nn.ModuleList) and len(ms[1:3]) == 2
    assert [n for n, _ in ms.named_parameters()] == ["1.weight", "1.bias", "2.weight", "2.bias"]


def test_what_is_no_module_leaves_a_list_as_it_was():
    ms = nn.ModuleList([nn.ReLU(), nn.Tanh()])
    before = list(ms)
    with pytest.raises(TypeError, match="module '2' must be a Module or None, got str"):
        ms.insert(1, "x")
    with pytest.raises(TypeError, match="'str' object cannot be interpreted as an integer"):
        ms.insert("x", nn.ReLU())
    with pytest.raises(TypeError, match="module '3' must be a Module or None, got str"):
        ms.extend([nn.ReLU(), "x"])
    with pytest.raises(TypeError, match="module '0' must be a Module or None, got Parameter"):
        ms[0] = nn.Parameter()
    assert list(ms) == before
    ms.insert(-1, nn.Identity())
    assert [(n, type(m).__name__) for n, m in ms.named_children()] == [
        ("0", "ReLU"),
        ("1", "Identity"),
        ("2", "Tanh"),
    ]


def test_module_dict():
    ms = nn.ModuleDict({"b": nn.Linear(1, 1), "a": nn.ReLU()})
    act = ms["a"]
    assert list(ms) == list(ms.keys()) == ["b", "a"] and len(ms) == 2 and "a" in ms and "c" not in ms
    assert list(ms.items()) == list(ms.named_children()) and list(ms.values())[1] is act is ms.a
    assert [n for n, _ in ms.named_parameters()] == ["b.weight", "b.bias"]
    ms["b"] = nn.Tanh()
    ms.update([("c", nn.Linear(1, 1, bias=False))])
    assert list(ms) == ["b", "a", "c"] and list(ms.state_dict()) == ["c.weight"]
    assert ms.pop("a") is act and list(ms) == ["b", "c"]
    del ms["b"]
    assert repr(ms) == "ModuleDict(\n  (c): Linear(in_features=1, out_features=1, bias=False)\n)"
    twin = nn.ModuleDict(ms)
    ms.clear()
    assert list(twin) == ["c"] and len(ms) == len(nn.ModuleDict()) == 0


def test_module_dict_errors():
    ms = nn.ModuleDict({"a": nn.ReLU()})
    for wrong, error, text in [
        ({"a.b": nn.ReLU()}, KeyError, "'a.b' can't be a name here: give a string without a dot"),
        ({"": nn.ReLU()}, KeyError, "'' can't be a name here"),
        ({1: nn.ReLU()}, TypeError, "1 can't be a name here"),
        ({"keys": nn.ReLU()}, KeyError, "attribute 'keys' exists already: choose another name"),
        ({"training": nn.ReLU()}, KeyError, "attribute 'training' exists already"),
        ({"c": 3}, TypeError, "module 'c' must be a Module or None, got int"),
        (3, TypeError, r"ModuleDict.update: .*: give a dict or \(name, module\) pairs"),
        ([("c", nn.ReLU(), 1)], ValueError, "ModuleDict.update: .* has length 3; 2 is required"),
    ]:
        with pytest.raises(error, match=text):
            ms.update({"b": nn.ReLU()} | wrong if isinstance(wrong, dict) else wrong)
        assert list(ms) == ["a"]
    for act in (lambda: ms["z"], lambda: ms.pop("z"), lambda: ms.__delitem__("z")):
        with pytest.raises(KeyError, match="ModuleDict: no module is called 'z': it has a"):
            act()


def test_repr():
    assert repr(make_net()) == (
        "Sequential(\n"
        "  (0): Linear(in_features=4, out_features=3, bias=True)\n"
        "  (1): ReLU()\n"
        "  (2): Sequential(\n"
        "    (0): BatchNorm1d(3, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True)\n"
        "    (1): Linear(in_features=3, out_features=2, bias=False)\n"
        "  )\n"
        ")"
    )
    assert repr(nn.Conv2d(1, 4, 3)) == "Conv2d(1, 4, kernel_size=(3, 3), stride=(1, 1))"
    assert repr(nn.Conv2d(2, 4, (3, 1), 2, padding=1, groups=2, bias=False)) == (
        "Conv2d(2, 4, kernel_size=(3, 1), stride=(2, 2), padding=(1, 1), groups=2, bias=False)"
    )
    assert repr(nn.ConvTranspose1d(2, 4, 3, 2, 0, 1)) == (
        "ConvTranspose1d(2, 4, kernel_size=(3,), stride=(2,), output_padding=(1,))"
    )
    assert repr(nn.ConvTranspose2d(2, 4, 3, 2, 1, 1, 2, False, 2)) == (
        "ConvTranspose2d(2, 4, kernel_size=(3, 3), stride=(2, 2), padding=(1, 1), dilation=(2, 2), "
        "output_padding=(1, 1), groups=2, bias=False)"
    )
    assert (
        repr(nn.Conv1d(2, 4, 3, padding="same"))
        == "Conv1d(2, 4, kernel_size=(3,), stride=(1,), padding='same')"
    )
    assert (
        repr(nn.MaxPool2d(2)) == "MaxPool2d(kernel_size=2, stride=2, padding=0, dilation=1, ceil_mode=False)"
    )
    assert repr(nn.AvgPool1d(2)) == "AvgPool1d(kernel_size=(2,), stride=(2,), padding=(0,))"
    assert repr(nn.AdaptiveMaxPool2d((None, 3))) == "AdaptiveMaxPool2d(output_size=(None, 3))"
    assert repr(nn.ReplicationPad2d(1)) == "ReplicationPad2d((1, 1, 1, 1))"
    assert repr(nn.Unflatten(1, (2, 3))) == "Unflatten(dim=1, unflattened_size=(2, 3))"
    assert repr(nn.Fold((4, 5), 2)) == (
        "Fold(output_size=(4, 5), kernel_size=2, dilation=1, padding=0, stride=1)"
    )
    assert repr(nn.LayerNorm(5)) == "LayerNorm((5,), eps=1e-05, elementwise_affine=True)"


# -- dtype


def test_half_and_float_keep_identity_and_integers():
    net = make_net()
    net(minamp.randn(5, 4)).sum().backward()
    before, ps = net[0].weight.data.numpy().copy(), list(net.parameters())
    version = net[0].weight._version[0]
    assert net.half() is net and list(map(id, net.parameters())) == list(map(id, ps))
    assert all(p.dtype == f16 and p.grad.dtype == f16 and isinstance(p, nn.Parameter) for p in ps)
    bn = net[2][0]
    assert bn.running_var.dtype == f16 and bn.num_batches_tracked.dtype == np.int64
    assert net[0].weight._version[0] > version
    net.zero_grad()
    net(minamp.randn(5, 4).half()).sum().backward()
    assert ps[0].grad.dtype == f16
    assert np.array_equal(net.float()[0].weight.data.numpy(), before.astype(f16).astype(f32))
    net.zero_grad()
    net(minamp.randn(5, 4)).sum().backward()
    assert ps[0].grad.dtype == f32
    values = ps[0].grad.numpy()
    assert not np.array_equal(values, values.astype(f16)), (
        "gradients after float() must not be rounded to half"
    )


def test_to_takes_dtype_device_and_tensor():
    net = nn.Linear(2, 2)
    assert net.to(minamp.bfloat16).weight.dtype == minamp.bfloat16
    assert net.to("cpu", minamp.float64).weight.dtype == f64 and net.bfloat16().double().weight.dtype == f64
    assert net.to(minamp.ones(1)).weight.dtype == f32 and net.cpu() is net
    with pytest.raises(TypeError, match="Module.to: dtype int64 is not a floating format"):
        net.to(minamp.int64)


# -- saving and loading


def test_state_dict_shares_memory_and_loads_into_a_copy():
    net, other = make_net(), make_net()
    saved = net.state_dict()
    assert isinstance(saved, OrderedDict) and list(saved) == STATE
    assert saved["0.weight"]._data is net[0].weight._data and not saved["0.weight"].requires_grad
    memory, version = other[0].weight._data, other[0].weight._version[0]
    answer = other.load_state_dict(pickle.loads(pickle.dumps(saved)))
    assert repr(answer) == "<All keys matched successfully>" and answer.missing_keys == []
    assert other[0].weight._data is memory and other[0].weight._version[0] == version + 1
    assert all(
        np.array_equal(a.data.numpy(), b.data.numpy())
        for a, b in zip(saved.values(), other.state_dict().values(), strict=True)
    )
    other.half().load_state_dict({k: v.numpy() for k, v in saved.items()})
    assert other[0].weight.dtype == f16
    assert np.array_equal(other[0].weight.data.numpy(), net[0].weight.data.numpy().astype(f16))


def test_load_lists_everything_that_is_wrong_and_loads_nothing():
    net = make_net()
    saved = {k: minamp.Tensor(v.numpy() + 1) for k, v in net.state_dict().items()}
    saved["extra"] = saved.pop("0.bias")
    saved["2.1.weight"] = minamp.zeros(3, 2)
    before = {k: v.numpy().copy() for k, v in net.state_dict().items()}
    with pytest.raises(RuntimeError) as error:
        net.load_state_dict(saved)
    assert str(error.value) == (
        "Error(s) in loading state_dict for Sequential (nothing was loaded):\n"
        '\tUnexpected key(s) in state_dict: "extra".\n'
        '\tMissing key(s) in state_dict: "0.bias".\n'
        "\tsize mismatch for 2.1.weight: copying a param with shape (3, 2) from checkpoint, "
        "the shape in current model is (2, 3)."
    )
    with pytest.raises(RuntimeError, match="size mismatch for 2.1.weight"):
        net.load_state_dict(saved, strict=False)
    assert all(np.array_equal(v.numpy(), before[k]) for k, v in net.state_dict().items())
    del saved["2.1.weight"]
    answer = net.load_state_dict(saved, strict=False)
    assert answer.missing_keys == ["0.bias", "2.1.weight"] and answer.unexpected_keys == ["extra"]
    assert np.array_equal(net[0].weight.data.numpy(), before["0.weight"] + 1)
    ones = {"weight": minamp.ones(1, 2)}
    layer = nn.Linear(2, 1)
    before = layer.weight.tolist()
    for wrong, kind in (("x", "str"), (np.array([None]), "ndarray"), (np.ones(1, np.complex64), "ndarray")):
        with pytest.raises(
            RuntimeError, match=rf"\(nothing was loaded\):\n\tbias: needs numbers or bools, got {kind}"
        ):
            layer.load_state_dict(ones | {"bias": wrong})
        assert layer.weight.tolist() == before
    with pytest.raises(TypeError, match="expected a dict of tensors, got list"):
        net.load_state_dict([])


def test_modules_copy_and_pickle():
    net = make_net()
    x = minamp.randn(5, 4)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert twin[0].weight is not net[0].weight and isinstance(twin[0].weight, nn.Parameter)
        assert np.array_equal(twin.eval()(x).data.numpy(), net.eval()(x).data.numpy())
        twin(x).sum().backward()
        assert twin[0].weight.grad is not None and net[0].weight.grad is None


# -- initial values


def test_linear_and_conv_start_uniform_within_one_over_root_fan_in():
    minamp.manual_seed(0)
    for layer, fan in (
        (nn.Linear(100, 400), 100),
        (nn.Conv2d(16, 40, 5), 400),
        (nn.Conv2d(16, 40, 5, groups=4), 100),
        (nn.Conv1d(16, 200, 5), 80),
        (nn.Conv3d(16, 20, (5, 2, 3), groups=2), 240),
        (nn.ConvTranspose1d(40, 16, 5), 80),
        (nn.ConvTranspose2d(40, 16, 5), 400),
    ):
        bound = 1 / math.sqrt(fan)
        for p, least in ((layer.weight, 0.99), (layer.bias, 0.8)):
            top = np.abs(p.data.numpy()).max() / bound
            assert least < top <= 1.0000001 and abs(p.data.numpy().mean()) < 0.3 * bound and p.dtype == f32
        assert layer.weight.data.numpy().std() == pytest.approx(bound / math.sqrt(3), rel=0.03)


def test_initial_values_are_pinned_by_the_seed():
    minamp.manual_seed(7)
    a = make_net()
    minamp.manual_seed(7)
    b = make_net()
    assert np.array_equal(a[0].weight.data.numpy(), b[0].weight.data.numpy())
    assert not np.array_equal(a[0].weight.data.numpy(), make_net()[0].weight.data.numpy())


@pytest.mark.parametrize(
    ("fill", "std", "uniform"),
    [
        (lambda w: nn.init.xavier_uniform_(w, gain=2.0), 2 * math.sqrt(2 / 500), True),
        (lambda w: nn.init.xavier_normal_(w), math.sqrt(2 / 500), False),
        (lambda w: nn.init.kaiming_uniform_(w, nonlinearity="relu"), math.sqrt(2 / 200), True),
        (
            lambda w: nn.init.kaiming_normal_(w, mode="fan_out", nonlinearity="tanh"),
            5 / 3 / math.sqrt(300),
            False,
        ),
        (lambda w: nn.init.kaiming_normal_(w, a=1.0), math.sqrt(1 / 200), False),
        (lambda w: nn.init.uniform_(w, -3.0, 3.0), math.sqrt(3), True),
        (lambda w: nn.init.normal_(w, 0.0, 0.5), 0.5, False),
    ],
)
@pytest.mark.parametrize("dtype", [f16, minamp.bfloat16, f32, f64])
def test_init(fill, std, uniform, dtype):
    minamp.manual_seed(1)
    w = nn.Parameter(np.zeros((300, 200), dtype))
    version = w._version[0]
    assert fill(w) is w and w.dtype == dtype and w._version[0] > version and w.is_leaf
    values = w.data.numpy().astype(f64)
    assert values.std() == pytest.approx(std, rel=0.02) and abs(values.mean()) < 0.02 * std
    assert (np.abs(values).max() < 1.001 * math.sqrt(3) * std) == uniform


@pytest.mark.parametrize("dtype", [f16, minamp.bfloat16, f32])
def test_uniform_values_stay_below_the_upper_bound(dtype):
    minamp.manual_seed(3)
    w = nn.init.uniform_(minamp.zeros(50000, dtype=dtype), 1.0, 3.0).double()
    assert w.min().item() >= 1.0 and w.max().item() < 3.0
    with pytest.raises(RuntimeError, match="uniform_: draws floating values, dtype int64 can't hold them"):
        nn.init.uniform_(minamp.zeros(2, dtype=minamp.int64))


def test_init_constants_and_errors():
    w = nn.Parameter(np.zeros((2, 2), f32))
    assert nn.init.ones_(w).tolist() == [[1, 1], [1, 1]] and nn.init.zeros_(w).tolist() == [[0, 0], [0, 0]]
    assert nn.init.constant_(w, 0.5).data.numpy().max() == 0.5
    with pytest.raises(ValueError, match=r"at least 2 dimensions, this one has shape \(3,\)"):
        nn.init.xavier_uniform_(minamp.zeros(3))
    before = w._version[0]
    for fill in (nn.init.normal_, nn.init.uniform_, nn.init.ones_, nn.init.xavier_normal_):
        assert fill(w.data) is not w and w._version[0] == (before := before + 1), "w.data is w's memory"
        with pytest.raises(TypeError, match="needs a Tensor, got ndarray: give the parameter itself"):
            fill(w.data.numpy())
    with pytest.raises(ValueError, match="unknown nonlinearity 'swish'"):
        nn.init.kaiming_normal_(w, nonlinearity="swish")
    with pytest.raises(ValueError, match="mode must be 'fan_in' or 'fan_out', got 'fan'"):
        nn.init.kaiming_normal_(w, mode="fan")


# -- layers: each is its op with its own parameters and options


def same(a, b):
    np.testing.assert_array_equal(a.data.numpy(), b.data.numpy())


def test_layers_call_their_ops():
    x, images = minamp.randn(6, 8), minamp.randn(2, 4, 9, 9)
    linear = nn.Linear(8, 3)
    np.testing.assert_allclose(
        linear(x).data.numpy(),
        x.data.numpy().astype(f64) @ linear.weight.data.numpy().T + linear.bias.data.numpy(),
        rtol=1e-5,
        atol=1e-6,
    )
    conv = nn.Conv2d(4, 6, (3, 2), stride=2, padding=(1, 0), dilation=(1, 2), groups=2)
    assert conv.weight.shape == (6, 2, 3, 2)
    same(conv(images), F.conv2d(images, conv.weight, conv.bias, (2, 2), (1, 0), (1, 2), 2))
    line = nn.Conv1d(4, 6, 3, padding=1, bias=False)
    same(line(images[:, :, 0]), F.conv1d(images[:, :, 0], line.weight, None, 1, 1))
    deep, solid = minamp.randn(2, 4, 5, 4, 4), nn.Conv3d(4, 6, (3, 2, 1), (2, 1, 1), 1, groups=2)
    assert solid.weight.shape == (6, 2, 3, 2, 1)
    same(solid(deep), F.conv3d(deep, solid.weight, solid.bias, (2, 1, 1), 1, 1, 2))
    up = nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2)
    assert up.weight.shape == (4, 3, 3, 3) and up(images).shape == (2, 6, 18, 18)
    same(up(images), F.conv_transpose2d(images, up.weight, up.bias, 2, 1, 1, 2))
    up = nn.ConvTranspose1d(4, 6, 3, 2, 1, 1, 2, False, 2)
    same(up(images[:, :, 0]), F.conv_transpose1d(images[:, :, 0], up.weight, None, 2, 1, 1, 2, 2))
    same(nn.MaxPool2d(3, 2, padding=1)(images), F.max_pool2d(images, 3, 2, 1))
    same(nn.MaxPool2d(2, ceil_mode=True)(images), F.max_pool2d(images, 2, ceil_mode=True))
    same(nn.AvgPool2d(3, 2, 1, count_include_pad=False)(images), F.avg_pool2d(images, 3, 2, 1, False, False))
    same(nn.AdaptiveAvgPool2d((2, 1))(images), F.adaptive_avg_pool2d(images, (2, 1)))
    same(nn.AdaptiveMaxPool2d((2, None))(images), F.adaptive_max_pool2d(images, (2, None)))
    lines = images[:, :, 0]
    same(nn.MaxPool1d(3, 2, 1, 2, ceil_mode=True)(lines), F.max_pool1d(lines, 3, 2, 1, 2, True))
    same(nn.AvgPool1d(3, 2, 1, True, False)(lines), F.avg_pool1d(lines, 3, 2, 1, True, False))
    same(nn.AdaptiveAvgPool1d(4)(lines), F.adaptive_avg_pool1d(lines, 4))
    norm = nn.LayerNorm((9, 9), eps=1e-3)
    same(norm(images), F.layer_norm(images, (9, 9), norm.weight, norm.bias, 1e-3))
    assert (
        nn.LayerNorm(9, bias=False).bias is None and nn.LayerNorm(9, elementwise_affine=False).weight is None
    )
    table = nn.Embedding(10, 3)
    picked = table(minamp.tensor([[1, 9], [1, 0]]))
    same(picked[0, 1], table.weight[9])
    picked.sum().backward()
    assert table.weight.grad.numpy()[:, 0].tolist() == [1, 2, 0, 0, 0, 0, 0, 0, 0, 1]
    same(nn.ReLU(inplace=True)(x), F.relu(x))
    same(nn.GELU("tanh")(x), F.gelu(x, approximate="tanh"))
    same(nn.SiLU()(x), F.silu(x))
    same(nn.Sigmoid()(x), F.sigmoid(x))
    same(nn.Tanh()(x), F.tanh(x))
    same(nn.Softmax(dim=1)(x), F.softmax(x, dim=1))
    same(nn.LogSoftmax(-1)(x), F.log_softmax(x, dim=1))
    same(nn.ZeroPad2d((1, 0, 2, 3))(images), F.pad(images, (1, 0, 2, 3)))
    same(nn.ReflectionPad2d(2)(images), F.pad(images, (2, 2, 2, 2), "reflect"))
    same(nn.ReplicationPad2d((1, 0, 2, 3))(images), F.pad(images, (1, 0, 2, 3), "replicate"))
    same(nn.PixelShuffle(2)(images), F.pixel_shuffle(images, 2))
    same(nn.PixelUnshuffle(3)(images), F.pixel_unshuffle(images, 3))
    same(nn.Unflatten(1, (2, 2))(images), images.reshape(2, 2, 2, 9, 9))
    columns = nn.Unfold((2, 3), (1, 2), 1, (2, 1))(images)
    same(columns, F.unfold(images, (2, 3), (1, 2), 1, (2, 1)))
    same(nn.Fold(9, (2, 3), (1, 2), 1, (2, 1))(columns), F.fold(columns, 9, (2, 3), (1, 2), 1, (2, 1)))
    assert nn.Flatten()(images).shape == (2, 324) and nn.Flatten(2, 3)(images).shape == (2, 4, 81)
    assert nn.Identity(5, anything=1)(x) is x


def test_layer_errors():
    with pytest.raises(ValueError, match="Conv2d: groups=2 must divide in_channels=3 and out_channels=4"):
        nn.Conv2d(3, 4, 3, groups=2)
    with pytest.raises(ValueError, match=r"Dropout: p must lie in \[0, 1\], got 1.5"):
        nn.Dropout(1.5)
    with pytest.raises(ValueError, match=r"BatchNorm2d: expected 4 dimensions, got shape \(2, 3\)"):
        nn.BatchNorm2d(3)(minamp.ones(2, 3))

    with pytest.raises(ValueError, match=r"InstanceNorm1d: expected 2 or 3 dimensions, got shape \(3,\)"):
        nn.InstanceNorm1d(3)(minamp.ones(3))
    with pytest.raises(ValueError, match="InstanceNorm2d: x .* has 4 channels, num_features is 3"):
        nn.InstanceNorm2d(3, affine=True)(minamp.ones(2, 4, 5, 5))
    with pytest.warns(UserWarning, match="num_features is 3, which is not used with affine=False"):
        nn.InstanceNorm2d(3)(minamp.ones(2, 4, 5, 5))
    with pytest.raises(TypeError, match="Unflatten: unflattened_size must be a tuple of ints, got 2"):
        nn.Unflatten(1, 2)
    with pytest.raises(ValueError, match=r"Dropout2d: p must lie in \[0, 1\], got -1"):
        nn.Dropout2d(-1)


def test_losses_call_their_ops():
    x, y = minamp.randn(5, 3), minamp.rand(5, 3)
    classes, weight = minamp.tensor([0, 2, 1, 1, 2]), minamp.tensor([1.0, 2.0, 0.5])
    same(nn.MSELoss(reduction="sum")(x, y), F.mse_loss(x, y, reduction="sum"))
    same(nn.L1Loss()(x, y), F.l1_loss(x, y))
    same(nn.SmoothL1Loss(beta=0.5)(x, y), F.smooth_l1_loss(x, y, beta=0.5))
    same(
        nn.CrossEntropyLoss(weight, ignore_index=2, label_smoothing=0.1)(x, classes),
        F.cross_entropy(x, classes, weight=weight, ignore_index=2, label_smoothing=0.1),
    )
    logs = F.log_softmax(x, dim=1)
    same(
        nn.NLLLoss(weight, reduction="none")(logs, classes),
        F.nll_loss(logs, classes, weight=weight, reduction="none"),
    )
    same(nn.BCELoss(weight)(F.sigmoid(x), y), F.binary_cross_entropy(F.sigmoid(x), y, weight=weight))
    same(
        nn.BCEWithLogitsLoss(pos_weight=weight)(x, y),
        F.binary_cross_entropy_with_logits(x, y, pos_weight=weight),
    )
    assert list(nn.CrossEntropyLoss(weight).state_dict()) == ["weight"]


def test_dropout_only_in_training():
    minamp.manual_seed(0)
    drop, x = nn.Dropout(0.25), minamp.ones(100, 100)
    y = drop(x).data.numpy()
    assert set(np.unique(y)) == {0.0, f32(1 / 0.75)} and (y == 0).mean() == pytest.approx(0.25, abs=0.02)
    same(drop.eval()(x), x)


def test_dropout_of_channels_drops_all_or_nothing():
    for drop, shape in (
        (nn.Dropout1d(0.25), (60, 50, 3)),
        (nn.Dropout1d(0.25), (3000, 3)),  # channels without a batch
        (nn.Dropout2d(0.25), (60, 50, 2, 2)),
    ):
        x = minamp.ones(*shape, dtype=minamp.float16, requires_grad=True)
        y = drop(x)
        y.sum().backward()
        assert y.dtype == f16 and np.array_equal(x.grad.numpy(), y.detach().numpy())
        channels = y.detach().numpy().reshape(3000, -1)
        assert set(np.unique(channels)) == {0.0, f16(1 / 0.75)} and (channels == channels[:, :1]).all()
        assert (channels[:, 0] == 0).mean() == pytest.approx(0.25, abs=0.03)
        same(drop.eval()(x.detach()), x.detach())
    with pytest.warns(UserWarning, match=r"dropout2d: input \(2, 3, 4\) is taken as \(N, C, L\)"):
        y = nn.Dropout2d()(minamp.ones(2, 3, 4)).numpy()
    assert (y == y[:, :, :1]).all()
    with pytest.raises(RuntimeError, match=r"dropout1d: input must be \(N, C, L\) or \(C, L\)"):
        nn.Dropout1d()(minamp.ones(2, 3, 4, 5))
    with pytest.raises(RuntimeError, match=r"dropout2d: input must be \(N, C, H, W\), got shape \(2, 3\)"):
        nn.Dropout2d()(minamp.ones(2, 3))


@pytest.mark.parametrize("shape", [(3, 6), (2, 3, 6), (3, 4, 5), (2, 3, 4, 5)])
def test_instance_norm(shape):
    layer = nn.InstanceNorm1d if 6 in shape else nn.InstanceNorm2d
    spatial = tuple(range(-1 if 6 in shape else -2, 0))
    norm, x = layer(3, affine=True, track_running_stats=True), np.random.default_rng(1).standard_normal(shape)
    assert list(norm.state_dict()) == ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    nn.init.constant_(norm.weight, 2.0)
    y = norm(minamp.tensor(x.astype(f32))).data.numpy()
    mean, var = x.mean(spatial, keepdims=True), x.var(spatial, keepdims=True)
    np.testing.assert_allclose(y, 2 * (x - mean) / np.sqrt(var + 1e-5), rtol=1e-4, atol=1e-5)
    # the running statistics follow the mean of the samples' own
    count = np.prod([shape[d] for d in spatial])
    seen = mean.reshape(-1, 3).mean(0), (var * count / (count - 1)).reshape(-1, 3).mean(0)
    np.testing.assert_allclose(norm.running_mean.numpy(), 0.1 * seen[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(norm.running_var.numpy(), 0.9 + 0.1 * seen[1], rtol=1e-4)
    norm.eval()
    column = (3, *(1 for _ in spatial))
    moved = (x - 0.1 * seen[0].reshape(column)) / np.sqrt(0.9 + 0.1 * seen[1].reshape(column))
    np.testing.assert_allclose(
        norm(minamp.tensor(x.astype(f32))).data.numpy(), 2 * moved, rtol=1e-4, atol=1e-5
    )
    bare = layer(3).eval()  # goes by the sample in evaluation too
    assert list(bare.state_dict()) == []
    with minamp.autocast():
        assert bare(minamp.tensor(x).half()).dtype == f16 and norm(minamp.tensor(x.astype(f32))).dtype == f32
    np.testing.assert_allclose(
        bare(minamp.tensor(x)).numpy(), (x - mean) / np.sqrt(var + 1e-5), rtol=1e-12, atol=1e-12
    )
    with pytest.raises(ValueError, match="instance_norm: input .* has one value per channel and sample"):
        bare(minamp.ones(*(1 if i - len(shape) in spatial else n for i, n in enumerate(shape))))
    with pytest.raises(RuntimeError, match="instance_norm: use_input_stats=False needs running_mean and"):
        F.instance_norm(minamp.ones(2, 3, 4), use_input_stats=False)


def test_batch_norm_running_statistics():
    rng = np.random.default_rng(0)
    bn, plain = nn.BatchNorm2d(3), nn.BatchNorm2d(3, momentum=None)
    mean, var, means = np.zeros(3), np.ones(3), []
    for _ in range(4):
        x = rng.standard_normal((5, 3, 2, 2)) * 3 + 1
        y = bn(minamp.tensor(x.astype(f32)))
        plain(minamp.tensor(x.astype(f32)))
        mean = 0.9 * mean + 0.1 * x.mean((0, 2, 3))
        var = 0.9 * var + 0.1 * x.var((0, 2, 3), ddof=1)
        means.append(x.mean((0, 2, 3)))
        column = (1, 3, 1, 1)
        want = (x - x.mean((0, 2, 3)).reshape(column)) / np.sqrt(x.var((0, 2, 3)).reshape(column) + 1e-5)
        np.testing.assert_allclose(y.data.numpy(), want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(bn.running_mean.numpy(), mean, rtol=1e-5)
    np.testing.assert_allclose(bn.running_var.numpy(), var, rtol=1e-5)
    np.testing.assert_allclose(plain.running_mean.numpy(), np.mean(means, 0), rtol=1e-5)
    assert bn.num_batches_tracked.item() == 4
    bn.eval()
    want = (x - mean.reshape(column)) / np.sqrt(var.reshape(column) + 1e-5)
    np.testing.assert_allclose(bn(minamp.tensor(x.astype(f32))).data.numpy(), want, rtol=1e-4, atol=1e-5)
    assert bn.num_batches_tracked.item() == 4
    np.testing.assert_allclose(bn.running_mean.numpy(), mean, rtol=1e-5)
    bare = nn.BatchNorm1d(3, affine=False, track_running_stats=False).eval()
    assert list(bare.state_dict()) == []
    np.testing.assert_allclose(bare(minamp.randn(50, 3)).data.numpy().mean(0), 0, atol=1e-6)


def test_functional_has_every_op_torch_has_there():
    assert all(callable(getattr(F, name)) for name in F.__all__)
    ops = {getattr(F, name).__name__ for name in F.__all__}
    assert ops == set(F.__all__)


# -- clipping: B41


def with_grads(*values, dtype=f32):
    ps = []
    for v in values:
        p = nn.Parameter(np.zeros(1, dtype))
        p.grad = minamp.Tensor(np.array([v], dtype))
        ps.append(p)
    return ps


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("grads", "args", "norm", "after"),
    [
        ((3, 4), (1.0,), 5.0, (0.5999999, 0.7999998)),  # the 1e-6 in the denominator shows
        ((3, 4), (10.0,), 5.0, (3, 4)),
        ((3, 4), (5.0,), 5.0, (2.9999993, 3.9999990)),  # equality also shrinks
        ((3, -4), (1.0, INF), 4.0, (0.7499998, -0.9999998)),
        ((3, -4), (1.0, "inf"), 4.0, (0.7499998, -0.9999998)),
        ((3, -4), (1.0, -INF), 3.0, (0.9999996, -1.3333329)),
        ((3, -4), (1.0, 1), 7.0, (0.4285713, -0.5714285)),
        ((4, 9), (1.0, 0.5), 25.0, (0.16, 0.36)),
        ((3, INF), (1.0,), INF, (0, NAN)),
        ((3, NAN), (1.0,), NAN, (NAN, NAN)),
        ((1e20, 1e20), (1.0,), INF, (0, 0)),  # the squares overflow: finite gradients silently zeroed
        ((0, 0), (1.0,), 0.0, (0, 0)),
        ((3, 4), (-1.0,), 5.0, (-0.5999999, -0.7999998)),  # not validated
    ],
)
def test_B41_clip_grad_norm(grads, args, norm, after):
    ps = with_grads(*grads)
    held = [p.grad for p in ps]
    total = nn.utils.clip_grad_norm_(ps, *args, foreach=False)
    assert isinstance(total, minamp.Tensor) and total.shape == () and total.dtype == f32
    np.testing.assert_allclose(total.item(), norm, rtol=2e-7)
    np.testing.assert_allclose([p.grad.item() for p in ps], after, rtol=1e-7, atol=6e-8)  # seven digits
    assert all(p.grad is g and g._version[0] == 1 for p, g in zip(ps, held, strict=True)), "in place"


def test_B41_error_if_nonfinite_leaves_the_gradients():
    ps = with_grads(3, INF)
    with pytest.raises(RuntimeError, match="norm of order 2.0 is inf.*error_if_nonfinite=False to go on"):
        nn.utils.clip_grad_norm_(ps, 1.0, error_if_nonfinite=True)
    assert [p.grad.item() for p in ps] == [3.0, INF]


def test_B41_nothing_to_clip():
    assert nn.utils.clip_grad_norm_([], 1.0).item() == 0.0
    assert nn.utils.clip_grad_norm_([nn.Parameter(np.ones(1, f32))], 1.0).item() == 0.0
    with pytest.warns(UserWarning, match="clip_grad_norm_: got an empty generator"):
        assert nn.utils.clip_grad_norm_((p for p in ()), 1.0).item() == 0.0
    p = with_grads(8)[0]
    assert nn.utils.clip_grad_norm_(p, 2.0).item() == 8.0 and p.grad.item() == pytest.approx(2.0)


def test_B41_clip_grad_value():
    ps = with_grads(-10, 2, 9.8, NAN, INF)
    nn.utils.clip_grad_value_(ps, 2.5)
    np.testing.assert_array_equal([p.grad.item() for p in ps], [-2.5, 2, 2.5, NAN, 2.5])


@pytest.mark.parametrize("dtype", [minamp.float16, minamp.bfloat16])
def test_half_gradients_have_a_float32_norm(dtype):
    p = nn.Parameter(minamp.ones(10000).to(dtype))
    p.grad = minamp.full((10000,), 300.0).to(dtype)  # 300^2 leaves float16, and the sum's root is 30000
    total = nn.utils.clip_grad_norm_([p], 100.0)
    assert total.dtype == f32 and total.item() == 30000.0
    assert p.grad.dtype == dtype
    assert np.array_equal(p.grad.numpy(), np.ones(10000, f32).astype(dtype))


@pytest.mark.parametrize("order", [INF, -INF, 0, 0.5, 1, 2, 3, 10, -1])
@pytest.mark.parametrize("dtype", [minamp.float16, f32])
def test_norms_of_every_order_are_those_of_float64(order, dtype):
    rng = np.random.default_rng(0)
    grads = [rng.standard_normal(shape) * 300 for shape in ((), (7,), (0, 3), (3, 4))] + [
        np.array([6e4, 1.0])
    ]
    ps = [nn.Parameter(minamp.zeros(g.shape, dtype=dtype)) for g in grads]
    for p, g in zip(ps, grads, strict=True):
        p.grad = minamp.tensor(g, dtype=dtype)
    values = [p.grad.numpy().astype(f64) for p in ps]
    norm = np.linalg.norm([np.linalg.norm(v.ravel(), order) for v in values if v.size], order)
    total = nn.utils.clip_grad_norm_(ps, 0.5, order)
    assert total.dtype == f32
    np.testing.assert_allclose(total.item(), norm, rtol=2e-6)
    for p, v in zip(ps, values, strict=True):
        rtol = 4e-6 if dtype == f32 else 2**-10  # a place in half
        np.testing.assert_allclose(p.grad.numpy().astype(f64), v * min(0.5 / norm, 1.0), rtol=rtol, atol=6e-8)


def test_float64_gradients_have_a_float64_norm():
    ps = with_grads(1e200, dtype=f64)
    assert nn.utils.clip_grad_norm_(ps, 1.0).dtype == f64


def test_parameters_to_vector_and_back():
    net = nn.Linear(3, 2)
    vector = nn.utils.parameters_to_vector(net.parameters())
    assert vector.shape == (8,) and vector.requires_grad
    nn.utils.vector_to_parameters(minamp.arange(8.0), net.parameters())
    assert (
        net.weight.tolist() == [[0, 1, 2], [3, 4, 5]] and net.bias.tolist() == [6, 7] and net.weight.is_leaf
    )
    for wrong in (minamp.zeros(7), minamp.zeros(2, 4)):
        with pytest.raises(
            RuntimeError, match=r"vec has shape \(.*\), the parameters hold 8 values: give a vector"
        ):
            nn.utils.vector_to_parameters(wrong, net.parameters())
    with pytest.raises(TypeError, match="vector_to_parameters: vec is a list, not a Tensor"):
        nn.utils.vector_to_parameters([0.0] * 8, net.parameters())
    assert net.bias.tolist() == [6, 7] and net.weight.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_the_smaller_layers_call_their_functions():
    x = minamp.randn(2, 4, 4, 4)
    for layer, expected in [
        (nn.GroupNorm(2, 4), lambda: F.group_norm(x, 2)),
        (nn.RMSNorm(4), lambda: F.rms_norm(x, (4,))),
        (nn.PReLU(), lambda: F.leaky_relu(x, 0.25)),
        (nn.LeakyReLU(0.1), lambda: F.leaky_relu(x, 0.1)),
        (nn.ELU(2.0), lambda: F.elu(x, 2.0)),
        (nn.Softplus(2.0), lambda: F.softplus(x, 2.0)),
        (nn.LogSigmoid(), lambda: F.logsigmoid(x)),
        (nn.Upsample(scale_factor=2), lambda: F.interpolate(x, scale_factor=2)),
    ]:
        np.testing.assert_allclose(
            layer(x).detach().numpy(), expected().numpy(), rtol=1e-6, err_msg=repr(layer)
        )
    log_p, q = F.log_softmax(x, 1), F.softmax(x * 0.5, 1)
    assert nn.HuberLoss(delta=0.5)(x, q).item() == F.huber_loss(x, q, delta=0.5).item()
    assert (
        nn.KLDivLoss(reduction="batchmean")(log_p, q).item()
        == F.kl_div(log_p, q, reduction="batchmean").item()
    )
    with pytest.raises(ValueError, match="3 channels can't be split into 2 groups"):
        nn.GroupNorm(2, 3)


def test_layers_of_no_features_and_gains_of_convolutions():
    for inside, outside in ((0, 3), (4, 0), (0, 0)):
        layer, x = nn.Linear(inside, outside), minamp.ones(2, inside, requires_grad=True)
        y = layer(x)
        assert y.tolist() == [[0.0] * outside] * 2
        y.sum().backward()
        assert layer.weight.grad.shape == (outside, inside) and layer.bias.grad.tolist() == [2.0] * outside
        assert x.grad.tolist() == [[0.0] * inside] * 2
    assert nn.init.kaiming_normal_(minamp.zeros(0, 4), mode="fan_out").shape == (0, 4)
    for kind in ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"):
        assert nn.init.calculate_gain(kind) == 1


def test_a_padding_row_counted_from_the_end():
    table = nn.Embedding(5, 3, padding_idx=-1)
    assert table.padding_idx == 4 and table.weight[4].tolist() == [0.0] * 3
    for wrong in (5, -6):
        with pytest.raises(
            AssertionError, match=f"Embedding: padding_idx {wrong} is outside a table of 5 rows"
        ):
            nn.Embedding(5, 3, padding_idx=wrong)


def test_the_padding_row_of_an_embedding_stays_zero():
    table = nn.Embedding(5, 3, padding_idx=1)
    out = table(minamp.tensor([1, 2, 1]))
    assert out[0].tolist() == [0.0] * 3
    out.sum().backward()
    assert table.weight.grad[1].tolist() == [0.0] * 3 and table.weight.grad[2].tolist() == [1.0] * 3


def test_copies_of_a_module_start_without_gradients():
    net = nn.Linear(2, 2)
    net(minamp.ones(1, 2)).sum().backward()
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert twin.weight.grad is None and twin.weight.equal(net.weight) and twin.weight.requires_grad
    assert net.weight.grad is not None


def test_the_activations_of_mobile_networks_and_bilinear():
    x = minamp.tensor([[-4.0, -1.0, 0.5, 7.0]])
    layers = {
        nn.ReLU6(): [0.0, 0.0, 0.5, 6.0],
        nn.Hardtanh(-2, 3): [-2.0, -1.0, 0.5, 3.0],
        nn.Hardsigmoid(): [0.0, 1 / 3, 3.5 / 6, 1.0],
        nn.Hardswish(inplace=True): [0.0, -1 / 3, 1.75 / 6, 7.0],
        nn.Mish(): [-0.0725917, -0.303401, 0.375245, 6.999988],
        nn.SELU(): [-1.725899, -1.111331, 0.525350, 7.354907],
        nn.GLU(): [-4 / (1 + np.exp(-0.5)), -1 / (1 + np.exp(-7.0))],
    }
    for layer, wanted in layers.items():
        np.testing.assert_allclose(layer(x).numpy()[0], wanted, rtol=1e-5, err_msg=repr(layer))
    assert repr(nn.Hardtanh(-2, 3)) == "Hardtanh(min_val=-2, max_val=3)" and repr(nn.GLU()) == "GLU(dim=-1)"
    with pytest.raises(ValueError, match="hardtanh: min_val=2 must not be above max_val=1"):
        nn.Hardtanh(2, 1)(x)
    with pytest.raises(RuntimeError, match=r"glu: dimension -1 of \(1, 3\) must have an even size"):
        nn.GLU()(x[:, :3])
    layer = nn.Bilinear(2, 3, 4)
    assert {n: p.shape for n, p in layer.named_parameters()} == {"weight": (4, 2, 3), "bias": (4,)}
    a, b = minamp.randn(5, 2), minamp.randn(5, 3)
    wanted = np.einsum("ni,oij,nj->no", *(t.numpy() for t in (a, layer.weight.detach(), b)))
    np.testing.assert_allclose((layer(a, b) - layer.bias).detach().numpy(), wanted, rtol=1e-4, atol=1e-6)
    assert repr(layer) == "Bilinear(in1_features=2, in2_features=3, out_features=4, bias=True)"


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d])
def test_a_layer_of_ones_own_draws_its_weights_when_all_else_is_there(kind):
    class Own(kind):
        def reset_parameters(self):
            self.seen = self.in_channels, self.out_channels, self.kernel_size, self.groups, self.dilation
            super().reset_parameters()

    layer = Own(4, 8, 3, groups=2, dilation=2)
    dims = layer.weight.ndim - 2
    assert layer.seen == (4, 8, (3,) * dims, 2, (2,) * dims)


def test_what_stands_at_a_dotted_name():
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2)))
    assert net.get_submodule("1.0") is net[1][0] and net.get_submodule("") is net
    assert net.get_parameter("0.weight") is net[0].weight
    assert net.get_buffer("1.0.running_mean") is net[1][0].running_mean
    for get, target, text in (
        (net.get_submodule, "1.3", "Sequential has no module '3'"),
        (net.get_submodule, "0.weight", "Linear has no module 'weight'"),
        (net.get_parameter, "1.0.running_mean", "BatchNorm1d has no parameter 'running_mean'"),
        (net.get_buffer, "0.weight", "Linear has no buffer 'weight'"),
    ):
        with pytest.raises(AttributeError, match=text):
            get(target)
