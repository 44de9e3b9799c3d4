"""The same faults in scripts written quite differently, and healthy steps that look like faults.

BROKEN: name -> (code, build). HEALTHY: name -> build. `# the fault` marks the lines one of which the doctor should name.
"""

import tempfile
from pathlib import Path

import numpy as np

import minamp
import minamp.nn.functional as F
from gallery.parts import Scripts, digits, mlp
from minamp import GradScaler, autocast, data, nn, optim, save
from minamp.autograd import Function, grad
from minamp.nn.utils import clip_grad_norm_, clip_grad_value_
from minamp.nn.utils import clip_grad_norm_ as limit
from minamp.utils.checkpoint import checkpoint

_scripts = Scripts()
BROKEN, HEALTHY, broken, healthy = _scripts.ill, _scripts.well, _scripts.broken, _scripts.healthy


class Trainer:
    """A trainer as people write them: everything in attributes, one method a phase, subclasses change one of them."""

    dtype = minamp.float16
    lr = 0.05
    init_scale = 2.0**16

    def __init__(self):
        self.x, self.y = self.data()
        self.model = self.network()
        self.optimizer = optim.SGD(self.model.parameters(), lr=self.lr, momentum=0.5)
        self.scaler = self.make_scaler()

    def data(self):
        return digits(32)

    def network(self):
        return mlp(784, 48, 10)

    def make_scaler(self):
        return GradScaler(init_scale=self.init_scale)

    def forward(self):
        with autocast(dtype=self.dtype):
            return F.cross_entropy(self.model(self.x), self.y)

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def before_step(self):
        pass

    def train_step(self):
        self.optimizer.zero_grad()
        loss = self.forward()
        self.backward(loss)
        self.before_step()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()

    def parts(self):
        return dict(step=self.train_step, model=self.model, optimizer=self.optimizer, scaler=self.scaler)


class PictureTrainer(Trainer):
    def data(self):
        return digits(16, shape=(1, 28, 28))

    def network(self):
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 13 * 13, 10)
        )


# ------------------------------------------------------------------------------------------------ the weights and the scaler


@broken("half_parameters_with_scaler")
def a_network_moved_to_half_by_its_trainer():
    class T(PictureTrainer):
        def network(self):
            return super().network().to(minamp.float16)  # the fault

        def before_step(self):
            self.scaler.unscale_(self.optimizer)  # the fault
            clip_grad_norm_(self.model.parameters(), 1.0)

    return T().parts()


@broken("scaler_rebuilt")
def a_helper_that_makes_its_own_scaler():
    x, y = digits(32)
    model = mlp(784, 64, 10)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)

    def backward_and_step(loss):
        scaler = GradScaler(init_scale=2.0**14)  # the fault
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    def step():
        with autocast():
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        backward_and_step(loss)  # the fault
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=None)


@broken("scaler_rebuilt")
def a_trainer_that_resets_its_scaler():
    class T(Trainer):
        def forward(self):
            self.scaler = self.make_scaler()  # the fault
            return super().forward()

        def make_scaler(self):
            return GradScaler(init_scale=1024.0)  # the fault

    return T().parts()


@broken("scaler_not_saved")
def a_checkpoint_as_a_tuple():
    class T(PictureTrainer):
        folder = Path(tempfile.mkdtemp())

        def train_step(self):
            loss = super().train_step()
            state = (self.model.state_dict(), self.optimizer.state_dict(), {"loss": loss, "scale": "auto"})
            save(state, self.folder / "run.ckpt")  # the fault
            return loss

    return T().parts()


@broken("scale_pinned")
def a_distance_of_zero():
    """The forward is finite; the gradient of sqrt at 0 is inf * 0, nan at every scale."""
    anchors, _ = digits(16)
    model = mlp(784, 32, 8)
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    scaler = GradScaler()

    def step():
        optimizer.zero_grad()
        with autocast():
            z = model(anchors)
        z = z.float()
        squares = (z.unsqueeze(0) - z.unsqueeze(1)).square().sum(dim=-1)
        loss = (1.0 - squares.sqrt().mean()).abs()  # the fault
        scaler.scale(loss).backward()  # the fault
        scaler.step(optimizer)  # the fault
        scaler.update()  # the fault
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


@broken("scale_pinned")
def a_floor_above_what_a_sum_can_bear():
    class T(PictureTrainer):
        lr = 1e-4

        def make_scaler(self):
            return GradScaler(init_scale=2.0**15, min_scale=2.0**15)  # the fault

        def forward(self):
            with autocast():
                each = F.cross_entropy(self.model(self.x), self.y, reduction="none")
                return 10.0 * each.sum()

        def before_step(self):
            self.scaler.unscale_(self.optimizer)

    return T().parts()


# ------------------------------------------------------------------------------------------------------- arithmetic in half


@broken("loss_in_half")
def a_squared_error_by_hand():
    """Inside the region: neither the difference, nor the product, nor the mean is on any autocast list."""
    x, _ = digits(32)
    small = F.avg_pool2d(x.reshape(32, 1, 28, 28), 2).reshape(32, 196)
    model = mlp(196, 64, 196)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    scaler = GradScaler(init_scale=4096.0)

    def squared_error(a, b):
        d = a - b  # the fault
        return (d * d).mean()  # the fault

    def step():
        optimizer.zero_grad()
        with autocast():
            loss = squared_error(model(small), small.half())  # the fault
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


@broken("loss_in_half")
def a_half_network_and_a_smooth_l1_loss():
    class T(PictureTrainer):
        def __init__(self):
            super().__init__()
            self.optimizer = optim.SGD(self.model.parameters(), lr=0.01, master_weights=True)
            self.target = F.one_hot(self.y, 10).half()

        def network(self):
            return super().network().half()

        def make_scaler(self):
            return GradScaler(init_scale=512.0)

        def forward(self):
            return nn.SmoothL1Loss()(self.model(self.x.half()), self.target)  # the fault

    return T().parts()


class Attention(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(28, width) for _ in range(3))
        self.out = nn.Linear(width, 10)
        self.width = width

    def weights(self, scores):
        return F.softmax(scores, dim=-1)

    def scores(self, q, k):
        return q @ k.mT * self.width**-0.5

    def forward(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        return self.out((self.weights(self.scores(q, k)) @ v).mean(dim=1))


class AttentionTrainer(Trainer):
    def data(self):
        return digits(8, shape=(28, 28))

    def network(self):
        return Attention()


@broken("softmax_in_half")
def attention_weights_with_autocast_switched_off():
    class Stable(Attention):
        def weights(self, scores):
            with autocast(enabled=False):
                return F.softmax(scores, dim=-1)  # the fault

    class T(AttentionTrainer):
        def network(self):
            return Stable()

    return T().parts()


@broken("softmax_in_half")
def a_softmax_by_hand_in_a_half_network():
    x, y = digits(32)
    model = mlp(784, 64, 10).half()
    optimizer = optim.Adam(model.parameters(), lr=1e-3, master_weights=True)
    scaler = GradScaler(init_scale=256.0)

    def step():
        optimizer.zero_grad()
        e = minamp.exp(model(x.half()))  # the fault
        p = e / e.sum(dim=-1, keepdim=True)  # the fault
        loss = F.mse_loss(p.float(), F.one_hot(y, 10).float())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


@broken("log_of_softmax")
def a_policy_gradient():
    """In bfloat16 and with an entropy bonus: two logarithms of one softmax."""
    state, action = digits(32)
    model = mlp(784, 64, 10)
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    advantage = minamp.randn(32)

    def step():
        with autocast(dtype=minamp.bfloat16):
            probability = nn.Softmax(dim=1)(model(state))
            chosen = probability.gather(1, action.reshape(-1, 1)).squeeze(1)
            entropy = -(probability * minamp.log(probability)).sum(dim=1)  # the fault
            loss = -(minamp.log(chosen) * advantage).mean() - 0.01 * entropy.mean()  # the fault
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=None)


@broken("mask_overflows")
def two_masks_added():
    """-4e4 fits float16, twice -4e4 does not: rows that both masks hide are -inf throughout, and their softmax is nan."""

    class Masked(Attention):
        def scores(self, q, k):
            scores = super().scores(q, k)
            row = minamp.arange(28)
            future = (row.reshape(1, 28) > row.reshape(28, 1)).to(scores.dtype) * -4e4
            padding = (row < 4).to(scores.dtype) * -4e4
            return scores + future + padding + padding.reshape(28, 1)  # the fault

    class T(AttentionTrainer):
        def network(self):
            return Masked()

    return T().parts()


@broken("mask_overflows")
def the_smallest_float32():
    """In float32 a row with everything masked gets equal weights. In half the constant is -inf, and the row nan."""

    class Masked(Attention):
        def weights(self, scores):
            past = minamp.ones(28, 28).tril(-1).bool()
            return super().weights(minamp.where(past, scores, float(np.finfo(np.float32).min)))  # the fault

    class T(AttentionTrainer):
        def network(self):
            return Masked()

    return T().parts()


@broken("eps_rounds_to_zero")
def rows_of_a_half_network_divided_by_their_sum():
    x, y = digits(32)
    x[5] = 0.0
    body, head = nn.Linear(784, 64, bias=False).half(), nn.Linear(64, 10).half()
    model = nn.ModuleList([body, head])
    optimizer = optim.SGD(model.parameters(), lr=0.05, master_weights=True)
    scaler = GradScaler(init_scale=256.0)

    def share(h, eps=1e-8):
        total = h.abs().sum(dim=1, keepdim=True)
        return 10.0 * h / (total + eps)  # the fault

    def step():
        model.zero_grad()
        logits = head(share(F.relu(body(x.half()))))  # the fault
        loss = F.cross_entropy(logits.float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


@broken("layer_norm_overflows")
def a_layer_norm_class_with_var():
    class MyLayerNorm(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.weight, self.bias = nn.Parameter(minamp.ones(n)), nn.Parameter(minamp.zeros(n))

        def forward(self, h):
            spread = h.var(dim=-1, keepdim=True, unbiased=False)  # the fault
            h = (h - h.mean(dim=-1, keepdim=True)) * (spread + 1e-5) ** -0.5  # the fault
            return h * self.weight + self.bias

    class T(Trainer):
        def data(self):
            x, y = digits(32)
            return 800.0 * x, y

        def network(self):
            return nn.Sequential(nn.Linear(784, 64), MyLayerNorm(64), nn.GELU(), nn.Linear(64, 10))

        def make_scaler(self):
            return GradScaler(init_scale=2.0**6)

    return T().parts()


@broken("mean_of_too_many")
def an_activity_penalty():
    """100,352 activations of about 1 each: their sum overflows, in a half network, before it is divided."""
    x, y = digits(32, shape=(1, 28, 28))
    model = nn.Sequential(nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten()).half()
    head = nn.Linear(16 * 14 * 14, 10).half()
    everything = nn.ModuleList([model, head])
    minamp.nn.init.constant_(model[0].bias, 1.0)
    optimizer = optim.SGD(everything.parameters(), lr=0.01, master_weights=True)
    scaler = GradScaler(init_scale=256.0)

    def step():
        optimizer.zero_grad()
        h = model(x.half())
        activity = minamp.sum(h) / float(h.numel())  # the fault
        loss = F.cross_entropy(head(h).float(), y) + 0.01 * activity.float()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=everything, optimizer=optimizer, scaler=scaler)


@broken("forward_overflow")
def a_quadratic_layer():
    """h * h is on no autocast list: values of a few hundred are too large."""

    class Quadratic(nn.Module):
        def forward(self, h):
            return h * h  # the fault

    class T(PictureTrainer):
        def data(self):
            x, y = digits(16, shape=(1, 28, 28))
            return 255.0 * x, y

        def network(self):
            return nn.Sequential(
                nn.Conv2d(1, 8, 3, stride=2), Quadratic(), nn.Flatten(), nn.Linear(8 * 13 * 13, 10)
            )

    return T().parts()


@broken("forward_overflow")
def a_feed_forward_layer_with_large_weights():
    x, y = digits(16)
    model = mlp(784, 256, 256, 10)
    with minamp.no_grad():
        for p in model.parameters():
            p.mul_(100.0)
    optimizer = optim.AdamW(model.parameters(), lr=1e-4)
    scaler = GradScaler(init_scale=16.0)

    def step():
        optimizer.zero_grad(set_to_none=True)
        with autocast("cuda", dtype=minamp.float16):
            loss = F.cross_entropy(model(x), y)  # the fault
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


@broken("gradients_flushed")
def an_auxiliary_loss_of_small_weight():
    """The mean over 12,544 pixels, weighted by 3e-4, in float16 and without any scaler."""
    x, _ = digits(16, shape=(1, 28, 28))
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 1, 1)
    )
    optimizer = optim.Adam(model.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad()
        with autocast():
            loss = 3e-4 * F.mse_loss(model(x), x)
        loss.backward()  # the fault
        optimizer.step()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=None)


@broken("widened_by_scalar")
def a_float32_constant_among_half_activations():
    """Sines for places, made once in float32: every activation from there on is float32."""
    x, y = digits(8, shape=(28, 28))
    place = minamp.arange(28).float().reshape(28, 1) / 10.0 ** (minamp.arange(64) / 16.0)
    sines = minamp.sin(place)
    first, last = nn.Linear(28, 64), nn.Linear(64, 10)
    model = nn.ModuleList([first, last])
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    scaler = GradScaler()

    def step():
        optimizer.zero_grad()
        with autocast():
            h = F.relu(first(x) * sines)  # the fault
            h = F.silu(h * 0.5 + h)
            loss = F.cross_entropy(last(h).mean(dim=1), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


@broken("widened_by_scalar")
def an_array_of_float64_weights():
    class T(Trainer):
        def forward(self):
            weights = minamp.tensor(np.linspace(0.5, 1.5, 32))
            with autocast():
                each = F.cross_entropy(self.model(self.x), self.y, reduction="none")
                return (each * weights).mean()  # the fault

    return T().parts()


# ------------------------------------------------------------------------------------------------------------------- regions


@broken("backward_in_autocast")
def a_decorated_training_step():
    x, y = digits(16, shape=(1, 28, 28))
    model = PictureTrainer().network()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    scaler = GradScaler()

    @autocast()
    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()  # the fault
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


@broken("backward_in_autocast")
def gradients_by_hand_in_a_bfloat16_region():
    x, y = digits(32)
    model = mlp(784, 64, 10)

    def step():
        with autocast(dtype=minamp.bfloat16):
            loss = F.cross_entropy(model(x), y)
            gradients = grad(loss, list(model.parameters()))  # the fault
        with minamp.no_grad():
            for p, g in zip(model.parameters(), gradients, strict=True):
                p.sub_(0.05 * g)
        return loss.item()

    return dict(step=step, model=model, optimizer=None, scaler=None)


@broken("autocast_covers_nothing")
def a_region_that_is_never_entered():
    class T(PictureTrainer):
        def forward(self):
            autocast(dtype=minamp.float16)  # the fault
            return F.cross_entropy(self.model(self.x), self.y)  # the fault

    return T().parts()


@broken("autocast_covers_nothing")
def only_the_criterion_is_decorated():
    x, y = digits(32)
    model = mlp(784, 64, 64, 10)
    optimizer = optim.Adam(model.parameters(), lr=1e-3)

    @autocast(dtype=minamp.bfloat16)
    def criterion(logits):
        return F.cross_entropy(logits, y, label_smoothing=0.1)

    def step():
        optimizer.zero_grad()
        loss = criterion(model(x))  # the fault
        loss.backward()
        optimizer.step()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=None)


@broken("op_without_policy")
def a_mish_with_its_own_backward():
    """Nothing raises: forward runs under autocast, where exp is float32; backward outside, where exp(12) is inf in half."""

    class Mish(Function):  # the fault
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * minamp.tanh(minamp.log1p(minamp.exp(x)))

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            e = minamp.exp(x)
            t = minamp.tanh(minamp.log1p(e))
            return g * (t + x * (1.0 - t * t) * e / (1.0 + e))

    class T(PictureTrainer):
        def network(self):
            return nn.ModuleList([nn.Conv2d(1, 8, 3, stride=2), nn.Linear(8 * 13 * 13, 10)])

        def forward(self):
            first, last = self.model
            with autocast():
                h = Mish.apply(first(self.x)).flatten(1)  # the fault
                return F.cross_entropy(last(h), self.y)

    return T().parts()


@broken("batchnorm_nan")
def statistics_loaded_from_a_bad_checkpoint():
    x, y = digits(32)
    model = nn.Sequential(nn.Linear(784, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    state = model.state_dict()
    state["1.running_var"] = minamp.full((32,), float("nan"))
    model.load_state_dict(state)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad()
        with autocast(dtype=minamp.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=None)


# --------------------------------------------------------------------------------------------------- the order of the calls


@broken("clip_before_unscale")
def clipping_under_another_name():
    class T(PictureTrainer):
        def before_step(self):
            limit(self.model.parameters(), 0.1)  # the fault
            self.scaler.unscale_(self.optimizer)

    return T().parts()


def _scaled_by_hand(*order):
    """A loss times 2^16 whose gradients are clipped by the library and divided, in some order."""
    x, y = digits(32)
    model = mlp(784, 64, 10)
    optimizer = optim.SGD(model.parameters(), lr=0.05)

    def step():
        optimizer.zero_grad()
        with autocast():
            loss = F.cross_entropy(model(x), y)
        (loss * 2.0**16).backward()
        for act in order:
            act(model.parameters())
        optimizer.step()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=None)


def _clip(parameters):
    clip_grad_norm_(parameters, 1.0)  # the fault


def _divide(parameters):
    for p in parameters:
        p.grad /= 2.0**16


@broken("clip_before_unscale")
def a_loss_scaled_by_hand_that_is_clipped_first():
    return _scaled_by_hand(_clip, _divide)


@healthy
def a_loss_scaled_by_hand_that_is_divided_first():
    return _scaled_by_hand(_divide, _clip)


@broken("clip_before_unscale")
def a_norm_computed_by_hand():
    x, y = digits(32)
    model = mlp(784, 64, 10)
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    scaler = GradScaler()

    def clip(max_norm):
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        total = sum((g * g).sum().item() for g in gradients) ** 0.5  # the fault
        for g in gradients:
            g.mul_(min(1.0, max_norm / (total + 1e-6)))  # the fault

    def step():
        optimizer.zero_grad()
        with autocast():
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        clip(1.0)  # the fault
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


@broken("clip_value_hides_overflow")
def gradients_clamped_by_hand():
    class T(PictureTrainer):
        lr = 1e-3

        def forward(self):
            with autocast():
                return F.cross_entropy(self.model(self.x), self.y, reduction="sum")

        def before_step(self):
            for p in self.model.parameters():
                p.grad.clamp_(-1.0, 1.0)  # the fault

    return T().parts()


@broken("clip_value_hides_overflow")
def a_clip_between_accumulation_and_step():
    x, y = digits(32)
    model = mlp(784, 64, 10)
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    scaler = GradScaler(init_scale=2.0**15)

    def step():
        optimizer.zero_grad()
        total = 0.0
        for i in range(0, 32, 16):
            with autocast():
                loss = F.cross_entropy(model(x[i : i + 16]), y[i : i + 16], reduction="sum")
            scaler.scale(loss).backward()
            total += loss.item()
        clip_grad_value_(list(model.parameters()), 1e4)  # the fault
        scaler.step(optimizer)
        scaler.update()
        return total

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


@broken("raw_optimizer_step")
def instead_of_the_scalers():
    class T(PictureTrainer):
        def train_step(self):
            self.optimizer.zero_grad()
            loss = self.forward()
            self.scaler.scale(loss).backward()
            self.optimizer.step()  # the fault
            return loss.item()

    return T().parts()


@broken("raw_optimizer_step")
def instead_of_the_scalers_and_then_update():
    x, y = digits(32)
    model = mlp(784, 64, 10)
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    scaler = GradScaler()

    def step():
        optimizer.zero_grad()
        with autocast():
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        optimizer.step()  # the fault
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


@broken("raw_optimizer_step")
def before_the_scalers():
    class T(Trainer):
        def before_step(self):
            self.optimizer.step()  # the fault

    return T().parts()


@broken("update_forgotten")
def unscaled_clipped_and_never_updated():
    class T(PictureTrainer):
        def train_step(self):
            self.optimizer.zero_grad()
            loss = self.forward()
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            return loss.item()

    return T().parts()


@broken("update_forgotten")
def updated_only_at_the_end_of_an_epoch():
    x, y = digits(32)
    model = mlp(784, 64, 10)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    scaler = GradScaler()
    batches_done = [0]

    def step():
        with autocast():
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        batches_done[0] += 1
        if batches_done[0] % 100 == 0:
            scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


@broken("update_repeated")
def updated_in_the_step_and_by_a_callback():
    class T(PictureTrainer):
        def train_step(self):
            loss = super().train_step()
            self.after_step()
            return loss

        def after_step(self):
            self.scaler.update()  # the fault

    return T().parts()


@broken("unscale_every_micro_batch")
def a_helper_that_unscales():
    class T(Trainer):
        def micro_batch(self, x, y):
            with autocast():
                loss = F.cross_entropy(self.model(x), y) / 2
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)  # the fault
            clip_grad_norm_(self.model.parameters(), 1.0)
            return loss.item()

        def train_step(self):
            self.optimizer.zero_grad(set_to_none=False)
            total = sum(
                self.micro_batch(*half) for half in zip(self.x.chunk(2), self.y.chunk(2), strict=True)
            )
            self.scaler.step(self.optimizer)
            self.scaler.update()
            return total

    return T().parts()


@broken("zero_grad_missing")
def under_a_scaler_and_with_momentum():
    class T(PictureTrainer):
        lr = 1e-3

        def train_step(self):
            loss = self.forward()
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            return loss.item()

        def make_scaler(self):
            return GradScaler(init_scale=128.0)

    return T().parts()


@broken("zero_grad_missing")
def cleared_in_one_of_two_networks():
    x, _ = digits(32)
    encoder, decoder = mlp(784, 32, 8), mlp(8, 32, 784)
    model = nn.ModuleList([encoder, decoder])
    optimizer = optim.Adam(model.parameters(), lr=1e-3)

    def step():
        encoder.zero_grad()
        loss = F.mse_loss(decoder(encoder(x)), x)
        loss.backward()
        optimizer.step()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=None)


# ---------------------------------------------------------------------------------------------------------- optimizers in half


@broken("updates_swamped")
def a_small_rate_on_bfloat16_weights():
    class T(PictureTrainer):
        def __init__(self):
            super().__init__()
            self.optimizer = optim.AdamW(self.model.parameters(), lr=2e-6)  # the fault

        def network(self):
            return super().network().bfloat16()

        def train_step(self):
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(self.x.bfloat16()).float(), self.y)
            loss.backward()
            self.optimizer.step()  # the fault
            return loss.item()

    return {**T().parts(), "scaler": None}


@broken("updates_swamped")
def descent_by_hand_on_half_weights():
    x, y = digits(32)
    model = mlp(784, 64, 10).half()

    def step():
        model.zero_grad()
        loss = F.cross_entropy(model(x.half()).float(), y)
        loss.backward()
        with minamp.no_grad():
            for p in model.parameters():
                p.sub_(1e-4 * p.grad)  # the fault
        return loss.item()

    return dict(step=step, model=model, optimizer=None, scaler=None)


@broken("adam_in_half")
def adam_as_a_class_of_its_own():
    """Nothing is taken from minamp.optim; eps is large enough for half, the second moment is not: its squares are 0."""

    class Adam:
        def __init__(self, params, lr):
            self.param_groups = [{"params": list(params), "lr": lr}]
            self.state, self.t = {}, 0

        def zero_grad(self):
            for p in self.param_groups[0]["params"]:
                p.grad = None

        def step(self):
            self.t += 1
            with minamp.no_grad():
                for group in self.param_groups:
                    for p in group["params"]:
                        self.one(p, p.grad, group["lr"])

        def one(self, p, g, lr):
            buffers = self.state.setdefault(
                p,
                {"exp_avg": minamp.zeros_like(p), "exp_avg_sq": minamp.zeros_like(p)},  # the fault
            )
            buffers["exp_avg"] = 0.9 * buffers["exp_avg"] + 0.1 * g  # the fault
            buffers["exp_avg_sq"] = 0.999 * buffers["exp_avg_sq"] + 0.001 * g * g  # the fault
            m = buffers["exp_avg"] / (1 - 0.9**self.t)  # the fault
            v = buffers["exp_avg_sq"] / (1 - 0.999**self.t)  # the fault
            p.copy_(p - lr * m / (minamp.sqrt(v) + 1e-4))  # the fault

    x, y = digits(32)
    model = mlp(784, 64, 10).half()
    optimizer = Adam(model.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.half()).float(), y)
        loss.backward()
        optimizer.step()  # the fault
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=None)


# ------------------------------------------------------------------------------------------- healthy, and easily taken for ill


@healthy
def a_scale_that_starts_high():
    """The first step or two are skipped: the scaler finds its scale."""

    class T(Trainer):
        def make_scaler(self):
            return GradScaler(init_scale=2.0**20)

    return T().parts()


@healthy
def a_skipped_step_now_and_then():
    """With a growth interval of 2 the scale climbs until a step is skipped, and climbs again."""

    class T(Trainer):
        def make_scaler(self):
            return GradScaler(init_scale=2.0**18, growth_interval=2)

    return T().parts()


@healthy
def values_clipped_after_unscale():
    class T(PictureTrainer):
        def before_step(self):
            self.scaler.unscale_(self.optimizer)
            clip_grad_value_(self.model.parameters(), 0.05)

    return T().parts()


@healthy
def gradients_clamped_by_hand_after_unscale():
    class T(Trainer):
        def before_step(self):
            self.scaler.unscale_(self.optimizer)
            for p in self.model.parameters():
                p.grad.clamp_(-0.1, 0.1)

    return T().parts()


@healthy
def bfloat16_with_a_scaler():
    class T(Trainer):
        dtype = minamp.bfloat16

    return T().parts()


@healthy
def everything_switched_off():
    """use_amp = False, as scripts have it."""
    x, y = digits(32)
    model = mlp(784, 64, 10)
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    use_amp = False
    scaler = GradScaler(enabled=use_amp)

    def step():
        optimizer.zero_grad()
        with autocast(enabled=use_amp):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


@healthy
def a_float32_loss_outside_the_region():
    class T(PictureTrainer):
        def forward(self):
            with autocast():
                logits = self.model(self.x)
            return F.cross_entropy(logits.float(), self.y)

    return T().parts()


@healthy
def a_float32_head():
    """The last layer on purpose in float32."""

    class T(PictureTrainer):
        def forward(self):
            with autocast():
                h = self.model[:3](self.x)
                with autocast(enabled=False):
                    logits = self.model[3](h.float())
            return F.cross_entropy(logits, self.y)

    return T().parts()


@healthy
def a_target_in_float32():
    """The difference of a half output and a float32 target is float32, as a loss should be."""
    x, _ = digits(32)
    model = mlp(784, 32, 784)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler()

    def step():
        optimizer.zero_grad()
        with autocast():
            loss = (model(x) - x).pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


@healthy
def an_evaluation_inside_the_step():
    """Once under autocast, once in float32, both under no_grad."""
    x, y = digits(16, shape=(1, 28, 28))
    held_out, labels = digits(16, start=16, shape=(1, 28, 28))
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 13 * 13, 10)
    )
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    scaler = GradScaler()
    accuracy = []

    @minamp.no_grad()
    def evaluate():
        model.eval()
        with autocast():
            fast = model(held_out).argmax(dim=1)
        exact = model(held_out).argmax(dim=1)
        accuracy.append(((fast == labels).float().mean().item(), (exact == labels).float().mean().item()))
        model.train()

    def step():
        optimizer.zero_grad()
        with autocast():
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        evaluate()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


@healthy
def frozen_parameters():
    """Two of three layers are frozen, the optimizer has only the head; a frozen batch norm keeps its statistics."""
    x, y = digits(32)
    model = nn.Sequential(
        nn.Linear(784, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    model.requires_grad_(False)
    model[1].eval()
    model[5].requires_grad_(True)
    optimizer = optim.SGD(model[5].parameters(), lr=0.1)
    scaler = GradScaler()

    def step():
        optimizer.zero_grad()
        with autocast():
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


@healthy
def two_backwards_of_one_graph():
    x, y = digits(32)
    model = nn.ModuleList([mlp(784, 64, 32), nn.Linear(32, 10), nn.Linear(32, 1)])
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    scaler = GradScaler()
    even = minamp.tensor(y.numpy() % 2 == 0).float()

    def step():
        optimizer.zero_grad()
        with autocast():
            h = F.relu(model[0](x))
            kind = F.cross_entropy(model[1](h), y)
            parity = F.binary_cross_entropy_with_logits(model[2](h).squeeze(1), even)
        scaler.scale(kind).backward(retain_graph=True)
        scaler.scale(parity).backward()
        scaler.step(optimizer)
        scaler.update()
        return kind.item() + parity.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


@healthy
def a_gradient_penalty():
    """The gradients are scaled, unscaled by hand, and their norm joins the loss under autocast."""
    x, y = digits(32)
    model = nn.Sequential(nn.Linear(784, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    scaler = GradScaler(init_scale=2.0**10)

    def step():
        optimizer.zero_grad()
        with autocast():
            loss = F.cross_entropy(model(x), y)
        scaled = grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
        gradients = [g / scaler.get_scale() for g in scaled]
        with autocast():
            norm = sum(g.square().sum() for g in gradients).sqrt()
            total = loss + 0.1 * norm
        scaler.scale(total).backward()
        scaler.step(optimizer)
        scaler.update()
        return total.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


@healthy
def mostly_zeros():
    """A ReLU network whose biases keep nearly all units silent: their gradients are true zeros, nothing was flushed."""

    class T(Trainer):
        def network(self):
            model = mlp(784, 128, 10)
            nn.init.constant_(model[0].bias, -1.0)
            return model

    return T().parts()


@healthy
def a_mask_of_minus_infinity():
    class Masked(Attention):
        def weights(self, scores):
            future = minamp.ones(28, 28).triu(1).bool()
            return super().weights(scores.masked_fill(future, float("-inf")))

    class T(AttentionTrainer):
        def network(self):
            return Masked()

    return T().parts()


@healthy
def a_mask_of_the_smallest_half():
    """finfo of the scores' own format; the softmax is float32 under autocast."""

    class Masked(Attention):
        def weights(self, scores):
            future = minamp.ones(28, 28).triu(1).bool()
            return super().weights(scores.masked_fill(future, float(minamp.finfo(scores.dtype).min)))

    class T(AttentionTrainer):
        def network(self):
            return Masked()

    return T().parts()


@healthy
def a_mask_of_1e9_on_float32_scores():
    class Masked(Attention):
        def weights(self, scores):
            future = minamp.ones(28, 28).triu(1).bool()
            return super().weights(scores.float().masked_fill(future, -1e9))

    class T(AttentionTrainer):
        def network(self):
            return Masked()

    return T().parts()


@healthy
def cleared_at_the_end():
    class T(Trainer):
        def train_step(self):
            loss = self.forward()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.model.zero_grad(set_to_none=False)
            return loss.item()

    return T().parts()


@healthy
def cleared_by_hand_before_backward():
    class T(Trainer):
        def train_step(self):
            loss = self.forward()
            for p in self.model.parameters():
                p.grad = None
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            return loss.item()

    return T().parts()


@healthy
def accumulation_over_several_calls():
    """A trainer called once a micro-batch: it clears and steps at every second call."""

    class T(Trainer):
        calls = 0

        def train_step(self):
            if self.calls % 2 == 0:
                self.optimizer.zero_grad()
            self.calls += 1
            loss = self.forward() / 2
            self.scaler.scale(loss).backward()
            if self.calls % 2 == 0:
                self.scaler.unscale_(self.optimizer)
                clip_grad_norm_(self.model.parameters(), 1.0)
                self.scaler.step(self.optimizer)
                self.scaler.update()
            return 2 * loss.item()

    return T().parts()


@healthy
def masters_by_hand():
    """Half weights, and an optimizer of float32 copies that the trainer keeps itself."""
    x, y = digits(32)
    model = mlp(784, 64, 10).half()
    weights = list(model.parameters())
    masters = [p.detach().float().clone().requires_grad_() for p in weights]
    optimizer = optim.SGD(masters, lr=0.05, momentum=0.5)
    scaler = GradScaler(init_scale=2.0**10)

    def step():
        model.zero_grad()
        loss = F.cross_entropy(model(x.half()).float(), y)
        scaler.scale(loss).backward()
        for master, p in zip(masters, weights, strict=True):
            master.grad = p.grad.float()
        scaler.step(optimizer)
        scaler.update()
        with minamp.no_grad():
            for master, p in zip(masters, weights, strict=True):
                p.copy_(master.half())
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


@healthy
def bfloat16_weights_with_kahan_sums():
    class T(PictureTrainer):
        def __init__(self):
            super().__init__()
            self.optimizer = optim.AdamW(self.model.parameters(), lr=2e-5, write_back="kahan")

        def network(self):
            return super().network().bfloat16()

        def train_step(self):
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(self.x.bfloat16()).float(), self.y)
            loss.backward()
            self.optimizer.step()
            return loss.item()

    return {**T().parts(), "scaler": None}


@healthy
def a_function_with_its_policy():
    class Swish(Function):
        @staticmethod
        @minamp.custom_fwd(device_type="cuda", cast_inputs=minamp.float32)
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x.sigmoid()

        @staticmethod
        @minamp.custom_bwd(device_type="cuda")
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            s = x.sigmoid()
            return g * (s + x * s * (1.0 - s))

    class T(Trainer):
        def network(self):
            return nn.ModuleList([nn.Linear(784, 48), nn.Linear(48, 10)])

        def forward(self):
            with autocast():
                return F.cross_entropy(self.model[1](Swish.apply(self.model[0](self.x))), self.y)

    return T().parts()


@healthy
def batches_from_numpys_generator():
    """The order comes from NumPy's global generator, as in many scripts."""
    x, y = digits(64)
    model = mlp(784, 64, 10)
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    scaler = GradScaler()

    def step():
        pick = minamp.tensor(np.random.permutation(64)[:32])
        optimizer.zero_grad()
        with autocast():
            loss = F.cross_entropy(model(x[pick]), y[pick])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


@healthy
def the_best_weights_saved_for_use():
    """Weights alone, to be used and not trained on: no scaler belongs to them."""

    class T(PictureTrainer):
        folder = Path(tempfile.mkdtemp())

        def train_step(self):
            loss = super().train_step()
            save(self.model.state_dict(), self.folder / "best.ckpt")
            return loss

    return T().parts()


@healthy
def a_running_average_of_the_weights():
    """0.999 of the old and 0.001 of the new weight, kept in float32."""

    class T(Trainer):
        def __init__(self):
            super().__init__()
            self.average = [p.detach().clone() for p in self.model.parameters()]

        def train_step(self):
            loss = super().train_step()
            with minamp.no_grad():
                for a, p in zip(self.average, self.model.parameters(), strict=True):
                    a.mul_(0.999).add_(0.001 * p)
            return loss

    return T().parts()


@healthy
def a_second_optimizer_outside_the_scaler():
    """A learned temperature in float32 has a loss and an optimizer of its own, which no scaler touches."""
    x, y = digits(32)
    model = mlp(784, 64, 10)
    temperature = nn.Parameter(minamp.ones(1))
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    other = optim.SGD([temperature], lr=0.05)
    scaler = GradScaler()

    def step():
        optimizer.zero_grad()
        other.zero_grad()
        with autocast():
            logits = model(x)
            loss = F.cross_entropy(logits, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        F.cross_entropy(logits.detach().float() / temperature, y).backward()
        other.step()
        return loss.item()

    return dict(step=step, model=model, optimizer=[optimizer, other], scaler=scaler)


@healthy
def an_autoencoder_that_draws():
    """Variational: a logarithm that is learned, its exponential, and normal numbers from minamp's generator."""
    x, _ = digits(32)
    picture = (x > 0).float()
    model = nn.ModuleList([mlp(784, 64, 16), mlp(8, 64, 784)])
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    scaler = GradScaler()

    def step():
        optimizer.zero_grad()
        with autocast():
            mean, log_variance = model[0](x).float().chunk(2, dim=1)
            z = mean + (0.5 * log_variance).exp() * minamp.randn_like(mean)
            reconstruction = F.binary_cross_entropy_with_logits(model[1](z), picture)
            divergence = 0.5 * (mean.square() + log_variance.exp() - log_variance - 1.0).mean()
            loss = reconstruction + 0.01 * divergence
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


@healthy
def a_loss_that_is_a_sum_of_32_terms():
    """A sum in float32, divided by a number of samples: the same as a mean."""

    class T(PictureTrainer):
        def forward(self):
            with autocast():
                return F.cross_entropy(self.model(self.x), self.y, reduction="none").sum() / len(self.y)

    return T().parts()


@healthy
def layer_normalisation_by_hand_in_float32():
    x, y = digits(32)
    first, last = nn.Linear(784, 64), nn.Linear(64, 10)
    model = nn.ModuleList([first, last])
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    scaler = GradScaler()

    def normalise(h, eps=1e-8):
        h = h.float()
        h = h - h.mean(dim=-1, keepdim=True)
        return h / (h.var(dim=-1, keepdim=True) + eps).sqrt()

    def step():
        with autocast():
            loss = F.cross_entropy(last(F.gelu(normalise(first(x)))), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


@healthy
def learning_by_hand_in_float32():
    """No optimizer at all."""
    x, y = digits(32)
    model = mlp(784, 64, 10)

    def step():
        with autocast(dtype=minamp.bfloat16):
            loss = F.cross_entropy(model(x), y)
        model.zero_grad()
        loss.backward()
        with minamp.no_grad():
            for p in model.parameters():
                p.sub_(0.05 * p.grad)
        return loss.item()

    return dict(step=step, model=model, optimizer=None, scaler=None)


@healthy
def another_batch_every_step():
    """A loader that is asked for its next batch, as in every real script."""
    x, y = digits(256)
    loader = data.DataLoader((x.numpy(), y.numpy()), batch_size=32, shuffle=True)
    batches = (batch for _ in range(100) for batch in loader)
    model = mlp(784, 64, 10)
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    scaler = GradScaler()

    def step():
        x, y = next(batches)
        optimizer.zero_grad()
        with autocast():
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


@healthy
def a_confidence_for_the_log():
    """A softmax of half logits that no gradient goes through."""

    class T(Trainer):
        def forward(self):
            with autocast():
                logits = self.model(self.x)
                loss = F.cross_entropy(logits, self.y)
            self.confidence = F.softmax(logits.detach(), dim=1).amax(dim=1).mean().item()
            return loss

    return T().parts()


@healthy
def pictures_kept_in_half():
    class T(PictureTrainer):
        def data(self):
            x, y = super().data()
            return x.half(), y

    return T().parts()


@healthy
def a_head_that_starts_at_zero():
    """In the first step only the head has a gradient: the others' are true zeros."""

    class T(Trainer):
        def network(self):
            model = mlp(784, 48, 48, 10)
            nn.init.zeros_(model[4].weight)
            return model

    return T().parts()


@healthy
def a_layer_that_is_not_used():
    class T(Trainer):
        def network(self):
            model = mlp(784, 48, 10)
            model.spare = nn.Linear(4, 4)
            return model

        def forward(self):
            first, relu, last, _ = self.model
            with autocast():
                return F.cross_entropy(last(relu(first(self.x))), self.y)

    return T().parts()


@healthy
def a_rate_that_starts_at_zero():
    """A warm-up: the first step moves nothing, and nothing is lost by that."""
    x, y = digits(32)
    model = mlp(784, 64, 10).half()
    optimizer = optim.SGD(model.parameters(), lr=0.0, master_weights=True)
    scaler = GradScaler(init_scale=2.0**8)

    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.half()).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        for group in optimizer.param_groups:
            group["lr"] = min(0.05, group["lr"] + 0.02)
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


@broken("op_without_policy")
def a_function_without_policy_beside_a_checkpoint():
    """The checkpoint opens a region in backward, too, but not for the function."""

    class Product(Function):  # the fault
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx, g):
            x, weight = ctx.saved_tensors
            return g @ weight.mT, x.mT @ g  # the fault

    x, y = digits(32)
    model = nn.Sequential(
        nn.Linear(784, 64), nn.Tanh(), nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 10)
    )
    optimizer, scaler = optim.SGD(model.parameters(), lr=0.05), GradScaler()

    def step():
        optimizer.zero_grad()
        with autocast():
            h = Product.apply(model[:2](x), model[2].weight.mT)
            loss = F.cross_entropy(checkpoint(model[3:], h), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)
