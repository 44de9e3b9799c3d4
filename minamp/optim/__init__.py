"""SGD, Adam, AdamW, RMSprop. What they share is in optimizer.py; how a weight is stored is weights.py's business.

Schedules of their learning rates are in lr_scheduler.py.

Whatever a weight's format, its update is computed in float32 (float64 for float64 weights): widened, updated,
rounded once. Rounded to nearest, an update below half a step of the format is lost: w = 1 in float16 minus 1e-4
stays 1, a hundred times over. master_weights=True, write_back='stochastic' and 'kahan' are three ways out.
"""

from minamp.arguments import check_number
from minamp.optim import lr_scheduler
from minamp.optimizer import Optimizer


class SGD(Optimizer):
    """w -= lr * g, with momentum, Nesterov momentum, weight decay; torch.optim.SGD's formulas.

    Half weights: master_weights=True keeps float32 copies; without them write_back is 'nearest', 'stochastic' or
    'kahan' (weights.py). capturable=True: on a GPU a step under a GradScaler asks the host for nothing, so that it can be
    captured (minamp.cuda.graph); the same numbers. foreach, fused: torch's choices between implementations, without
    effect. ValueError for options out of range.
    """

    _numbers = ("lr", "momentum", "dampening", "weight_decay")

    def __init__(
        self,
        params,
        lr=1e-3,
        momentum=0,
        dampening=0,
        weight_decay=0,
        nesterov=False,
        *,
        maximize=False,
        capturable=False,
        master_weights=False,
        write_back="nearest",
        foreach=None,
        fused=None,
    ):
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "dampening": dampening,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
                "maximize": maximize,
                "capturable": capturable,
                "master_weights": master_weights,
                "write_back": write_back,
            },
        )

    def _check(self, group):
        for option in ("lr", "momentum", "weight_decay"):
            self._require(group, option, group[option] >= 0, "at least 0")
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError(
                f"{self._name}: nesterov=True needs momentum above 0 and dampening 0, "
                f"got momentum={group['momentum']!r}, dampening={group['dampening']!r}"
            )

    def _stage(self, state):
        return "momentum_buffer" not in state

    def _buffer_names(self, group):
        return ("momentum_buffer",) if group["momentum"] else ()

    def _counts(self, group):
        # which step starts the buffer: a GPU that may leave some out has to know
        return bool(group["momentum"])

    def _update(self, batch, group):
        fresh = self._stage(batch.states[0])
        counted = {"steps": batch.steps()} if batch.on_gpu and group["momentum"] else {}
        batch.m.sgd(
            batch.ws,
            batch.gs,
            batch.buffers("momentum_buffer") if group["momentum"] else None,
            fresh,
            lr=group["lr"],
            momentum=group["momentum"],
            dampening=group["dampening"],
            weight_decay=group["weight_decay"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            **counted,
            **batch.options(),
        )


class Adam(Optimizer):
    """Steps of about lr whatever the gradient's size, as long as it is well above eps; torch.optim.Adam's formulas.

    Kingma and Ba, "Adam", 2015.
    amsgrad=True: divide by the largest second moment so far (Reddi et al., 2018). Moments, eps and bias
    correction are float32, where eps = 1e-8 is not 0, as it is in float16. capturable, master_weights, write_back,
    foreach, fused: as in SGD.
    ValueError for options out of range.
    """

    decoupled = False
    _numbers = ("lr", "eps", "weight_decay")

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0,
        amsgrad=False,
        *,
        maximize=False,
        capturable=False,
        master_weights=False,
        write_back="nearest",
        foreach=None,
        fused=None,
    ):
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "amsgrad": amsgrad,
                "maximize": maximize,
                "capturable": capturable,
                "master_weights": master_weights,
                "write_back": write_back,
            },
        )

    def _check(self, group):
        for option in ("lr", "eps", "weight_decay"):
            self._require(group, option, group[option] >= 0, "at least 0")
        betas = group["betas"]
        pair = isinstance(betas, tuple | list) and len(betas) == 2
        for beta in betas if pair else ():
            check_number(self._name, "betas", beta)
        self._require(group, "betas", pair and all(0 <= beta < 1 for beta in betas), "two numbers in [0, 1)")

    def _stage(self, state):
        return int(state.get("step", 0))

    def _buffer_names(self, group):
        return ("exp_avg", "exp_avg_sq") + ("max_exp_avg_sq",) * bool(group["amsgrad"])

    def _counts(self, group):
        return True

    def _update(self, batch, group):
        batch.m.adam(
            batch.ws,
            batch.gs,
            batch.buffers("exp_avg"),
            batch.buffers("exp_avg_sq"),
            batch.buffers("max_exp_avg_sq") if group["amsgrad"] else None,
            batch.steps(),
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=self.decoupled,
            maximize=group["maximize"],
            **batch.options(),
        )


class AdamW(Adam):
    """Adam whose weight decay shrinks the weight directly (Loshchilov and Hutter, 2019); Adam's other options."""

    decoupled = True

    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, amsgrad=False, **options
    ):
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)


class RMSprop(Optimizer):
    """Gradients divided by the root of their own mean square (Hinton's lecture 6e, 2012); torch.optim.RMSprop's formulas.

    alpha: how much of the mean square a step keeps. centered=True: divide by the standard deviation (Graves, 2013), which is
    never taken for negative. eps is added to the root, in float32. momentum, capturable, master_weights, write_back, foreach:
    as in SGD. ValueError for options out of range.
    """

    _numbers = ("lr", "alpha", "eps", "weight_decay", "momentum")

    def __init__(
        self,
        params,
        lr=1e-2,
        alpha=0.99,
        eps=1e-8,
        weight_decay=0,
        momentum=0,
        centered=False,
        capturable=False,
        foreach=None,
        maximize=False,
        *,
        master_weights=False,
        write_back="nearest",
    ):
        super().__init__(
            params,
            {
                "lr": lr,
                "alpha": alpha,
                "eps": eps,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "centered": centered,
                "maximize": maximize,
                "capturable": capturable,
                "master_weights": master_weights,
                "write_back": write_back,
            },
        )

    def _check(self, group):
        for option in ("lr", "eps", "weight_decay", "momentum"):
            self._require(group, option, group[option] >= 0, "at least 0")
        self._require(group, "alpha", 0 <= group["alpha"] <= 1, "in [0, 1]")

    def _buffer_names(self, group):
        momentum, mean = bool(group["momentum"]), bool(group["centered"])
        return ("square_avg",) + ("momentum_buffer",) * momentum + ("grad_avg",) * mean

    def _update(self, batch, group):
        batch.m.rmsprop(
            batch.ws,
            batch.gs,
            batch.buffers("square_avg"),
            batch.buffers("grad_avg") if group["centered"] else None,
            batch.buffers("momentum_buffer") if group["momentum"] else None,
            lr=group["lr"],
            alpha=group["alpha"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            maximize=group["maximize"],
            **batch.options(),
        )
