"""DistributedDataParallel: the gradients of all ranks averaged, in flat float32 buckets, while backward is still running."""

import contextlib
import weakref

import numpy as np

from minamp import backends, record
from minamp.backends import narrow, widen
from minamp.distributed.group import agree, group
from minamp.formats import float32
from minamp.nn.module import Module

BUCKET_MB = 1.0  # the digits' MLP has 2.7 MB of gradients: three buckets, so that the first two travel during backward


class DistributedDataParallel(Module):
    """A module trained on several ranks: forward is the module's own, backward leaves the mean of all ranks' gradients in .grad.

    module: the same on every rank (names, shapes, dtypes); its parameters and buffers become rank 0's, its buffers before every
    forward too. bucket_cap_mb: gradients travel in flat buffers of about that size, those of the last layers first.
    reduce_dtype: float32, or float16 and bfloat16 for the lesson what that loses. Under autocast with a GradScaler nothing else
    is needed: the scaled gradients of all ranks are summed, an inf or nan of one is in every rank's sum, and all skip together.
    A parameter that no rank's loss used keeps .grad as it was. ValueError, on every rank, for modules that differ;
    RuntimeError without init(). Source: Li et al., "PyTorch Distributed", 2020, section 3.2.
    """

    def __init__(self, module, bucket_cap_mb=BUCKET_MB, reduce_dtype=float32):
        super().__init__()
        tensors = [(name, t) for name, _, t in module._tensors()]
        agree("the module", [[name, list(t.shape), str(t.dtype), t.requires_grad] for name, t in tensors])
        self.module = module
        self._tensors_of_rank_0([t for _, t in tensors])
        parameters = [p for p in module.parameters() if p.requires_grad]
        object.__setattr__(self, "_reducer", _Reducer(parameters, bucket_cap_mb, np.dtype(reduce_dtype)))

    def forward(self, *args, **kwargs):
        if record.is_grad_enabled() and self._reducer.syncing:
            self._tensors_of_rank_0(list(self.module.buffers()))
            self._reducer.expect()
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self):
        """Context manager, for accumulation: backward inside only adds to this rank's .grad, one outside averages it."""
        reducer, before = self._reducer, self._reducer.syncing
        reducer.syncing = False
        try:
            yield
        finally:
            reducer.syncing = before

    @staticmethod
    def _tensors_of_rank_0(tensors):
        for t in tensors:
            array = np.ascontiguousarray(backends.host(t._data))
            group().broadcast(array, 0, "broadcasting parameters and buffers")
            if group().rank:
                t._data[...] = backends.move(array.reshape(t.shape), t.device)
                t._version[0] += 1


_expecting = set()  # the reducers that wait for a backward


class _Bucket:
    """Gradients of some parameters in one flat float32 buffer; behind them one number each: on how many ranks it exists."""

    def __init__(self, parameters, m):
        self.parameters = parameters
        ends = np.cumsum([p.numel() for p in parameters])
        self.places = {
            id(p): slice(int(end) - p.numel(), int(end)) for p, end in zip(parameters, ends, strict=True)
        }
        self.flags = slice(int(ends[-1]), int(ends[-1]) + len(parameters))
        self.flag = {id(p): self.flags.start + i for i, p in enumerate(parameters)}
        self.flat = m.full((int(self.flags.stop),), 0.0, float32)
        self.clear()

    def clear(self):
        self.missing = {id(p) for p in self.parameters}
        self.request = self.sent = None

    def put(self, p, array, share):
        """A gradient, times `share` (1 / ranks)."""
        place = self.flat[self.places[id(p)]].reshape(p.shape)
        place[...] = array
        place *= share
        self.flat[self.flag[id(p)]] = 1.0
        self.missing.discard(id(p))


class _Reducer:
    """What backward (record.run_backward) tells about gradients, and what it gets back."""

    def __init__(self, parameters, cap, dtype):
        self.group, self.dtype, self.syncing = group(), dtype, True
        m = backends.of(parameters[0]._data) if parameters else None
        self.buckets, some, size = [], [], 0
        for p in reversed(parameters):  # backward reaches the last layers first
            if some and (size + 4 * p.numel() > cap * 2**20):
                self.buckets.append(_Bucket(some, m))
                some, size = [], 0
            some.append(p)
            size += 4 * p.numel()
        if some:
            self.buckets.append(_Bucket(some, m))
        self.bucket_of = {id(p): b for b in self.buckets for p in b.parameters}
        self.totals = {}
        # The list holds no module alive: when it is gone, so is its reducer.
        record.reducers.append(_Weak(self))

    def expect(self):
        """A forward has run: the next backward averages, also if none of the parameters is reached."""
        _expecting.add(self)  # it outlives its module until then

    def begin(self, create_graph):
        self.totals = {}
        for bucket in self.buckets:
            bucket.clear()
            bucket.flat[bucket.flags] = 0.0
        if create_graph and self.syncing:
            raise RuntimeError(
                "DistributedDataParallel: backward with create_graph=True can't average gradients: do it inside no_sync()"
            )

    def arrived(self, p, total):
        """The gradient of `p` is known: into its bucket, and off with every bucket that is full, in order."""
        bucket = self.bucket_of.get(id(p))
        if bucket is None or not self.syncing:
            return
        self.expect()
        array = getattr(total, "_data", total)
        self.totals[id(p)] = array
        bucket.put(p, widen(array), 1.0 / self.group.size)
        for b in self.buckets:
            if b.request is None:
                if b.missing:
                    break
                self._send(b)
            else:
                b.request.Test()  # MPI moves data while it is asked

    def finish(self):
        """Wait for all buckets and put the means in place. (parameter, gradient) of those that only other ranks had one for."""
        if not (self in _expecting and self.syncing):
            return []
        _expecting.discard(self)
        others = []
        for b in self.buckets:
            for p in b.parameters:
                if id(p) in b.missing:
                    if p.grad is not None:  # from a backward inside no_sync
                        self.totals[id(p)] = p.grad._data
                        b.put(p, widen(p.grad._data), 1.0 / self.group.size)
                    else:
                        b.flat[b.places[id(p)]] = 0.0
            if b.request is None:
                self._send(b)
        for i, b in enumerate(self.buckets):
            self.group.wait(b.request, f"averaging gradients (bucket {i + 1} of {len(self.buckets)})")
            if b.sent is not b.flat:
                b.flat[...] = widen(b.sent)
            ranks = backends.host(b.flat[b.flags])
            for p, n in zip(b.parameters, ranks, strict=True):
                mean = b.flat[b.places[id(p)]].reshape(p.shape)
                if id(p) in self.totals:
                    self.totals[id(p)][...] = backends.cast(mean, p.dtype)
                elif n:
                    others.append((p, p._as_gradient(mean)))
        return others

    def _send(self, b):
        b.sent = b.flat if self.dtype == float32 else narrow(b.flat, self.dtype)
        b.request = self.group.start_all_reduce(b.sent)


class _Weak:
    """A reducer as record.reducers holds it."""

    def __init__(self, reducer):
        self.reducer = weakref.ref(reducer, lambda _: record.reducers.remove(self))

    def begin(self, create_graph):
        self.reducer().begin(create_graph)

    def arrived(self, p, total):
        self.reducer().arrived(p, total)

    def finish(self):
        return self.reducer().finish()
