"""The float32 run: one step with autocast off shows the true gradients and where the time goes. From it comes the advice."""

import functools
import math
import time
from collections import defaultdict

import numpy as np

from minamp import backends
from minamp.clinic.report import Advice
from minamp.clinic.trace import largest
from minamp.formats import cast, float16, float32, format_of, is_half
from minamp.policy import LOWER_PRECISION
from minamp.record import observe

BOTTOM, TOP = -127, 127  # exponents of float32; all subnormals count as 2^-127
SHIFT = 150  # a loss scale is a float32, between 2^-149 and 2^127
LOW, HIGH = BOTTOM - SHIFT, TOP + SHIFT + 1
FLUSH = -25  # magnitudes below 2^-25 become 0 in float16; 2^-25 itself too, a tie to even
CEILING = format_of(float16).max
ROOM = 2.0  # gradients of other batches are larger: keep a factor of 2 below the ceiling
SAMPLE = 2**13
USUAL_SCALE = 2.0**16
# A bias that a softmax or batch norm takes out again has the gradient 0: what float32's rounding leaves of the sum is at most
# 2^-18 of its largest term in small networks; a gradient that means something is more than 2^-3 of it.
NOISE = 2.0**-14
USUAL_SHARE = 0.01  # of the non-zero gradients may be flushed without anybody noticing

_SPOILS = (
    "The step leaves inf or nan in parameters that were finite before: see the findings. Without one it happens where the doctor "
    "sees no ops, such as in NumPy or in another thread."
)


class Reference(observe):
    """Context manager: the gradients and times of the ops that run inside.

    Exponents are counted without the loss scale, which `scale` (a function) tells during backward: None where none shall be.
    first: of every forward in the step as it is, but casts, (op, whether it was given a half tensor, whether it made one). What
    goes from a float32 tensor to another there is no matter of float16's range and left out; all counts where it is empty.
    """

    def __init__(self, names, scale, first=()):
        self.names, self.scale, self.first = names, scale, first
        # parameter name -> how many values of its gradient have which exponent; None -> of the gradients on the way to them
        self.counts = defaultdict(lambda: np.zeros(HIGH - LOW))
        self.largest = 0.0  # the largest magnitude, inf or nan if there is one
        self.half = False  # whether some gradients were half all the same
        self.seconds = defaultdict(float)  # {'products', 'other'} -> seconds
        self.error = None  # the Error with which the step ended
        self.ops = []  # the names of the forwards
        self._place, self._places = -1, {}  # of the last op that is no cast; by the order of its Node
        self._since = time.perf_counter()

    def see(self, phase, op, inputs, output):
        kind = "products" if op.policy == LOWER_PRECISION else "other"
        self.seconds[kind] += time.perf_counter() - self._since
        if phase == "backward":
            self._gradient(op, inputs, output)
        else:
            self.ops.append(op.name)
            if self.first and op.name != "to":
                self._place += 1
                if output._node is not None:
                    self._places[output._node.order] = self._place
        self._since = time.perf_counter()  # so that observing does not count

    def _gradient(self, op, inputs, output):
        incoming, node, i = inputs
        edge, array = node.edges[i], getattr(output, "_data", output)
        if not hasattr(array, "dtype") or edge is None:
            return
        shape, dtype = node.metas[i]
        name = self.names.get(id(edge.leaf)) if edge.op is None else None
        if name is None and (op.is_cast or edge.op is None or math.prod(shape) == 1):
            return  # inputs; the loss, which is float32; a cast passes on what was counted already
        self.half = self.half or is_half(dtype)
        scale = self.scale()
        if scale is None:
            return
        top, counts = largest(array) / scale, self.counts[name]
        if self.first and math.isfinite(top) and not self._was_half(node, edge):
            return
        self.largest = top if math.isnan(top) else max(self.largest, top)
        if name and _is_noise(array, incoming):
            return
        _count_exponents(counts, array, -math.log2(scale))

    def _was_half(self, taker, maker):
        """Whether what flows back from one Node to another was half in the step as it is; True where that is not known."""
        (_, given, _), (_, _, made) = self._in_first(taker), self._in_first(maker)
        return given or made and maker.op is not None

    def _in_first(self, node):
        """What `first` says of the op of a Node."""
        place = self._places.get(node.order, len(self.first))
        known = place < len(self.first) and node.op.name == self.first[place][0]
        return self.first[place] if known else ("", True, True)

    @property
    def sound(self):
        """Whether the run came to its end with finite gradients."""
        return self.complete and math.isfinite(self.largest)

    @property
    def complete(self):
        """Whether the step ran to its end."""
        return self.error is None

    @property
    def weights(self):
        """The names of the parameters that were given a gradient."""
        return [name for name in self.counts if name]

    @functools.cached_property
    def total(self):
        """The counts of all gradients, once the run has ended."""
        return sum(self.counts.values(), np.zeros(HIGH - LOW))

    @property
    def ceiling(self):
        """The largest power of two that keeps the largest gradient below float16's limit, with room; 0.0 if none does."""
        top = self.largest
        return 2.0 ** math.floor(math.log2(CEILING / ROOM / top)) if 0 < top < math.inf else 0.0

    def flushed(self, scale, name=None):
        """The share of the non-zero gradients (of all, or of one parameter) that float16 flushes to 0 at this scale."""
        counts = self.counts[name] if name else self.total
        total = counts.sum()
        below = FLUSH - math.log2(scale) - LOW
        return float(counts[: max(math.ceil(below), 0)].sum() / total) if total else 0.0

    def rescue(self):
        """A scale to start from: PyTorch's 2^16, more if that flushes more than USUAL_SHARE, never above the ceiling."""
        scale = min(USUAL_SCALE, self.ceiling)
        while scale < self.ceiling and self.flushed(scale) > USUAL_SHARE:
            scale *= 2.0
        return scale


def _is_noise(array, incoming):
    """Whether a bias's gradient, the sum of the incoming one, is only the rounding of terms that add up to 0."""
    if math.prod(array.shape) != max(array.shape, default=1):
        return False
    terms = incoming if isinstance(incoming, tuple) else (incoming,)  # of a Function, one for every output
    sizes = [largest(getattr(g, "_data", g)) for g in terms if g is not None]
    return largest(array) <= NOISE * max(sizes, default=0.0)


def _count_exponents(counts, array, shift):
    """Add to `counts`, from LOW on, how many values have which power of two times 2^shift; not of 0, inf and nan.

    Of a large array about SAMPLE values are looked at, evenly spread, and count for all: a share is right to about 1 per cent.
    """
    x = backends.host(array).ravel("K")
    every = x.size // SAMPLE | 1  # odd, so that it does not fall in step with the dimensions
    x = cast(x[::every], float32)
    # Sign and exponent: half the time of np.frexp.
    fields = np.bincount(x.view(np.uint32) >> 23, minlength=512)
    fields = fields[:256] + fields[256:]
    if fields[0]:
        fields[0] = np.count_nonzero(x) - fields[1:].sum()  # the subnormals without the zeros
    lowest = BOTTOM + min(max(round(shift), -SHIFT), SHIFT) - LOW
    counts[lowest : lowest + 255] += every * fields[:255]


def advice(trace):
    """Advice from the trace's float32 run: is float16 worth it here, which init_scale, would bfloat16 do."""
    ill = [p.name for p in trace.parameters.values() if not p.finite]
    if ill:
        return Advice(
            f"{len(ill)} of {len(trace.parameters)} parameters hold inf or nan before the step, {ill[0]} first: what it does "
            "with them tells little. Examine a step from before that, such as the first."
        )
    if not trace.calls("backward", "grad") and trace.error is None:
        return Advice(
            "The step ran no backward() in this thread, so there was no training to examine: give a function that, when it is "
            "called, does one whole step."
        )
    spoils = [_SPOILS] if trace.spoils else []
    run = trace.reference
    if run is None or not run.complete or not run.weights:
        why = "did not run through" if run is None or not run.complete else "gave no parameter a gradient"
        known = f"The step {why} with autocast switched off, so there are no float32 gradients to judge by."
        return Advice("\n".join([*spoils, known]))
    count = sum(math.prod(p.shape) for p in trace.parameters.values())
    busy = sum(run.seconds.values())
    share = run.seconds["products"] / busy if busy else 0.0
    numbers = {"parameters": count, "share_of_time_in_products": round(share, 3)}
    lines = [
        *spoils,
        f"{share:.0%} of the step's time without autocast goes into matmuls and convolutions, so hardware that does those in "
        f"half can make the step at most {1 / max(1 - share, 1e-3):.1f} times as fast. On a CPU half is emulated: it costs "
        f"time here and halves the memory of activations. The model has {count} parameters, {4 * count} bytes in float32.",
    ]
    lines += _about_scale(trace, numbers)
    return Advice("\n".join(lines), numbers)


def _about_scale(trace, numbers):
    run = trace.reference
    top = run.largest
    numbers["largest_gradient"] = top
    if not math.isfinite(top):
        return [
            "The float32 gradients are not finite: neither a scale nor bfloat16 helps, look at the forward."
        ]
    if run.half:
        return ["Some gradients are half even with autocast off, so what they lost can't be told."]
    reach = _reach(trace)
    numbers["largest_in_products"] = reach
    if not reach <= CEILING:
        numbers["bfloat16_would_do"] = True
        return [
            f"float16 ends at {CEILING:g}, and a matmul or convolution is given or gives {_size(reach)}: the forward overflows "
            "there, whatever the scale. Scale those values down, leave that part in float32, or use "
            "autocast(dtype=minamp.bfloat16), whose range is float32's."
        ]
    if top == 0:
        return ["All gradients are 0: there is nothing to scale."]
    scale, ceiling = run.rescue(), run.ceiling
    plain, scaled = run.flushed(1.0), run.flushed(scale)
    numbers.update(flushed_unscaled=plain, init_scale=scale, flushed_at_init_scale=scaled, ceiling=ceiling)
    numbers["bfloat16_would_do"] = scaled > USUAL_SHARE
    power = f"2^{math.log2(scale):.0f}"
    shares = (
        f"In float16 {plain:.1%} of the non-zero gradients are 0 without scaling and {scaled:.1%} at a scale of {power}; the "
        f"largest gradient, {top:.3g}, allows 2^{math.log2(ceiling):.0f}."
    )
    if numbers["bfloat16_would_do"]:
        return [
            shares,
            "No scale fits float16's range to these gradients: use autocast(dtype=minamp.bfloat16), which needs none.",
        ]
    return [
        f"{shares} GradScaler(init_scale=2.0**{math.log2(scale):.0f}) starts without a skipped step.",
        "bfloat16 needs no scale either way, for two to three decimal digits instead of three to four.",
    ]


def _reach(trace):
    """The largest magnitude that a matmul or convolution of the training is given or gives; of those in half, if there are."""
    products = [r for r in trace.ops if r.is_product and r.output.recorded]
    products = [r for r in products if r.output.half] or products
    sizes = [v.largest for r in products for v in (*r.tensors, r.output)]
    return math.nan if any(map(math.isnan, sizes)) else max(sizes, default=0.0)


def _size(x):
    return f"{x:.3g}" if math.isfinite(x) else "more"
