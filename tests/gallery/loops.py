"""More loops: turns that differ, optimizers of one's own, limits and saves in unusual dress, losses and masks by hand."""

import pickle
import tempfile

import numpy as np

import minamp
import minamp.nn.functional as F
from gallery.parts import Scripts, digits, mlp
from gallery.variations import AttentionTrainer, Trainer
from minamp import GradScaler, autocast, float16, nn, optim
from minamp.autograd import Function, grad
from minamp.nn.utils import clip_grad_norm_, clip_grad_value_

_scripts = Scripts()
BROKEN, HEALTHY, broken, healthy = _scripts.ill, _scripts.well, _scripts.broken, _scripts.healthy


class T(Trainer):
    """A Trainer that also knows how often it has been called."""

    calls = 0

    def train_step(self):
        self.calls += 1
        return super().train_step()

    @property
    def second(self):
        return self.calls % 2 == 0


# ------------------------------------------------------------------------------------------------------- turns that differ


@broken("loss_in_half")
def a_loss_in_half_in_every_second_call():
    class Turns(T):
        def forward(self):
            with autocast():
                z = self.model(self.x)
                if self.second:
                    d = z - F.one_hot(self.y, 10).half()
                    return (d * d).mean()
                return F.cross_entropy(z, self.y)

    return Turns().parts()


@broken("backward_in_autocast")
def backward_in_the_region_in_every_second_call():
    class Turns(T):
        def train_step(self):
            self.calls += 1
            self.optimizer.zero_grad()
            if self.second:
                with autocast():
                    loss = F.cross_entropy(self.model(self.x), self.y)
                    self.scaler.scale(loss).backward()
            else:
                loss = self.forward()
                self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            return loss.item()

    return Turns().parts()


@healthy
def a_first_call_in_float32():
    class Warm(T):
        def forward(self):
            with autocast(enabled=self.calls > 1):
                return F.cross_entropy(self.model(self.x), self.y)

    return Warm().parts()


# ------------------------------------------------------------------------------------------------- optimizers of one's own


class Descent:
    def __init__(self, parameters, lr):
        self.param_groups, self.lr = [{"params": list(parameters)}], lr

    def zero_grad(self):
        for p in self.param_groups[0]["params"]:
            p.grad = None

    def step(self):
        with minamp.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(self.lr * p.grad)


class OwnDescent(T):
    def __init__(self):
        super().__init__()
        self.optimizer = Descent(self.model.parameters(), 0.05)

    def parts(self):
        return {**super().parts(), "optimizer": None}


@healthy
def an_optimizer_of_ones_own_that_is_not_handed_over():
    return OwnDescent().parts()


@broken("raw_optimizer_step")
def descent_by_hand_with_scaled_gradients():
    class Raw(T):
        def make_scaler(self):
            return GradScaler(init_scale=1024.0)

        def train_step(self):
            self.model.zero_grad()
            loss = self.forward()
            self.scaler.scale(loss).backward()
            with minamp.no_grad():
                for p in self.model.parameters():
                    p.sub_(0.05 * p.grad)
            return loss.item()

        def parts(self):
            return {**super().parts(), "optimizer": None}

    return Raw().parts()


@healthy
def descent_by_hand_with_the_scale_in_the_rate():
    class Folded(T):
        def train_step(self):
            self.model.zero_grad()
            loss = self.forward()
            self.scaler.scale(loss).backward()
            with minamp.no_grad():
                for p in self.model.parameters():
                    p.sub_(0.05 / 65536 * p.grad)
            return loss.item()

        def parts(self):
            return {**super().parts(), "optimizer": None}

    return Folded().parts()


def generator_first(handed):
    """Each zero_grad stands before its own backward; the discriminator's gradients are added to and cleared unused."""
    x, _ = digits(32)
    g, d = mlp(16, 32, 784), mlp(784, 32, 1)
    optimizers = [optim.Adam(net.parameters(), lr=1e-3) for net in (g, d)]
    scaler, one, zero = GradScaler(), minamp.ones(32, 1), minamp.zeros(32, 1)
    loss_of = F.binary_cross_entropy_with_logits

    def step():
        optimizers[0].zero_grad()
        with autocast():
            fake = g(minamp.randn(32, 16)).sigmoid()
            loss = loss_of(d(fake), one)
        scaler.scale(loss).backward()
        scaler.step(optimizers[0])
        optimizers[1].zero_grad()
        with autocast():
            loss = loss_of(d(x), one) + loss_of(d(fake.detach()), zero)
        scaler.scale(loss).backward()
        scaler.step(optimizers[1])
        scaler.update()
        return loss.item()

    return dict(step=step, model=[g, d], optimizer=[optimizers[i] for i in handed], scaler=scaler)


@healthy
def a_generator_first():
    return generator_first([0, 1])


@healthy
def a_generator_first_whose_optimizer_alone_is_handed_over():
    return generator_first([0])


def with_centres(second_step):
    """A loss with weights and an optimizer of its own, neither of which is handed over."""
    x, y = digits(32)
    encoder, head, centres = nn.Linear(784, 32), nn.Linear(32, 10), nn.Linear(32, 10)
    model = nn.ModuleList([encoder, head])
    optimizer, other, scaler = (
        optim.SGD(model.parameters(), lr=0.1),
        optim.SGD(centres.parameters(), lr=0.5),
        GradScaler(),
    )

    def step():
        optimizer.zero_grad()
        other.zero_grad()
        with autocast():
            h = encoder(x).relu()
            loss = F.cross_entropy(head(h), y) + 0.1 * F.cross_entropy(centres(h), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        second_step(scaler, other)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


@healthy
def a_second_optimizer_that_is_not_handed_over():
    return with_centres(lambda scaler, other: scaler.step(other))


@broken("raw_optimizer_step")
def a_second_optimizer_that_steps_past_the_scaler():
    return with_centres(lambda scaler, other: other.step())


@healthy
def gradients_that_are_views_of_one_buffer():
    class Flat(T):
        def __init__(self):
            super().__init__()
            ps = list(self.model.parameters())
            self.flat, at = minamp.zeros(sum(p.numel() for p in ps)), 0
            self.views = []
            for p in ps:
                self.views.append((p, self.flat[at : at + p.numel()].reshape(p.shape)))
                at += p.numel()

        def forward(self):
            self.flat.zero_()
            for p, view in self.views:
                p.grad = view
            return super().forward()

    return Flat().parts()


# ------------------------------------------------------------------------------------------------------------------ limits


@healthy
def an_infinite_limit_asks_for_the_norm():
    class Norm(T):
        def before_step(self):
            self.norm = clip_grad_norm_(self.model.parameters(), float("inf")) / self.scaler.get_scale()

    return Norm().parts()


@healthy
def a_limit_times_the_scale():
    class Limit(T):
        def before_step(self):
            clip_grad_norm_(self.model.parameters(), 0.5 * self.scaler.get_scale())

    return Limit().parts()


@healthy
def a_norm_over_the_scale():
    class Limit(T):
        def before_step(self):
            ps = list(self.model.parameters())
            norm = sum(float(p.grad.square().sum()) for p in ps) ** 0.5 / self.scaler.get_scale()
            for p in ps:
                p.grad.mul_(min(1.0, 0.5 / norm))

    return Limit().parts()


@healthy
def a_limit_for_each_gradient_times_the_scale():
    class Limit(T):
        def before_step(self):
            limit = 0.1 * self.scaler.get_scale()
            for p in self.model.parameters():
                p.grad.mul_(min(1.0, limit / float(p.grad.norm())))

    return Limit().parts()


@healthy
def values_clamped_at_a_limit_times_the_scale():
    class Limit(T):
        def before_step(self):
            limit = 0.01 * self.scaler.get_scale()
            for p in self.model.parameters():
                p.grad.clamp_(-limit, limit)

    return Limit().parts()


@broken("clip_before_unscale")
def one_of_two_optimizers_unscaled():
    x, y = digits(32)
    body, head = mlp(784, 48), mlp(48, 10)
    optimizers, scaler = [optim.SGD(m.parameters(), lr=0.1) for m in (body, head)], GradScaler()

    def step():
        for o in optimizers:
            o.zero_grad()
        with autocast():
            loss = F.cross_entropy(head(F.relu(body(x))), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizers[0])
        clip_grad_norm_([*body.parameters(), *head.parameters()], 1.0)
        for o in optimizers:
            scaler.step(o)
        scaler.update()
        return loss.item()

    return dict(step=step, model=[body, head], optimizer=optimizers, scaler=scaler)


@healthy
def two_losses_two_scalers_a_generator_of_parameters():
    x, y = digits(32)
    nets = [mlp(784, 32, 10), mlp(784, 24, 10)]
    optimizers = [optim.Adam(net.parameters(), lr=1e-3) for net in nets]
    scalers = [GradScaler(init_scale=2.0**10), GradScaler(init_scale=2.0**11)]

    def step():
        total = 0.0
        for net, o, s in zip(nets, optimizers, scalers, strict=True):
            o.zero_grad()
            with autocast():
                loss = F.cross_entropy(net(x), y)
            s.scale(loss).backward()
            s.unscale_(o)
            clip_grad_value_(net.parameters(), 0.05)
            s.step(o)
            total += loss.item()
        for s in scalers:
            s.update()
        return total

    return dict(step=step, model=nets, optimizer=optimizers, scaler=scalers[0])


class Overflowing(T):
    def make_scaler(self):
        return GradScaler(init_scale=2.0**20)

    def forward(self):
        with autocast():
            return F.cross_entropy(self.model(self.x), self.y, reduction="sum")


@broken("clip_value_hides_overflow")
def a_hook_that_replaces_what_is_not_finite():
    class Hook(Overflowing):
        def network(self):
            model = super().network()
            for p in model.parameters():
                p.register_hook(lambda g: minamp.where(minamp.isfinite(g), g, 0.0))
            return model

    return Hook().parts()


# ---------------------------------------------------------------------------------------------------- the scale and the saves


@broken("scale_pinned")
def a_scale_that_is_set_in_every_step():
    class Constant(Overflowing):
        def train_step(self):
            self.optimizer.zero_grad()
            loss = self.forward()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update(2.0**20)
            return loss.item()

    return Constant().parts()


@broken("scale_pinned")
def a_floor_by_hand():
    class Floor(Overflowing):
        def train_step(self):
            loss = super().train_step()
            if self.scaler.get_scale() < 2.0**20:
                self.scaler.update(2.0**20)
            return loss

    return Floor().parts()


class MicroBatches(T):
    def train_step(self):
        self.optimizer.zero_grad()
        total = 0.0
        for x, y in zip(self.x.chunk(4), self.y.chunk(4), strict=True):
            with autocast():
                loss = F.cross_entropy(self.model(x), y) / 4
            self.backward(loss)
            total += loss.item()
        self.finish()
        return total

    def finish(self):
        self.optimizer.step()


@broken("unscale_every_micro_batch")
def divided_by_hand_after_every_micro_batch():
    class Divided(MicroBatches):
        def make_scaler(self):
            return None

        def backward(self, loss):
            (loss * 1024.0).backward()
            for p in self.model.parameters():
                p.grad.div_(1024.0)

    return Divided().parts()


@broken("unscale_every_micro_batch")
def divided_by_get_scale_after_every_micro_batch():
    class Divided(MicroBatches):
        def backward(self, loss):
            self.scaler.scale(loss).backward()
            for p in self.model.parameters():
                p.grad.div_(self.scaler.get_scale())

    return Divided().parts()


class Saving(T):
    def train_step(self):
        loss = super().train_step()
        with tempfile.TemporaryDirectory() as folder:
            self.save(f"{folder}/checkpoint")
        return loss


@healthy
def the_scaler_itself_is_pickled():
    class Pickled(Saving):
        def save(self, path):
            with open(path, "wb") as file:
                pickle.dump([self.model.state_dict(), self.optimizer.state_dict(), self.scaler], file)

    return Pickled().parts()


@broken("scaler_not_saved")
def a_state_that_is_looked_at_and_not_saved():
    class Looked(Saving):
        def save(self, path):
            self.last = self.scaler.state_dict()["scale"]
            minamp.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, path)

    return Looked().parts()


@healthy
def one_file_each():
    class Each(Saving):
        def save(self, path):
            for name in ("model", "optimizer", "scaler"):
                minamp.save(getattr(self, name).state_dict(), f"{path}.{name}")

    return Each().parts()


# --------------------------------------------------------------------------------------------------------------- arithmetic


@healthy
def the_logarithm_of_a_softmax_that_is_only_looked_at():
    class Perplexity(T):
        def before_step(self):
            with minamp.no_grad():
                p = F.softmax(self.model(self.x), dim=1)
                self.entropy = float(-(p * (p + 1e-8).log()).sum(dim=1).mean())

    return Perplexity().parts()


@healthy
def the_logarithm_of_one_minus_a_probability():
    class Unlikelihood(T):
        def forward(self):
            with autocast():
                z = self.model(self.x)
                wrong = F.softmax(z, dim=1).gather(1, ((self.y + 1) % 10).reshape(-1, 1))
                return F.cross_entropy(z, self.y) - 0.5 * (1 - wrong).clamp(min=1e-5).log().mean()

    return Unlikelihood().parts()


@broken("log_of_softmax")
def a_contrastive_loss_by_the_book():
    class Contrastive(T):
        def network(self):
            return mlp(784, 48, 16)

        def forward(self):
            with autocast():
                z = self.model(self.x)
                e = minamp.exp(z[:16] @ z[16:].T)
                right = e[np.arange(16), np.arange(16)]
                return -minamp.log(right / e.sum(dim=1)).mean()

    return Contrastive().parts()


@broken("softmax_in_half")
def an_exponential_in_place():
    class InPlace(T):
        def forward(self):
            with autocast():
                z = self.model(self.x)
            e = (z - z.amax(dim=1, keepdim=True)).exp_()
            p = e / e.sum(dim=1, keepdim=True)
            return F.mse_loss(p.float(), F.one_hot(self.y, 10).float())

    return InPlace().parts()


@broken("mask_overflows")
def a_float32_mask_added_in_place():
    mask = minamp.tensor(np.triu(np.full((28, 28), -1e9, np.float32), 1))

    class Masked(AttentionTrainer):
        def network(self):
            class Attention(super().network().__class__):
                def weights(self, scores):
                    scores += mask
                    return F.softmax(scores, dim=-1)

            return Attention()

    return Masked().parts()


class Attending(AttentionTrainer):
    """Attention with `mask` and `weights` of its own."""

    def network(self):
        mask, weights = self.mask, self.weights

        class Attention(super().network().__class__):
            def weights(self, scores):
                return weights(mask(scores))

        return Attention()

    def mask(self, scores):
        return scores

    def weights(self, scores):
        return F.softmax(scores, dim=-1)


@broken("mask_overflows")
def zeros_and_ones_times_a_half_infinity():
    keep, huge = minamp.tril(minamp.ones(28, 28)).half(), minamp.tensor(-1e9).half()

    class Masked(Attending):
        def mask(self, scores):
            return scores + (1 - keep) * huge

    return Masked().parts()


@broken("mask_overflows")
def a_mask_with_its_constant_in_alpha():
    away = minamp.zeros(1, 28)
    away[:, 22:] = 1.0

    class Masked(Attending):
        def mask(self, scores):
            return scores.sub(away.half(), alpha=1e5)

    return Masked().parts()


@broken("softmax_in_half")
def an_exponential_in_place_in_the_region():
    class Masked(Attending):
        def weights(self, scores):
            e = scores.exp_()  # in place nothing is cast
            return e / e.sum(dim=-1, keepdim=True)

    return Masked().parts()


class HalfSoftmax(Function):
    @staticmethod
    @minamp.custom_fwd(device_type="cuda", cast_inputs=float16)
    def forward(ctx, s):
        e = (s - s.amax(dim=-1, keepdim=True)).exp()
        p = e / e.sum(dim=-1, keepdim=True)
        ctx.save_for_backward(p)
        return p

    @staticmethod
    @minamp.custom_bwd(device_type="cuda")
    def backward(ctx, g):
        (p,) = ctx.saved_tensors
        return p * (g - (g * p).sum(dim=-1, keepdim=True))


@broken("softmax_in_half")
def a_softmax_inside_a_function():
    class Masked(Attending):
        def weights(self, scores):
            return HalfSoftmax.apply(scores)

    return Masked().parts()


@broken("eps_rounds_to_zero")
def an_eps_made_by_full_like():
    class Scaled(T):
        def network(self):
            return nn.ModuleList([nn.Linear(784, 32), nn.Linear(32, 10)])

        def forward(self):
            with autocast():
                h = F.relu(self.model[0](self.x))
                s = h.std(dim=1, keepdim=True)
                return F.cross_entropy(self.model[1](h / (s + minamp.full_like(s, 1e-8))), self.y)

    return Scaled().parts()


@broken("forward_overflow")
def raw_features():
    class Raw(T):
        def data(self):
            x, y = digits(32)
            x = x.clone()
            x[:, 0] = 1.7e5
            return x, y

        def network(self):
            model = super().network()
            with minamp.no_grad():
                model[0].weight[:, 0] = 1e-6
            return model

    return Raw().parts()


class Loud(T):
    def network(self):
        return nn.ModuleList([nn.Linear(784, 32), nn.Linear(32, 10)])

    def forward(self):
        first, last = self.model[0], self.model[1]
        with autocast():
            return F.cross_entropy(last(self.body(F.relu(first(self.x * 300.0)))), self.y)


@broken("forward_overflow")
def a_squared_activation_before_a_norm_in_float32():
    class Squared(Loud):
        def body(self, h):
            f = (h * h).float()
            return f * minamp.rsqrt(f.pow(2).mean(dim=-1, keepdim=True) + 1e-6)

    return Squared().parts()


@healthy
def a_power_that_is_only_looked_at():
    class Power(Loud):
        def body(self, h):
            with minamp.no_grad():
                self.power = float((h * h).mean().sqrt())
            return h / 300.0

    return Power().parts()


@healthy
def a_recurrent_state_of_zeros():
    class Cell(AttentionTrainer):
        def network(self):
            return nn.ModuleList([nn.Linear(28, 32), nn.Linear(32, 32), nn.Linear(32, 10)])

        def forward(self):
            into, again, out = self.model[0], self.model[1], self.model[2]
            with autocast():
                h = minamp.zeros(len(self.x), 32)
                for t in range(0, 28, 7):
                    z = into(self.x[:, t]).sigmoid()
                    h = (1 - z) * again(h).tanh() + z * h
                return F.cross_entropy(out(h), self.y)

    return Cell().parts()


@healthy
def the_input_added_to_what_is_made_of_it():
    class Residual(AttentionTrainer):
        def network(self):
            return nn.ModuleList([nn.Linear(28, 28), nn.Linear(28, 28), nn.Linear(28, 10)])

        def forward(self):
            a, b, head = self.model[0], self.model[1], self.model[2]
            with autocast():
                return F.cross_entropy(head((self.x + b(a(self.x).relu())).mean(1)), self.y)

    return Residual().parts()


@healthy
def a_float32_bias_on_the_way_to_a_softmax():
    bias = minamp.tensor(-0.1 * np.abs(np.subtract.outer(np.arange(28), np.arange(28))).astype(np.float32))
    future = minamp.ones(28, 28).triu(1).bool()

    class Biased(Attending):
        def mask(self, scores):
            return (scores + bias).masked_fill(future, float("-inf"))

    return Biased().parts()


@broken("autocast_covers_nothing")
def a_network_in_float64():
    class Double(T):
        def data(self):
            x, y = digits(32)
            return x.double(), y

        def network(self):
            return super().network().double()

    return Double().parts()


@broken("adam_in_half")
def an_eps_in_half_under_moments_in_float32():
    x, y = digits(32)
    model = mlp(784, 32, 10).half()
    moments = [(minamp.zeros(*p.shape), minamp.zeros(*p.shape)) for p in model.parameters()]

    def step():
        model.zero_grad()
        loss = F.cross_entropy(model(x.half()).float(), y)
        loss.backward()
        with minamp.no_grad():
            for p, (m, v) in zip(model.parameters(), moments, strict=True):
                g = p.grad.float()
                m.mul_(0.9).add_(g, alpha=0.1)
                v.mul_(0.999).addcmul_(g, g, value=0.001)
                p.sub_(1e-3 * m.half() / (v.sqrt().half() + 1e-8))
        return loss.item()

    return dict(step=step, model=model, optimizer=None, scaler=None)


class Checkpointed(Function):
    """Activation checkpointing by hand: it knows the region it stands in."""

    @staticmethod
    def forward(ctx, run, x, *ps):
        ctx.run, ctx.region = run, (minamp.is_autocast_enabled(), minamp.get_autocast_dtype())
        ctx.save_for_backward(x, *ps)
        return run(x)

    @staticmethod
    def backward(ctx, g):
        x, *ps = ctx.saved_tensors
        enabled, dtype = ctx.region
        with minamp.enable_grad():
            x = x.detach().requires_grad_(True)
            with autocast(dtype=dtype, enabled=enabled):
                y = ctx.run(x)
        return None, *grad(y, [x, *ps], g)


@healthy
def a_function_that_opens_its_own_region():
    class Recomputed(T):
        def network(self):
            return nn.ModuleList([nn.Linear(784, 48), mlp(48, 48, 48), nn.Linear(48, 10)])

        def forward(self):
            first, middle, last = (self.model[i] for i in range(3))
            with autocast(dtype=float16):
                h = Checkpointed.apply(middle, first(self.x), *middle.parameters())
                return F.cross_entropy(last(h), self.y)

    return Recomputed().parts()
