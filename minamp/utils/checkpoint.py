"""checkpoint: a part of the forward that keeps nothing for backward but its arguments, and runs again there.

Memory for time, as in "Training Deep Nets with Sublinear Memory Cost" (Chen et al., 2016): of n layers in a row, in segments of
sqrt(n), about 2 sqrt(n) are kept instead of n, for one forward more. With mixed precision the second run must round as the first
did: it gets the first one's autocast region and random numbers, wherever backward is called.

How: an observer takes from every Node that is made inside what it keeps, and puts a Forgotten in its place. The first one that
backward reaches has the function run again, and all of them take what they kept from the Nodes of that second run.
"""

from contextlib import contextmanager
from functools import partial
from itertools import chain, zip_longest

from minamp.autocast import autocast
from minamp.autocast import state as autocast_state
from minamp.draw import get_rng_state, set_rng_state
from minamp.function import Applied
from minamp.record import Forgotten, enable_grad, is_grad_enabled, observe, observers
from minamp.tensor import Tensor


class CheckpointError(RuntimeError):
    """The second run of a function given to checkpoint was not the first again."""


def checkpoint(function, *args, use_reentrant=False, preserve_rng_state=True, **kwargs):
    """function(*args, **kwargs), whose activations are computed again in backward instead of being kept.

    The gradients are the same bit for bit, weights and whatever else the function holds get theirs too. preserve_rng_state:
    the second run draws the numbers of the first, as for dropout. use_reentrant is taken and without effect: what torch does
    with False is done always. The statistics of a BatchNorm inside are updated by both runs, as in PyTorch.
    In backward: CheckpointError if the function ran other ops the second time, RuntimeError if something it used was written in
    place since.
    """
    if not is_grad_enabled():
        return function(*args, **kwargs)
    run = _Run(lambda: function(*args, **kwargs), [*args, *kwargs.values()], preserve_rng_state)
    return run.first()


def checkpoint_sequential(functions, segments, input, use_reentrant=False, preserve_rng_state=True):
    """The functions (a Sequential or a list) applied in turn, cut into `segments` checkpoints; the last one keeps all it needs.

    Its backward comes first, so nothing would be saved by running it again. ValueError for fewer functions than segments.
    """
    functions = list(functions)
    if not 1 <= segments <= len(functions):
        raise ValueError(
            f"checkpoint_sequential: segments={segments} for {len(functions)} functions: give 1 to {len(functions)}"
        )
    size = len(functions) // segments
    for first in range(0, size * (segments - 1), size):
        input = checkpoint(
            _chain(functions[first : first + size]), input, preserve_rng_state=preserve_rng_state
        )
    return _chain(functions[size * (segments - 1) :])(input)


def _chain(functions):
    def chained(x):
        for function in functions:
            x = function(x)
        return x

    return chained


class _Run:
    """One call of a function: what it needs to be made again, and what its ops kept."""

    def __init__(self, function, arguments, preserve_rng_state):
        self.function = function
        self.arguments = [(x, x._version[0]) for x in arguments if isinstance(x, Tensor)]
        self.region = {name: getattr(autocast_state, name) for name in ("dtype", "enabled", "cache_enabled")}
        self.rng = get_rng_state() if preserve_rng_state else None
        self.ops = []  # what _Keepers says of every op that kept something
        self.versions = {}  # id of the count of writes of a tensor that was kept -> (it, where it stood)
        self.kept = {}  # number of an op -> what it kept, from the second run until backward takes it

    def first(self):
        with _Forget(self):
            return self.function()

    def take(self, number):
        """What op `number` kept; the first to ask has the function run again."""
        if not self.kept:
            self.kept = dict(enumerate(self._again()))
        return self.kept.pop(number)

    def _again(self):
        if any(x._version[0] != version for x, version in self.arguments):
            raise _written("an argument")
        with _random_numbers(self.rng), autocast(**self.region), enable_grad(), _Keepers() as second:
            self.function()
        for i, (was, now) in enumerate(zip_longest(self.ops, second.ops)):
            if was != now:
                raise CheckpointError(
                    f"checkpoint: op {i} of the function was {was or 'none'} in forward and is {now or 'none'} in backward: "
                    "give it a function that does the same both times"
                )
        kept = [getattr(keeper, name) for keeper, name in second.keepers]
        for counter, version in _counts(kept):
            if self.versions.get(id(counter), (counter, version))[1] != version:
                raise _written("a tensor that the function uses")
        return kept


class _Keepers(observe):
    """Context manager: what holds the arrays that the ops inside keep for backward, as (object, name of its attribute)."""

    def __init__(self):
        self.keepers, self.ops = [], []

    def see(self, phase, op, inputs, output):
        # a cast keeps nothing, and only one run may have made it: the other's may stand in the cache of weight casts
        if phase != "forward" or output._node is None or op.is_cast:
            return
        keeper = (op.ctx, "_saved") if isinstance(op, Applied) else (output._node, "saved")
        if self.keepers and self.keepers[-1][0] is keeper[0]:
            return  # the same call of a Function, seen once for every output
        self.keepers.append(keeper)
        self.ops.append(f"{op.name} ({output.dtype} {output.shape})")


class _Forget(_Keepers):
    """Context manager: what the ops inside keep is dropped, to be taken from `run` later."""

    def __init__(self, run):
        super().__init__()
        self.run = run

    def __enter__(self):
        super().__enter__()
        observers.insert(0, observers.pop())  # the others see what is left
        return self

    def __exit__(self, *error):
        super().__exit__(*error)
        self.run.ops = self.ops

    def see(self, phase, op, inputs, output):
        number = len(self.keepers)
        super().see(phase, op, inputs, output)
        for keeper, name in self.keepers[number:]:
            self.run.versions.update({id(c): (c, v) for c, v in _counts([getattr(keeper, name)])})
            setattr(keeper, name, Forgotten(partial(self.run.take, number)))


def _counts(kept):
    """(count of writes, where it stood) of all tensors in what Nodes and Contexts have kept."""
    for entry in chain.from_iterable(kept):
        if len(entry) == 2:  # of a Context: (tensor, version)
            tensor, version = entry
            counter = None if tensor is None else tensor._version
        else:
            _, _, counter, version, _ = entry
        if counter is not None:
            yield counter, version


@contextmanager
def _random_numbers(state):
    """Draw from `state` on inside, unless that is None, and after it as if nothing had been drawn."""
    now = get_rng_state()
    set_rng_state(now if state is None else state)
    try:
        yield
    finally:
        set_rng_state(now)


def _written(what):
    return RuntimeError(
        f"checkpoint: {what} was written in place between forward and backward, so the function can't be run again: write to a "
        "clone(), or step the optimizer after backward"
    )
