"""Ways to store a weight, behind one interface: what step() updates, and how the new value gets back.

    class                    stored                        an update smaller than half a step of the format
    Float                    float32 (or float64)          is kept, down to 2^-25 of the weight
    Master                   half and a float32 copy       adds up in the copy
    Nearest                  half alone                    is lost: 1 - 1e-4 is 1 in float16, every time
    Stochastic(Nearest)      half alone                    moves the weight a whole step, with the right odds
    Kahan(Nearest)           half and what rounding lost   waits in the second half number

The update itself is float32 arithmetic in every case. An object here lives for one step; what must last is in
the optimizer's state. Bytes per weight beside the optimizer's buffers: 4, 6, 2, 2, 4. GradScaler works in float32
gradients, so of the float16 weights it takes only those with a master.
"""

from minamp import backends
from minamp.backends import narrow, widen
from minamp.formats import float32, float64, is_half, stochastic_round
from minamp.tensor import Tensor


class Float:
    """A float32 or float64 weight `p` of `optimizer`, updated where it lies."""

    def __init__(self, p, optimizer):
        self.p, self.optimizer = p, optimizer

    def owner(self):
        """The tensor whose .grad the step uses."""
        return self.p

    def lacks_gradient(self, stepping):
        """Whether the owner's gradient has to be made from the weight's first."""
        return False

    def read(self):
        """The array to update in place; the update of a half one is float32 arithmetic, rounded to nearest once."""
        return self.p._data

    def half(self):
        """The half array that takes the updated values too, rounded; None if there is none."""

    def write(self, w):
        """What remains to be done once the array is updated."""
        self.p._version[0] += 1  # a cached half copy of the weight is stale now


class Nearest(Float):
    """A half weight alone, rounded to nearest."""


class Stochastic(Float):
    """Rounded up or down at random, so that the weight is right on average (Gupta et al., 2015)."""

    def read(self):
        return widen(self.p._data)

    def write(self, w):
        # drawn on the host, also for a weight on a GPU: slow there, and meant for small lessons
        rounded = stochastic_round(backends.host(w), self.p.dtype, self.optimizer.generator)
        self.p._data[...] = backends.move(rounded, self.p.device)
        super().write(w)


class Kahan(Float):
    """Rounded to nearest; what that added is kept in `compensation`, of the weight's own format.

    The step starts from weight - compensation. Kahan summation of the updates, from Zamirai et al., "Revisiting
    BFloat16 Training", 2020. The two numbers have twice the format's digits: updates below 2^-17 of a bfloat16
    weight, or 2^-23 of a float16 one, can still be lost, and in float16 all below 2^-25, half its smallest number.
    """

    def read(self):
        w, state = widen(self.p._data), self.optimizer.state[self.p]
        if "compensation" not in state:
            state["compensation"] = Tensor(backends.of(w).zeros_like(self.p._data))
        c = state["compensation"]
        check_shape("compensation", c, self.p, "build a new optimizer")
        if _written_by_others(c, self.p):
            # Rounding moves a weight by at most half a step; what would move it further belongs to another.
            mine = narrow(w - 0.5 * widen(c._data), self.p.dtype) == self.p._data
            c.data = backends.of(w).masked_fill(c._data, ~mine, 0.0)
        w -= widen(c._data)
        return w

    def write(self, w):
        backends.of(w).store(self.p._data, w)
        super().write(w)
        c, added = self.optimizer.state[self.p]["compensation"], widen(self.p._data)
        added -= w
        m = backends.of(w)
        # an infinite weight stays infinite: inf - inf would make it nan
        added = m.masked_fill(added, ~m.isfinite(added), 0.0)
        c._data[...] = narrow(added, c.dtype)
        c.seen = self.p._version[0]


class Master(Float):
    """A half weight with a float32 master: updates add up there and are rounded into the half weight.

    Micikevicius et al., "Mixed Precision Training", 2018, section 3.1.
    """

    def owner(self):
        return self.p.master

    def read(self):
        return self.p.master._data

    def half(self):
        return self.p._data

    def write(self, w):
        super().write(w)
        master = self.p.master
        master.grad, master.seen = None, self.p._version[0]

    def master(self):
        """The float32 tensor, made when first asked for."""
        p, state = self.p, self.optimizer.state[self.p]
        if "master" not in state:
            state["master"] = Tensor(widen(p._data), requires_grad=True)
        master = state["master"]
        check_shape("master", master, p, "build a new optimizer")
        if _written_by_others(master, p):
            # The new values count, and where the weight still is the rounded master, the master's digits do.
            same = narrow(master._data, p.dtype) == p._data
            master.data = backends.of(p._data).where(same, master._data, widen(p._data))
            master.seen = p._version[0]
        p.master = master  # for clip_grad_norm_(model.parameters()) and model.zero_grad()
        return master

    def lacks_gradient(self, stepping):
        """Whether the half gradient is to be widened into master.grad: unless that is set, by an earlier call or by the user.

        RuntimeError if p.grad has changed after that earlier call: it may be scaled where master.grad is
        unscaled, so neither of them can be what is meant.
        """
        p, master = self.p, self.master()
        g = master.grad
        if g is not None:
            source, version = getattr(g, "source", (None, 0))
            if source is None or source is p.grad and version == source._version[0]:
                return False
            if p.grad is not None and (stepping or source is p.grad):
                raise RuntimeError(
                    f"master weights: the {p.dtype} gradient of a parameter of shape {p.shape} was written after "
                    "its float32 copy was made (by unscale_ or master_params): write to the .grad of "
                    "optimizer.master_params(), or call zero_grad() first"
                )
        master.grad = None
        return p.grad is not None


def owners(stored, stepping=False):
    """The tensors whose .grad the step uses; masters get theirs here, widened from the half gradients all in one go."""
    lacking = [weight for weight in stored if weight.lacks_gradient(stepping)]
    for m in {backends.of(weight.p._data) for weight in lacking}:
        here = [weight.p for weight in lacking if backends.of(weight.p._data) is m]
        for p, g in zip(here, m.widen_all([p.grad._data for p in here]), strict=True):
            p.master.grad = Tensor(g)
            p.master.grad.source = (p.grad, p.grad._version[0])
    return [weight.owner() for weight in stored]


RULES = {"nearest": Nearest, "stochastic": Stochastic, "kahan": Kahan}


def of(p, group, optimizer):
    """The parameter `p` as its group's options say it is stored."""
    if not is_half(p.dtype):
        return Float(p, optimizer)
    if group.get("master_weights"):
        return Master(p, optimizer)
    return RULES[group.get("write_back", "nearest")](p, optimizer)


def check_format(where, p):
    """TypeError for a parameter whose format has no update."""
    if not is_half(p.dtype) and p.dtype not in (float32, float64):
        raise TypeError(f"{where} of shape {p.shape} is {p.dtype}, which can't be trained: give x.float()")


def check_shape(name, t, p, repair):
    """RuntimeError for a gradient or a buffer of another shape than its parameter's."""
    if t._data.shape != p._data.shape:
        raise RuntimeError(
            f"step: the {name} of a parameter of shape {p.shape} has shape {t.shape}, from before its data was "
            f"exchanged: {repair}"
        )


def check(name, group):
    """Raise ValueError for a write_back that does not exist, or that a master makes pointless."""
    rule = group.get("write_back", "nearest")
    if rule not in RULES:
        raise ValueError(f"{name}: write_back must be one of {', '.join(map(repr, RULES))}, got {rule!r}")
    if rule != "nearest" and group.get("master_weights"):
        raise ValueError(
            f"{name}: write_back={rule!r} is for half weights without a master, which loses no update: "
            "leave out one of write_back and master_weights=True"
        )
    if rule != "nearest" and group.get("capturable"):
        raise ValueError(
            f"{name}: write_back={rule!r} rounds outside the update's kernel, so a GPU can't decide to leave it out: "
            "leave out one of write_back and capturable=True"
        )


def _written_by_others(copy, p):
    """Whether somebody else (load_state_dict, copy_) has written into `p` since we did."""
    return getattr(copy, "seen", None) != p._version[0]
