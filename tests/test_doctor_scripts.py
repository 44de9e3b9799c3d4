"""minamp.doctor on loops as other people write them: faults in unusual dress, and healthy loops that were once suspected."""

import copy
import pickle

import numpy as np
import pytest
from gallery import loops, ported
from gallery.parts import Scripts, digits, mlp, told
from gallery.variations import AttentionTrainer, Trainer

import minamp
import minamp.nn.functional as F
from minamp import GradScaler, autocast, float16, nn, optim
from minamp.autograd import Function, grad
from minamp.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

_scripts = Scripts()
BROKEN, HEALTHY, broken, healthy = _scripts.ill, _scripts.well, _scripts.broken, _scripts.healthy


def parts(step, model=None, optimizer=None, scaler=None):
    return dict(model=model, step=step, optimizer=optimizer, scaler=scaler)


class HalfTrainer(Trainer):
    """A float16 network, its masters in float32, a loss in float32."""

    def __init__(self):
        super().__init__()
        self.optimizer = optim.SGD(self.model.parameters(), lr=0.05, master_weights=True)

    def network(self):
        return mlp(784, 48, 10).half()

    def make_scaler(self):
        return GradScaler(init_scale=256.0)

    def forward(self):
        return F.cross_entropy(self.model(self.x.half()).float(), self.y)


class Attending(AttentionTrainer):
    """Attention whose weights a function of queries, keys and values makes."""

    def network(self):
        attend = self.attend

        class Attention(super().network().__class__):
            def forward(self, x):
                return self.out(attend(self.query(x), self.key(x), self.value(x)).mean(dim=1))

        return Attention()


# ---------------------------------------------------------------------------------------------------------------- arithmetic


@broken("softmax_in_half")
def log_softmax_written_out():
    class T(HalfTrainer):
        def forward(self):
            z = self.model(self.x.half())
            z = z - z.amax(dim=1, keepdim=True).detach()
            log_p = z - z.exp().sum(dim=1, keepdim=True).log()
            return F.nll_loss(log_p.float(), self.y)

    return T().parts()


@broken("softmax_in_half")
def attention_that_divides_at_its_end():
    class T(Attending):
        def attend(self, q, k, v):
            with autocast(enabled=False):
                e = minamp.exp(q @ k.mT / 4.0)
                return (e @ v) / e.sum(dim=-1, keepdim=True)

    return T().parts()


@broken("softmax_in_half")
def attention_times_one_over_its_sum():
    class T(Attending):
        def attend(self, q, k, v):
            with autocast(enabled=False):
                e = minamp.exp(q @ k.mT / 4.0)
                return (e * (1.0 / e.sum(dim=-1, keepdim=True))) @ v

    return T().parts()


@broken("mask_overflows")
def a_mask_made_half_before_training():
    class T(Attending):
        def __init__(self):
            mask = minamp.ones(28, 28).triu(1) * -1e9
            mask[5] = -1e9  # padding
            self.mask = mask.half()
            super().__init__()

        def attend(self, q, k, v):
            return F.softmax(q @ k.mT / 4.0 + self.mask, dim=-1) @ v

    return T().parts()


@broken("mask_overflows")
def a_large_number_subtracted_from_what_is_masked():
    class T(Attending):
        def attend(self, q, k, v):
            hidden = minamp.ones(28, 28).triu(1).half()
            return F.softmax(q @ k.mT / 4.0 - hidden * 1e30, dim=-1) @ v

    return T().parts()


@broken("eps_rounds_to_zero")
def an_eps_among_the_buffers_of_a_half_network():
    class Share(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("eps", minamp.tensor([1e-8]))

        def forward(self, h):
            return h / (h.abs().mean(dim=-1, keepdim=True) + self.eps)

    class T(HalfTrainer):
        def network(self):
            return nn.Sequential(nn.Linear(784, 48), nn.ReLU(), Share(), nn.Linear(48, 10)).half()

    return T().parts()


@broken("eps_rounds_to_zero")
def a_lower_limit_that_is_zero():
    class Share(nn.Module):
        def forward(self, h):
            return h / h.abs().mean(dim=-1, keepdim=True).clamp(min=1e-10)

    class T(Trainer):
        def network(self):
            return nn.Sequential(nn.Linear(784, 48), nn.ReLU(), Share(), nn.Linear(48, 10))

    return T().parts()


@broken("layer_norm_overflows")
def a_difference_from_the_mean_written_twice():
    class Standard(nn.Module):
        def forward(self, h):
            mean = h.mean(dim=-1, keepdim=True)
            return (h - mean) / (((h - mean) * (h - mean)).mean(dim=-1, keepdim=True) + 1e-3).sqrt()

    class T(HalfTrainer):
        def data(self):
            x, y = digits(32)
            return 2000.0 * x, y

        def network(self):
            return nn.Sequential(nn.Linear(784, 48), Standard(), nn.ReLU(), nn.Linear(48, 10)).half()

    return T().parts()


class Autoencoder(Trainer):
    """100 digits of 784 pixels: 78,400 errors."""

    def data(self):
        return digits(100)

    def network(self):
        return mlp(784, 16, 784)

    def make_scaler(self):
        return GradScaler(init_scale=256.0)

    def forward(self):
        with autocast():
            out = self.model(self.x)
        return self.mean((out - self.x.half()).abs()).float()


@broken("mean_of_too_many")
def a_count_made_half():
    class T(Autoencoder):
        def mean(self, error):
            return error.sum() / minamp.tensor(float(error.numel())).half()

    return T().parts()


@broken("mean_of_too_many")
def a_sum_of_sums():
    class T(Autoencoder):
        def mean(self, error):
            return error.sum(dim=1).sum() / error.numel()

    return T().parts()


@broken("layer_norm_overflows")
def a_length_from_einsum():
    class T(Trainer):
        def data(self):
            x, y = digits(32)
            return 300.0 * x, y

        def make_scaler(self):
            return GradScaler(init_scale=256.0)

        def forward(self):
            first, _, last = self.model
            with autocast():
                h = first(self.x)
                length = minamp.einsum("bi,bi->b", h, h).sqrt().unsqueeze(1)
                return F.cross_entropy(last(h / length), self.y)

    return T().parts()


# ------------------------------------------------------------------------------------------------------------------ clipping


class Scaled(Trainer):
    def make_scaler(self):
        return GradScaler(init_scale=1024.0)


@broken("clip_before_unscale")
def a_hook_that_clamps():
    class T(Scaled):
        def network(self):
            model = super().network()
            for p in model.parameters():
                p.register_hook(lambda g: g.clamp(-1.0, 1.0))
            return model

    return T().parts()


@broken("clip_before_unscale")
def numpy_clips():
    class T(Scaled):
        def before_step(self):
            for p in self.model.parameters():
                np.clip(p.grad.numpy(), -0.5, 0.5, out=p.grad.numpy())

    return T().parts()


@broken("clip_before_unscale")
def data_clamped():
    class T(Scaled):
        def before_step(self):
            for p in self.model.parameters():
                p.grad.data.clamp_(-0.5, 0.5)

    return T().parts()


def shorten(gradients, limit):
    """clip_grad_norm_ in NumPy."""
    norm = np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients))
    for g in gradients:
        g *= min(1.0, limit / (norm + 1e-6))


@broken("clip_before_unscale")
def numpy_clips_the_norm():
    class T(Scaled):
        def before_step(self):
            shorten([p.grad.numpy() for p in self.model.parameters()], 0.25)

    return T().parts()


@broken("clip_before_unscale")
def numpy_clips_each_norm():
    class T(Scaled):
        def before_step(self):
            for p in self.model.parameters():
                shorten([p.grad.numpy()], 1.5)

    return T().parts()


@healthy
def numpy_clips_the_norm_of_what_is_unscaled():
    class T(Scaled):
        def before_step(self):
            self.scaler.unscale_(self.optimizer)
            shorten([p.grad.numpy() for p in self.model.parameters()], 0.25)

    return T().parts()


@healthy
def numpy_takes_the_mean_over_micro_batches():
    class T(Scaled):
        def train_step(self):
            self.optimizer.zero_grad()
            for _ in range(3):
                self.scaler.scale(self.forward()).backward()
            for p in self.model.parameters():
                gradient = p.grad.numpy()
                gradient /= 3
            self.scaler.step(self.optimizer)
            self.scaler.update()

    return T().parts()


@broken("clip_before_unscale")
def a_hook_that_limits_the_norm():
    class T(Scaled):
        def network(self):
            model = super().network()
            for p in model.parameters():
                p.register_hook(lambda g: g * (1.0 / g.norm().item()))
            return model

    return T().parts()


class Overflowing(Trainer):
    lr = 1e-3

    def make_scaler(self):
        return GradScaler(init_scale=2.0**20)

    def forward(self):
        with autocast():
            return F.cross_entropy(self.model(self.x), self.y, reduction="sum")

    def finite(self):
        for p in self.model.parameters():
            p.grad = minamp.where(minamp.isfinite(p.grad), p.grad, 0.0)


@broken("clip_value_hides_overflow")
def infinite_gradients_replaced_by_zero():
    class T(Overflowing):
        def before_step(self):
            self.finite()

    return T().parts()


@healthy
def infinite_gradients_replaced_after_the_scaler_has_seen_them():
    class T(Overflowing):
        def before_step(self):
            self.scaler.unscale_(self.optimizer)
            self.finite()

    return T().parts()


@broken("clip_value_hides_overflow")
def nan_to_num():
    class T(Overflowing):
        def before_step(self):
            for p in self.model.parameters():
                np.nan_to_num(p.grad.numpy(), copy=False, posinf=1.0, neginf=-1.0)

    return T().parts()


# --------------------------------------------------------------------------------------------------------- steps and updates


class ScaledByHand(Scaled):
    def train_step(self):
        self.optimizer.zero_grad()
        loss = self.forward()
        (loss * self.scaler.get_scale()).backward()
        self.divide()
        self.optimizer.step()
        return loss.item()


@broken("raw_optimizer_step")
def multiplied_by_the_scale_and_never_divided():
    class T(ScaledByHand):
        def divide(self):
            pass

    return T().parts()


@healthy
def multiplied_and_divided_by_the_scale():
    class T(ScaledByHand):
        def divide(self):
            for p in self.model.parameters():
                p.grad.div_(self.scaler.get_scale())

    return T().parts()


def descent_on_scaled_gradients(divide):
    """As PyTorch's tutorials write it, on weights of which the doctor is told nothing."""
    x, y = digits(32)
    w = nn.Parameter(0.01 * minamp.randn(784, 10))
    scaler = GradScaler(init_scale=4096.0)

    def step():
        w.grad = None
        with autocast():
            loss = F.cross_entropy(x @ w, y)
        scaler.scale(loss).backward()
        with minamp.no_grad():
            w.add_(w.grad, alpha=-0.01 / (scaler.get_scale() if divide else 1.0))
        return loss.item()

    return parts(step, scaler=scaler)


@broken("raw_optimizer_step")
def descent_by_alpha_on_scaled_gradients():
    return descent_on_scaled_gradients(divide=False)


def test_descent_by_alpha_on_unscaled_gradients_is_healthy():
    it = descent_on_scaled_gradients(divide=True)
    report = examine(it)
    assert list(report) == [], told(report)


@broken("update_forgotten")
def an_update_forgotten_before_the_doctor_came():
    class T(Trainer):
        def train_step(self):
            self.optimizer.zero_grad()
            self.scaler.scale(self.forward()).backward()
            self.scaler.unscale_(self.optimizer)
            self.scaler.step(self.optimizer)

    it = T()
    it.train_step()
    return it.parts()


@broken("raw_optimizer_step")
def unscaled_and_stepped_without_an_update():
    class T(Trainer):
        def train_step(self):
            self.optimizer.zero_grad()
            self.scaler.scale(self.forward()).backward()
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()

    return T().parts()


class Alternating(Trainer):
    """Accumulation half taken back: one of the calls is still made in every second step only, or in every second step too."""

    count = 0

    def train_step(self):
        self.count += 1
        odd = self.count % 2
        if self.cleared(odd):
            self.optimizer.zero_grad()
        loss = self.forward()
        self.scaler.scale(loss).backward()
        self.finish(odd)
        return loss.item()

    def cleared(self, odd):
        return True

    def finish(self, odd):
        self.scaler.step(self.optimizer)
        self.scaler.update()


@healthy
def nothing_left_of_it():
    return Alternating().parts()


@broken("zero_grad_missing")
def cleared_every_second_time():
    class T(Alternating):
        def cleared(self, odd):
            return odd

    return T().parts()


@broken("clip_before_unscale")
def clipped_every_second_time():
    class T(Alternating):
        def finish(self, odd):
            if not odd:
                clip_grad_norm_(self.model.parameters(), 1.0)
            super().finish(odd)

    return T().parts()


@broken("raw_optimizer_step")
def stepped_past_the_scaler_every_second_time():
    class T(Alternating):
        def finish(self, odd):
            if odd:
                super().finish(odd)
            else:
                self.optimizer.step()

    return T().parts()


@broken("update_repeated")
def updated_twice_every_second_time():
    class T(Alternating):
        def finish(self, odd):
            super().finish(odd)
            if not odd:
                self.scaler.update()

    return T().parts()


@healthy
def unscaled_looked_at_and_stepped():
    """The user's own decision, as good as scaler.step's; unscale_ has told update."""

    class T(Trainer):
        def train_step(self):
            self.optimizer.zero_grad()
            loss = self.forward()
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            if np.isfinite(clip_grad_norm_(self.model.parameters(), 1.0).item()):
                self.optimizer.step()
            self.scaler.update()
            return loss.item()

    return T().parts()


@healthy
def divided_by_the_scale_clipped_and_stepped():
    class T(Scaled):
        def train_step(self):
            self.optimizer.zero_grad()
            loss = self.forward()
            self.scaler.scale(loss).backward()
            for p in self.model.parameters():
                p.grad.mul_(1.0 / self.scaler.get_scale())
            clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            return loss.item()

    return T().parts()


@broken("unscale_every_micro_batch")
def an_update_after_every_micro_batch_silences_the_error():
    class T(Trainer):
        def train_step(self):
            self.optimizer.zero_grad()
            for _ in range(4):
                self.scaler.scale(self.forward() / 4).backward()
                self.scaler.unscale_(self.optimizer)
                self.scaler.update()
            if np.isfinite(clip_grad_norm_(self.model.parameters(), 1.0).item()):
                self.optimizer.step()

    return T().parts()


def adversaries(second_scaler=False):
    """Two networks against each other: the second loss is made after the first update."""
    x, _ = digits(32)
    maker, judge = mlp(16, 64, 784), mlp(784, 64, 1)
    making, judging = (optim.Adam(m.parameters(), lr=2e-4) for m in (maker, judge))
    first = GradScaler(init_scale=2.0**12)
    second = GradScaler(init_scale=2.0**10) if second_scaler else first

    def says(score, real):
        return F.binary_cross_entropy_with_logits(score, minamp.full(score.shape, real))

    def step():
        with autocast():
            made = maker(minamp.randn(32, 16))
            loss = says(judge(x), 1.0) + says(judge(made.detach()), 0.0)
        judging.zero_grad()
        first.scale(loss).backward()
        first.step(judging)
        first.update()
        with autocast():
            fooled = says(judge(made), 1.0)
        making.zero_grad()
        second.scale(fooled).backward()
        second.step(making)
        second.update()
        return loss.item()

    return parts(step, [maker, judge], [making, judging], first)


@healthy
def adversaries_with_a_scaler_each():
    return adversaries(second_scaler=True)


@healthy
def adversaries_whose_gradients_are_made_after_the_update():
    return adversaries()


@broken("scaler_rebuilt")
def a_copy_of_a_template():
    class T(Trainer):
        def train_step(self):
            self.template, self.scaler = self.scaler, copy.deepcopy(self.scaler)
            super().train_step()
            self.scaler = self.template

    return T().parts()


@broken("scaler_rebuilt")
def the_state_of_the_start_loaded_again():
    class T(Trainer):
        def __init__(self):
            super().__init__()
            self.start = self.scaler.state_dict()

        def train_step(self):
            self.scaler.load_state_dict(self.start)
            return super().train_step()

    return T().parts()


@healthy
def a_scaler_at_its_ceiling_and_with_a_floor_by_hand():
    class T(Trainer):
        def make_scaler(self):
            return GradScaler(init_scale=2.0**10, max_scale=2.0**10, growth_interval=1)

        def train_step(self):
            loss = super().train_step()
            if self.scaler.get_scale() < 128.0:
                self.scaler.update(128.0)
            return loss

    return T().parts()


# -------------------------------------------------------------------------------------------------------- gradients and state


@broken("zero_grad_missing")
def descent_by_hand():
    x, y = digits(32)
    model = mlp(784, 48, 10)

    def step():
        F.cross_entropy(model(x), y).backward()
        with minamp.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad

    return parts(step, model)


@broken("zero_grad_missing")
def an_optimizer_that_the_doctor_was_not_given():
    x, y = digits(32)
    model = mlp(784, 48, 10)
    optimizer = optim.SGD(model.parameters(), lr=0.01)

    def step():
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return parts(step, model)


class WithAKeyBias(Attending):
    """The softmax takes the bias of the keys out again: its gradient is rounding."""

    scale = 64.0

    def make_scaler(self):
        return GradScaler(init_scale=self.scale)

    def attend(self, q, k, v):
        return F.softmax(q @ k.mT / 4.0, dim=-1) @ v


@healthy
def a_bias_of_the_keys_whose_gradient_is_rounding():
    return WithAKeyBias().parts()


@healthy
def weights_normalised_between_micro_batches():
    class T(Trainer):
        def train_step(self):
            self.optimizer.zero_grad()
            for _ in range(2):
                with minamp.no_grad():
                    weight = self.model[0].weight
                    weight.div_(weight.square().sum().sqrt() / 3.0)
                loss = self.forward()
                self.scaler.scale(loss / 2).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            return loss.item()

    return {**T().parts(), "optimizer": None}


@healthy
def a_penalty_on_the_norm_of_gradients():
    """grad() of a scaled loss, recorded; at the scale of the start its sums overflow, and the scaler sees to that."""
    x, _ = digits(16)
    model = mlp(784, 32, 1)
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    scaler = GradScaler()

    def step():
        between = (x + 0.1 * minamp.randn(16, 784)).requires_grad_()
        with autocast():
            score = model(between).sum()
        (g,) = grad(scaler.scale(score), [between], create_graph=True)
        g = g * (1.0 / scaler.get_scale())
        norm = (g.square().sum(dim=1) + 1e-12).sqrt()
        with autocast():
            loss = model(x).mean().float() + 10.0 * (norm - 1.0).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return parts(step, model, optimizer, scaler)


@broken("adam_in_half")
def moments_in_one_long_vector():
    x, y = digits(32)
    model = mlp(784, 48, 10).half()
    v = minamp.zeros(sum(p.numel() for p in model.parameters()), dtype=float16)

    def step():
        model.zero_grad()
        F.cross_entropy(model(x.half()).float(), y).backward()
        with minamp.no_grad():
            g = minamp.cat([p.grad.reshape(-1) for p in model.parameters()])
            v.mul_(0.99).add_(0.01 * g * g)
            weights = parameters_to_vector(model.parameters()) - 1e-2 * g / (v.sqrt() + 1e-4)
            vector_to_parameters(weights, model.parameters())

    return parts(step, model)


@broken("scale_pinned")
def a_ceiling_so_low_that_gradients_are_flushed():
    x, _ = digits(16, shape=(1, 28, 28))
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 1, 3, padding=1))
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    scaler = GradScaler(init_scale=2.0, max_scale=2.0, growth_interval=1)

    def step():
        optimizer.zero_grad()
        with autocast():
            loss = 1e-4 * F.mse_loss(model(x), x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return parts(step, model, optimizer, scaler)


class Standardise(nn.Module):
    """Batch normalisation by hand, under names of its own."""

    def __init__(self, n, variance):
        super().__init__()
        self.register_buffer("average_variance", minamp.full((n,), variance))
        self.register_buffer("largest_seen", minamp.full((1,), float("nan")))  # until the first batch
        self.register_buffer("mask", minamp.full((n, n), float("-inf")).triu(1))

    def forward(self, h):
        h = h.float()
        variance = h.var(dim=0, unbiased=False)
        with minamp.no_grad():
            self.average_variance.mul_(0.9).add_(0.1 * variance.detach())
            self.largest_seen.copy_(h.detach().abs().max().reshape(1))
        return (h - h.mean(0)) / (variance + 1e-5).sqrt()


class Standardised(Trainer):
    variance = 1.0

    def network(self):
        return nn.Sequential(nn.Linear(784, 32), Standardise(32, self.variance), nn.ReLU(), nn.Linear(32, 10))


@broken("op_without_policy")
def a_function_of_which_only_the_backward_knows_autocast():
    """The error that ends the step is of Python, about an attribute of ctx."""

    class Product(Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        @minamp.custom_bwd(device_type="cuda")
        def backward(ctx, g):
            a, b = ctx.saved_tensors
            return g @ b.T, a.T @ g

    class T(Trainer):
        def forward(self):
            first, relu, last = self.model
            with autocast():
                return F.cross_entropy(Product.apply(relu(first(self.x)), last.weight.T), self.y)

    return T().parts()


@broken("batchnorm_nan")
def statistics_of_a_layer_of_ones_own():
    class T(Standardised):
        variance = float("nan")

    return T().parts()


@healthy
def buffers_of_nan_and_infinities_that_are_no_statistics():
    return Standardised().parts()


# -------------------------------------------------------------------------------- several optimizers, no optimizer, no model


class Several(Trainer):
    """Three networks on the same digits, an optimizer each, one backward."""

    early = None  # which of them is clipped before it is unscaled

    def __init__(self):
        self.models = [mlp(784, 24, 10) for _ in range(3)]
        self.optimizers = [optim.SGD(m.parameters(), lr=0.05) for m in self.models]
        self.scaler = GradScaler(init_scale=1024.0)
        self.x, self.y = self.data()

    def train_step(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        with autocast():
            loss = sum(F.cross_entropy(m(self.x), self.y) for m in self.models)
        self.scaler.scale(loss).backward()
        for i, optimizer in enumerate(self.optimizers):
            self.apply(i, self.models[i], optimizer)
        self.update()
        return loss.item()

    def apply(self, i, model, optimizer):
        if i != self.early:
            self.scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.1)
        self.scaler.step(optimizer)

    def update(self):
        self.scaler.update()

    def parts(self):
        return parts(self.train_step, self.models, self.optimizers, self.scaler)


@healthy
def each_optimizer_is_unscaled_clipped_and_stepped_in_turn():
    return Several().parts()


@healthy
def each_network_is_unscaled_by_hand_clipped_and_stepped_in_turn():
    class T(Several):
        def apply(self, i, model, optimizer):
            for p in model.parameters():
                p.grad.mul_(1.0 / self.scaler.get_scale())
            clip_grad_norm_(model.parameters(), 0.1)
            if all(p.grad.isfinite().all() for p in model.parameters()):
                optimizer.step()

        def update(self):
            pass

    return T().parts()


@broken("clip_before_unscale")
def the_second_of_three_is_clipped_too_early():
    class T(Several):
        early = 1

    return T().parts()


@healthy
def optimizers_of_copies_that_are_made_in_the_step():
    """Federated averaging: an update after every client, whose gradients were made with the new scale."""
    x, y = digits(32)
    model, scaler = mlp(784, 24, 10), GradScaler()

    def step():
        states = []
        for part in range(2):
            client = copy.deepcopy(model)
            optimizer = optim.SGD(client.parameters(), lr=0.05)
            with autocast():
                loss = F.cross_entropy(client(x[part::2]), y[part::2])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            states.append(client.state_dict())
        model.load_state_dict({name: (states[0][name] + states[1][name]) / 2 for name in states[0]})
        return loss.item()

    return parts(step, model, scaler=scaler)


def functional(descend, dtype=minamp.float32):
    """Two matrices in a dict, that only the step knows; descend(weights) does the update."""
    x, y = digits(32)
    weights = {"in": minamp.randn(784, 24) * 0.03, "out": minamp.randn(24, 10) * 0.2}
    weights = {name: w.to(dtype).requires_grad_() for name, w in weights.items()}

    def step():
        with autocast(dtype=minamp.bfloat16):
            loss = F.cross_entropy(F.relu(x @ weights["in"]) @ weights["out"], y)
        loss.backward()
        descend(weights.values())
        return loss.item()

    return parts(step, model=[])


def descent(weights):
    for w in weights:
        w.data -= 1e-4 * w.grad
        w.grad = None


@healthy
def weights_that_only_the_step_knows():
    return functional(descent)


@broken("updates_swamped")
def half_weights_that_only_the_step_knows():
    return functional(descent, minamp.bfloat16)


@broken("zero_grad_missing")
def gradients_that_only_the_step_knows():
    def descend(weights):
        for w in weights:
            w.data -= 1e-4 * w.grad

    return functional(descend)


def root_of(moments, root):
    def descend(weights):
        with minamp.no_grad():
            for i, w in enumerate(weights):
                v = moments.setdefault(i, minamp.zeros(*w.shape, dtype=float16))
                v += w.grad.half() ** 2
                w -= 1e-3 * w.grad / root(v)
                w.grad = None

    return functional(descend)


@broken("adam_in_half")
def a_sum_of_squares_with_its_eps_under_the_root():
    return root_of({}, lambda v: (v + 1e-10).sqrt())


@broken("adam_in_half")
def a_sum_of_squares_to_the_power_of_a_half():
    return root_of({}, lambda v: v**0.5 + 1e-4)


# ----------------------------------------------------------------------------------------- gradients that are 0 but for rounding


class LowScale(Trainer):
    """No flushed gradient that means anything, at a scale of 1."""

    def make_scaler(self):
        return GradScaler(init_scale=1.0)


@healthy
def biases_that_a_batch_norm_takes_out_again():
    class T(LowScale):
        def data(self):
            return digits(16, shape=(1, 28, 28))

        def network(self):
            convolution = nn.Conv2d(1, 8, 5, stride=4), nn.BatchNorm2d(8), nn.ReLU()
            return nn.Sequential(*convolution, nn.Flatten(), nn.Linear(8 * 36, 10))

    return T().parts()


@healthy
def the_bias_of_keys_that_softmax_takes_out_again():
    class T(WithAKeyBias):
        scale = 1.0

    return T().parts()


# ----------------------------------------------------------------------------------------- classes and contexts of one's own


class Logging(GradScaler):
    """Tells somebody of its calls, with signatures of its own."""

    def scale(self, *outputs, **options):
        return super().scale(*outputs, **options)

    def step(self, opt, model=None, limit=None):
        if limit is not None:
            self.unscale_(optimizer=opt)
            clip_grad_norm_(model.parameters(), limit)
        return super().step(opt)

    def update(self):
        return super().update()


class Logged(Trainer):
    def make_scaler(self):
        return Logging()

    def train_step(self):
        self.optimizer.zero_grad()
        loss = self.forward()
        self.scaler.scale(loss).backward()
        self.scaler.step(model=self.model, limit=1.0, opt=self.optimizer)
        self.scaler.update()
        return loss.item()


@healthy
def a_scaler_with_signatures_of_its_own():
    return Logged().parts()


@broken("clip_before_unscale")
def a_scaler_of_ones_own_that_clips_first():
    class Hasty(Logging):
        def step(self, opt, **options):
            clip_grad_norm_(options["model"].parameters(), options["limit"])
            return super().step(opt=opt)

    class T(Logged):
        def make_scaler(self):
            return Hasty()

    return T().parts()


@healthy
def a_scaler_that_is_pickled_after_every_step():
    class T(Trainer):
        def train_step(self):
            if isinstance(self.scaler, bytes):
                self.scaler = pickle.loads(self.scaler)
            loss = super().train_step()
            self.scaler = pickle.dumps(self.scaler)
            return loss

        def make_scaler(self):
            return pickle.dumps(GradScaler())

        def parts(self):
            return parts(self.train_step, self.model, self.optimizer)

    return T().parts()


@broken("zero_grad_missing")
def an_optimizer_inside_an_object_that_passes_everything_on():
    class Passing:
        def __init__(self, optimizer):
            self.optimizer = optimizer

        def __getattr__(self, name):
            return getattr(self.__dict__["optimizer"], name)

        def step(self):
            return self.optimizer.step()

    class T(Trainer):
        def train_step(self):
            loss = self.forward()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.passing)
            self.scaler.update()
            return loss.item()

        def parts(self):
            self.passing = Passing(self.optimizer)
            return parts(self.train_step, self.model, self.passing, self.scaler)

    return T().parts()


class Two(Trainer):
    """An optimizer of the first layer, whose class `kind` gives, and one of the others."""

    def __init__(self):
        super().__init__()
        first, *later = self.model
        self.others = optim.SGD(nn.Sequential(*later).parameters(), lr=self.lr)
        self.optimizer = self.kind()(first.parameters(), lr=self.lr)

    def train_step(self):
        self.others.zero_grad()
        return super().train_step()

    def parts(self):
        return parts(self.train_step, self.model, [self.optimizer, self.others], self.scaler)


@broken("raw_optimizer_step")
def an_optimizer_that_steps_another():
    class T(Two):
        def kind(self):
            class Both(optim.SGD):
                def step(both, closure=None):
                    self.others.step()
                    return super().step()

            return Both

    return T().parts()


@healthy
def an_optimizer_that_steps_those_it_consists_of():
    class All(optim.Optimizer):
        def __init__(self, *optimizers):
            super().__init__([p for o in optimizers for g in o.param_groups for p in g["params"]], {})
            self.optimizers = optimizers

        def step(self, closure=None):
            return all([o.step() for o in self.optimizers])

    class T(Two):
        def kind(self):
            return lambda weights, lr: All(optim.Adam(weights, lr=1e-3), self.others)

    return T().parts()


@healthy
def a_function_that_computes_its_forward_again():
    class T(Trainer):
        def network(self):
            first, *self.later = super().network()
            return nn.ModuleList([first, *self.later])

        def forward(self):
            first, *later = self.model

            class Again(Function):
                @staticmethod
                @minamp.custom_fwd(device_type="cuda")
                def forward(ctx, x, *weights):
                    ctx.save_for_backward(x)
                    return first(x)

                @staticmethod
                @minamp.custom_bwd(device_type="cuda")
                def backward(ctx, g):
                    with minamp.enable_grad():
                        h = first(*ctx.saved_tensors)
                    return None, *grad(h, list(first.parameters()), g)

            with autocast(dtype=self.dtype):
                h = Again.apply(self.x, *first.parameters())
                for layer in later:
                    h = layer(h)
                return F.cross_entropy(h, self.y)

    return T().parts()


def a_hook_with_a_limit_of_a_tenth(times):
    class T(Scaled):
        def network(self):
            model = super().network()
            for p in model.parameters():
                p.register_hook(lambda g: g.clamp(-0.1 * times(self), 0.1 * times(self)))
            return model

    return T().parts()


@broken("clip_before_unscale")
def a_hook_whose_limit_no_format_holds():
    return a_hook_with_a_limit_of_a_tenth(lambda trainer: 1.0)


@healthy
def a_hook_whose_limit_is_scaled_too():
    return a_hook_with_a_limit_of_a_tenth(lambda trainer: trainer.scaler.get_scale())


# ------------------------------------------------------------------------------------------------- training without an optimizer


def by_hand(update, factor=None):
    """A network whose gradients update(name, weight, gradient, scale) uses; they come from grad where a factor is given."""
    x, y = digits(32)
    model = mlp(784, 16, 10)
    names, weights = zip(*model.named_parameters(), strict=True)
    scaler = GradScaler(init_scale=1024.0)

    def step():
        model.zero_grad()
        with autocast():
            loss = F.cross_entropy(model(x), y)
        if factor is None:
            scaler.scale(loss).backward()
            gradients, scale = [p.grad for p in weights], scaler.get_scale()
        else:
            gradients, scale = grad(loss * factor, weights), factor
        with minamp.no_grad():
            for name, p, g in zip(names, weights, gradients, strict=True):
                update(name, p, g, scale)
        return loss.item()

    return parts(step, model, scaler=scaler if factor is None else None)


def momentum(divide, rate=0.05):
    velocity = {}

    def update(name, p, g, scale):
        g = g.numpy() / (scale if divide else 1.0)
        velocity[name] = 0.9 * velocity.get(name, 0.0) + g
        p.data.numpy()[...] -= rate * velocity[name]

    return update


@broken("raw_optimizer_step")
def momentum_of_scaled_gradients_in_numpy():
    return by_hand(momentum(divide=False))


@broken("raw_optimizer_step")
def momentum_of_gradients_that_are_in_no_grad():
    return by_hand(momentum(divide=False), factor=1024.0)


@healthy
def momentum_of_unscaled_gradients_in_numpy():
    return by_hand(momentum(divide=True))


@healthy
def momentum_of_unscaled_gradients_that_are_in_no_grad():
    return by_hand(momentum(divide=True), factor=1024.0)


@healthy
def descent_by_hand_at_a_rate_of_two():
    return by_hand(lambda name, p, g, scale: p.sub_(2.0 / scale * g))


@healthy
def a_loss_of_the_weight_64():
    return by_hand(lambda name, p, g, scale: p.sub_(0.01 * g), factor=64.0)


@healthy
def descent_by_the_signs_of_scaled_gradients():
    return by_hand(lambda name, p, g, scale: p.sub_(1e-3 * g.sign()))


@broken("adam_in_half")
def a_root_of_half_squares_of_what_grad_gave():
    squares = {}

    def update(name, p, g, scale):
        v = squares.setdefault(name, minamp.zeros(*p.shape, dtype=float16))
        v.add_((g / scale).square().half())
        p.sub_(1e-3 * (g / scale) / (v.sqrt() + 1e-3).float())

    return by_hand(update, factor=256.0)


class TimesANumber(Trainer):
    """An optimizer, and a loss multiplied by 4,096; divide() is between backward and step."""

    def make_scaler(self):
        return None

    def divide(self, gradients):
        pass

    def train_step(self):
        self.optimizer.zero_grad()
        loss = self.forward()
        (loss * 4096.0).backward()
        self.divide([p.grad for p in self.model.parameters()])
        self.optimizer.step()
        return loss.item()


@broken("raw_optimizer_step")
def a_scale_by_hand_that_nothing_takes_out():
    return TimesANumber().parts()


@healthy
def a_scale_by_hand_taken_out_after_clipping_by_it():
    class T(TimesANumber):
        def divide(self, gradients):
            clip_grad_norm_(self.model.parameters(), 0.1 * 4096.0)
            for g in gradients:
                g /= 4096.0

    return T().parts()


@healthy
def a_scale_by_hand_taken_out_by_the_rate():
    class T(TimesANumber):
        lr = Trainer.lr / 4096.0

    return T().parts()


class Halved(Trainer):
    """A half network whose weights are kept in float32 as well, by hand; keep() makes what is kept, moved() moves it."""

    def network(self):
        return mlp(784, 48, 10).half()

    def __init__(self):
        super().__init__()
        self.weights = list(self.model.parameters())
        self.kept = self.keep()

    def keep(self):
        return [p.detach().float() for p in self.weights]

    def moved(self):
        for master, p in zip(self.kept, self.weights, strict=True):
            master.sub_(p.grad.float() * 1e-5)
            yield master

    def train_step(self):
        self.model.zero_grad()
        loss = F.cross_entropy(self.model(self.x.half()).float(), self.y)
        loss.backward()
        with minamp.no_grad():
            for new, p in zip(self.moved(), self.weights, strict=True):
                p.copy_(new)
        return loss.item()

    def parts(self):
        return parts(self.train_step, self.model)


@healthy
def masters_by_hand():
    return Halved().parts()


@healthy
def masters_in_one_long_vector():
    class T(Halved):
        def keep(self):
            return np.concatenate([p.detach().numpy().ravel().astype(np.float32) for p in self.weights])

        def moved(self):
            self.kept -= 1e-5 * np.concatenate([p.grad.numpy().ravel() for p in self.weights])
            ends = np.cumsum([p.numel() for p in self.weights])
            for part, p in zip(np.split(self.kept, ends[:-1]), self.weights, strict=True):
                yield minamp.tensor(part.reshape(p.shape))

    return T().parts()


@broken("updates_swamped")
def float_copies_that_live_for_one_step():
    class T(Halved):
        def moved(self):
            for p in self.weights:
                yield p.detach().float() - p.grad.float() * 1e-5

    return T().parts()


# --------------------------------------------------------------------------------------------------- suspected without a reason


@healthy
def probabilities_kept_from_zero():
    """A focal loss and an entropy, each with a constant under its logarithm."""

    class T(Trainer):
        def forward(self):
            with autocast():
                p = self.model(self.x).softmax(-1)
                right = p.gather(1, self.y.reshape(-1, 1))
                entropy = -(p * (p + 1e-8).log()).sum(-1).mean()
                return -((1 - right) ** 2 * right.clamp(min=1e-7).log()).mean() - 0.01 * entropy

    return T().parts()


@healthy
def probabilities_kept_from_zero_of_what_is_wrong():
    class T(Trainer):
        def forward(self):
            with autocast():
                z = self.model(self.x) - 1000.0 * F.one_hot((self.y + 1) % 10, 10).float()
                return F.nll_loss((F.softmax(z, -1) + 1e-8).log(), self.y)

    return T().parts()


class Unlearnt(Trainer):
    """A wrong answer that is sure: its probability is far below the constant that is added, and so is its gradient."""

    def forward(self):
        with autocast():
            z = self.model(self.x) - 100.0 * F.one_hot(self.y, 10).float()
            p = F.softmax(z, dim=-1).gather(1, self.y.reshape(-1, 1))
            return -(p + 1e-8).log().mean()


@broken("log_of_softmax")
def a_probability_far_below_its_constant():
    return Unlearnt().parts()


@healthy
def float32_training_with_a_validation_in_half():
    class T(Trainer):
        def train_step(self):
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(self.x), self.y)
            loss.backward()
            self.optimizer.step()
            with minamp.no_grad(), autocast():
                self.seen = F.cross_entropy(self.model(self.x), self.y).item()
            return loss.item()

        def make_scaler(self):
            return None

    return T().parts()


class ManyTerms(HalfTrainer):
    """100,000 half values added up and divided: `size` is that of each."""

    size = 0.1

    def forward(self):
        z = self.model(self.x.half())
        rest = minamp.full((100_000,), self.size, dtype=float16) + 0.0 * z[0, 0]
        return F.cross_entropy(z.float(), self.y) + 0.01 * (rest.sum() / 100_000).float()


@healthy
def a_sum_of_many_small_terms():
    return ManyTerms().parts()


# ------------------------------------------------------------------------------------------------------------------ the tests


BROKEN |= loops.BROKEN | ported.BROKEN
HEALTHY |= loops.HEALTHY | ported.HEALTHY


def test_of_several_models_the_ill_one_is_named():
    models = [mlp(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))]
    models[1][1].running_mean.fill_(float("inf"))
    x = minamp.randn(8, 4)
    report = minamp.doctor(lambda: models[1](models[0](x)).square().mean().backward(), models)
    assert [(f.code, f.where) for f in report] == [("batchnorm_nan", "model[1].1.running_mean")]


def examine(it):
    return minamp.doctor(it["step"], it["model"], it["optimizer"], it["scaler"])


@pytest.mark.parametrize("name", BROKEN)
def test_the_fault_is_the_first_finding(name):
    minamp.manual_seed(0)
    code, build = BROKEN[name]
    report = examine(build())
    assert [f.code for f in report][:1] == [code], told(report)
    first = report[0]
    assert first.what and first.where and first.evidence and first.repair


def test_a_clip_to_one_over_the_scale_is_no_division():
    report = examine(ported.BROKEN["clipped_in_every_micro_batch_to_what_they_have"][1]())
    assert [f.code for f in report] == ["clip_before_unscale"], told(report)


def test_statistics_of_a_model_that_was_not_handed_over_are_not_counted():
    finding = examine(ported.BROKEN["a_teacher_that_nobody_has_handed_over"][1]())[0]
    assert finding.evidence == {"op": "batch_norm"} and "hold inf or nan" in finding.what


def test_a_step_that_ruins_its_weights_in_numpy_is_told_in_the_advice():
    """The doctor sees no ops there, and so it has no finding."""

    class T(Trainer):
        def train_step(self):
            loss = super().train_step()
            self.model[0].weight.detach().numpy()[0, 0] = np.inf
            return loss

    it = T().parts()
    assert "leaves inf or nan in parameters" in examine(it).advice.text
    assert "leaves inf or nan in parameters" not in examine(Trainer().parts()).advice.text


@pytest.mark.parametrize("name", ported.REPAIRS)
def test_a_repair_of_another_kind(name):
    minamp.manual_seed(0)
    _, build = BROKEN[name]
    assert ported.REPAIRS[name] in examine(build())[0].repair


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_found_where_nothing_is_wrong(name):
    minamp.manual_seed(0)
    report = examine(HEALTHY[name]())
    assert list(report) == [], told(report)


@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_healthy_goes_on_as_if_never_examined(name):
    ends = []
    for examined in (True, False):
        minamp.manual_seed(0)
        it = HEALTHY[name]()
        if examined:
            examine(it)
        losses = [it["step"]() for _ in range(3)]
        models = it["model"] if isinstance(it["model"], list) else [it["model"]]
        weights = [t.numpy().tobytes() for m in models for t in m.state_dict().values()]
        ends.append((repr(losses), weights, repr(minamp.get_rng_state())))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("name", loops.HEALTHY)
def test_what_is_healthy_learns(name):
    minamp.manual_seed(0)
    it = loops.HEALTHY[name]()
    losses = [it["step"]() for _ in range(5)]
    assert np.isfinite(losses).all() and losses[-1] < losses[0]


def test_what_is_undefined_does_not_leave_the_range():
    x = minamp.zeros(4, 4).requires_grad_(True)
    report = minamp.doctor(lambda: (x.half() / (x.half() * 0.0)).float().sum().backward())
    assert "is undefined there" in report[0].what and "range" not in report[0].what


def first(build):
    minamp.manual_seed(0)
    return examine(build())[0]


class Twice(Trainer):
    def train_step(self):
        loss = super().train_step()
        self.scaler.update()
        return loss


def test_an_update_with_nothing_to_judge_is_no_matter_of_several_optimizers():
    assert "nothing has been stepped" in first(lambda: Twice().parts()).what


class Tiny(Trainer):
    """bfloat16 weights and so small a rate that none of them moves."""

    def __init__(self):
        super().__init__()
        self.optimizer, self.scaler = optim.AdamW(self.model.parameters(), lr=1e-7), None

    def network(self):
        return mlp(784, 48, 10).bfloat16()

    def train_step(self):
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(self.x.bfloat16()).float(), self.y).backward()
        self.optimizer.step()


def test_the_repair_keeps_the_optimizer():
    finding = first(lambda: Tiny().parts())
    assert finding.code == "updates_swamped" and finding.repair.startswith("optim.AdamW(")


class Rooted(Tiny):
    """Its update takes a root of half squares."""

    def train_step(self):
        self.model.zero_grad()
        F.cross_entropy(self.model(self.x.bfloat16()).float(), self.y).backward()
        for p in self.model.parameters():
            p.data -= 1e-2 * p.grad / ((p.grad * p.grad) ** 0.5 + 1e-3)


def test_what_bfloat16_does_to_a_second_moment_is_not_what_float16_does():
    finding = first(lambda: Rooted().parts())
    assert finding.code == "adam_in_half" and "rounds back to v" in finding.what
    v = minamp.linspace(1.0, 2.0, 129).bfloat16()
    assert (v * 0.999).equal(v)


class DividedByHand(Trainer):
    """A constant scale, taken out of the gradients after every micro-batch."""

    def train_step(self):
        self.optimizer.zero_grad()
        for part in range(2):
            with autocast():
                loss = F.cross_entropy(self.model(self.x[part::2]), self.y[part::2])
            (512.0 * loss).backward()
            for p in self.model.parameters():
                p.grad.mul_(1 / 512.0)
        self.optimizer.step()


def test_the_line_that_divides_too_often_is_named():
    finding = first(lambda: DividedByHand().parts())
    assert finding.code == "unscale_every_micro_batch" and "p.grad.mul_" in finding.where
    assert "scaler" not in finding.repair


def test_a_cast_that_overflows_is_called_a_cast():
    class T(Trainer):
        def data(self):
            x, y = digits(32)
            return 1e6 * x, y

    finding = first(lambda: T().parts())
    assert finding.code == "forward_overflow" and finding.what.startswith("A cast makes")


def test_one_value_and_float32_are_not_several_and_float64():
    bn = nn.BatchNorm1d(784)
    bn.running_mean[3] = float("nan")

    class T(Trainer):
        def network(self):
            return nn.Sequential(bn, *mlp(784, 48, 10))

    class Wide(Trainer):
        def forward(self):
            first, relu, last = self.model
            with autocast():
                return F.cross_entropy(last(relu(first(self.x) * minamp.linspace(0.5, 1.5, 48))), self.y)

    assert "1 value that is" in first(lambda: T().parts()).what
    finding = first(lambda: Wide().parts())
    assert finding.code == "widened_by_scalar" and "float64" not in finding.what


def test_a_step_whose_weights_nobody_knows_ran_through():
    it = optimizers_of_copies_that_are_made_in_the_step()
    assert "gave no parameter a gradient" in examine(it).advice.text


class Added(nn.Module):
    """A linear layer by hand."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(0.2 * minamp.randn(16, 32)), nn.Parameter(minamp.zeros(32))

    def forward(self, x):
        return x @ self.weight + self.bias


@pytest.mark.parametrize("layer", [lambda: nn.Linear(16, 32), lambda: nn.Conv1d(16, 32, 1), Added])
def test_a_bias_before_a_batch_norm_has_a_gradient_of_rounding(layer):
    minamp.manual_seed(0)
    layer = layer()
    model = nn.Sequential(layer, nn.Flatten(), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
    x, y = 1000.0 * minamp.randn(32, 16), minamp.randn(32, 1)
    x = x.unsqueeze(-1) if isinstance(layer, nn.Conv1d) else x
    optimizer, scaler = optim.SGD(model.parameters(), lr=0.1), GradScaler(init_scale=64.0)

    def step():
        optimizer.zero_grad()
        with autocast():
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    report = minamp.doctor(step, model, optimizer, scaler)
    assert list(report) == [], told(report)


# --------------------------------------------------------------------------------------------------------------------- the words


def test_a_loss_in_half_inside_the_region_is_not_sent_there():
    class T(Trainer):
        def forward(self):
            with autocast():
                return (self.model(self.x) - 1.0).abs().mean()

    assert "inside the autocast region" not in first(lambda: T().parts()).repair


@pytest.mark.parametrize(
    "build, repair",
    [
        (attention_times_one_over_its_sum, "F.softmax(scores.float(), dim=-1)"),
        (log_softmax_written_out, "F.cross_entropy(logits.float(), target)"),
    ],
)
def test_a_softmax_is_repaired_by_what_it_is(build, repair):
    assert first(build).repair.startswith(repair)


def test_a_mask_made_of_ones_is_named_by_its_constant():
    found = first(a_large_number_subtracted_from_what_is_masked)
    assert found.evidence["constant"] == 1e30 and "makes inf of" in found.what


def test_a_lower_limit_is_added_to_nothing():
    assert "lower limit" in first(a_lower_limit_that_is_zero).what


def test_a_sum_of_sums_counts_all_its_terms():
    assert first(a_sum_of_sums).evidence["terms"] == 78400


def test_without_a_scaler_no_scaler_is_in_the_repair():
    w = minamp.ones(4, 4).requires_grad_(True)

    def step():
        with autocast(dtype=minamp.bfloat16):
            (w @ w).float().sum().backward()

    assert minamp.doctor(step)[0].repair.startswith("loss.backward()")


def test_a_hook_is_not_sent_before_the_clipping():
    assert "not in a hook" in first(a_hook_that_clamps).repair
    assert "not in a hook" in first(a_hook_that_limits_the_norm).repair


def test_where_numbers_of_numpy_are_written_by_an_op():
    class T(Scaled):
        def before_step(self):
            gradients = [p.grad for p in self.model.parameters()]
            norm = np.sqrt(sum(float((g.numpy().astype(np.float64) ** 2).sum()) for g in gradients))
            for g in gradients:
                g.mul_(float(0.25 / norm))

    found = first(lambda: T().parts())
    assert found.code == "clip_before_unscale" and found.where.endswith("g.mul_(float(0.25 / norm))")
    assert "in finite: " in first(infinite_gradients_replaced_by_zero).where


def test_an_update_is_missing_after_the_step_and_not_where_it_is_missed():
    class T(Trainer):
        def train_step(self):
            self.optimizer.zero_grad()
            self.scaler.scale(self.forward()).backward()
            self.scaler.unscale_(self.optimizer)
            self.scaler.step(self.optimizer)

    assert first(lambda: T().parts()).where.endswith("self.scaler.step(self.optimizer)")


@pytest.mark.parametrize("unscaled", [True, False])
def test_a_raw_step_on_unscaled_gradients_only_lacks_the_skip(unscaled):
    class T(Trainer):
        def train_step(self):
            self.optimizer.zero_grad()
            self.scaler.scale(self.forward()).backward()
            if unscaled:
                self.scaler.unscale_(self.optimizer)
            self.optimizer.step()

    found = first(lambda: T().parts())
    assert found.code == "raw_optimizer_step" and ("divides the gradients" in found.what) is not unscaled


def test_weights_that_are_nan_already_are_said():
    model = mlp(4, 4, 4)
    model[2].bias.data[1] = float("nan")
    report = minamp.doctor(lambda: model(minamp.ones(2, 4)).sum().backward(), model)
    assert "1 of 4 parameters hold inf or nan before the step, 2.bias first" in report.advice.text


def test_a_step_without_gradients_is_not_said_to_have_failed():
    w = minamp.ones(4, 4)
    assert "did not run through" not in str(minamp.doctor(lambda: w @ w))


def test_a_scale_of_which_nothing_is_known_is_no_evidence():
    class T(Trainer):
        def forward(self):
            loss = super().forward().float()
            return loss + (loss - loss).pow(2).sqrt()  # the root's slope at 0 is inf

    found = first(lambda: T().parts())
    assert (
        found.code == "scale_pinned"
        and found.evidence["falls"] == 2
        and "largest_allowed" not in found.evidence
    )


def test_a_region_that_is_never_left():
    class T(Trainer):
        def forward(self):
            autocast(dtype=float16).__enter__()
            return F.cross_entropy(self.model(self.x), self.y)

    assert first(lambda: T().parts()).code == "backward_in_autocast"
    assert not minamp.is_autocast_enabled()


def test_an_error_comes_before_a_warning():
    class T(Trainer):
        def forward(self):
            with autocast():
                h = self.model(self.x)
                mask = minamp.zeros(10).half()
                mask[3:] = 1.0
                return -F.softmax(h + mask * -1e5, -1).log()[:, 0].mean()

    minamp.manual_seed(0)
    report = examine(T().parts())
    assert [(f.code, f.severity) for f in report] == [
        ("mask_overflows", "error"),
        ("log_of_softmax", "warning"),
    ]


class Product(Function):
    """A product that knows nothing of autocast."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return g.to(b.dtype) @ b.t(), a.t() @ g.to(a.dtype)


class Ill(Trainer):
    """Whatever is in `faults` is done wrong."""

    def __init__(self, *faults):
        self.faults = faults
        super().__init__()
        self.constant = minamp.tensor(np.ones(48, np.float32))

    def forward(self):
        first, relu, last = self.model
        with autocast():
            h = relu(first(self.x))
            if "forward_overflow" in self.faults:
                h = relu(first(self.x * 1e6))
            if "widened_by_scalar" in self.faults:
                h = h * self.constant
            z = Product.apply(h, last.weight.t()) if "op_without_policy" in self.faults else last(h)
        if "softmax_in_half" in self.faults:
            return F.mse_loss(F.softmax(z, -1).float(), F.one_hot(self.y, 10).float())
        return F.cross_entropy(z.float(), self.y)

    def train_step(self):
        if "zero_grad_missing" not in self.faults:
            self.optimizer.zero_grad()
        self.scaler.scale(self.forward()).backward()
        if "raw_optimizer_step" in self.faults:
            return self.optimizer.step()
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        if "update_forgotten" not in self.faults:
            self.scaler.update()


@pytest.mark.parametrize(
    "faults",
    [
        (),
        ("softmax_in_half", "forward_overflow"),
        ("raw_optimizer_step", "forward_overflow"),
        ("update_forgotten", "zero_grad_missing"),
        ("op_without_policy", "widened_by_scalar"),
        ("softmax_in_half", "raw_optimizer_step", "zero_grad_missing"),
    ],
)
def test_faults_that_have_nothing_to_do_with_each_other_are_all_found(faults):
    minamp.manual_seed(0)
    report = examine(Ill(*faults).parts())
    assert [f.code for f in report] == list(faults), told(report)


def test_one_is_not_several():
    class T(Trainer):
        def network(self):
            model = super().network()
            model[0].weight.data = model[0].weight.data.half()
            return model

        def forward(self):
            return F.cross_entropy(
                self.model[2](self.model[1](self.x @ self.model[0].weight.float().t())), self.y
            )

    assert first(lambda: T().parts()).what.startswith("1 parameter is float16")


def test_the_line_of_a_hook_is_named():
    assert "g * (1.0 / g.norm().item())" in first(a_hook_that_limits_the_norm).where


def test_where_half_weights_are_written_from_numpy():
    class T(Halved):
        def moved(self):
            for p in self.weights:
                yield minamp.tensor(p.detach().numpy() - 1e-5 * p.grad.numpy()).half()

    assert "p.copy_(new)" in first(lambda: T().parts()).where


def test_a_state_is_loaded_again_where_it_is_loaded():
    assert first(the_state_of_the_start_loaded_again).where.endswith("load_state_dict(self.start)")


def test_the_repair_of_a_descent_by_hand_divides_by_what_was_multiplied():
    assert first(momentum_of_scaled_gradients_in_numpy).repair.endswith("p.grad / scaler.get_scale()")
    assert first(momentum_of_gradients_that_are_in_no_grad).repair.endswith("p.grad / 1024")


def test_what_is_left_in_gradients_from_a_larger_scale_is_no_fall():
    class T(Trainer):
        def make_scaler(self):
            return GradScaler(init_scale=2.0**20)

        def train_step(self):
            loss = self.forward()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    minamp.manual_seed(0)
    report = examine(T().parts())
    assert [f.code for f in report] == ["zero_grad_missing"], told(report)


def test_a_floor_under_a_logarithm_gives_no_nan():
    said = first(lambda: Unlearnt().parts()).what
    assert "below the 1e-08 that keeps it from 0 the gradient vanishes" in said and "nan" not in said


def test_a_finite_sum_is_not_said_to_be_infinite():
    class T(ManyTerms):
        def forward(self):
            z = self.model(self.x.half())
            rest = minamp.tensor([1.0, -1.0] * 50_000).half() + 0.0 * z[0, 0]
            return F.cross_entropy(z.float(), self.y) + 0.01 * (rest.sum() / 100_000).float()

    found = first(lambda: T().parts())
    assert (found.code, found.severity) == ("mean_of_too_many", "warning")
    assert "infinite where their average reaches 0.66" in found.what


@pytest.mark.parametrize("temperature", [0.01, 1.0])
def test_a_ratio_of_exponentials_is_an_error_once_its_gradients_are_not_finite(temperature):
    x, y = digits(16)
    model = mlp(784, 16)

    def step():
        model.zero_grad()
        with autocast():
            z = F.normalize(model(x).float(), dim=-1)
            e = (z @ z.mT).float().div(temperature).exp()
        loss = -(e.diag() / e.sum(dim=1)).log().mean()
        (loss * 256.0).backward()

    minamp.manual_seed(0)
    found = minamp.doctor(step, model)[0]
    assert (found.code, found.severity) == ("log_of_softmax", "error" if temperature < 1 else "warning")
    assert found.evidence["largest_score"] == pytest.approx(1 / temperature, rel=0.01)
    step()
    finite = all(minamp.isfinite(p.grad).all() for p in model.parameters())
    assert finite == (temperature == 1.0)


def test_zero_over_zero_is_repaired_where_it_is_divided():
    class T(Trainer):
        def forward(self):
            loss = super().forward()
            return (loss * minamp.zeros(3)).sum() / minamp.zeros(3).sum()

    found = first(lambda: T().parts())
    assert (found.code, found.severity) == ("forward_overflow", "error")
    assert "undefined" in found.what and found.repair.startswith("x / n.clamp(min=...)   # 0 / 0 is nan")


def test_a_scale_far_too_high_is_not_said_to_be_innocent():
    class T(Trainer):
        def forward(self):
            return 1e6 * super().forward()

    found = first(lambda: T().parts())
    assert (found.code, found.severity) == ("scale_pinned", "warning")
    minamp.manual_seed(0)
    t, skipped = T(), 0
    while t.scaler.get_scale() > found.evidence["largest_allowed"]:
        t.train_step()
        skipped += 1
    assert f"{skipped} steps are skipped" in found.what


def test_a_backoff_factor_near_one_is_what_is_to_be_changed():
    class T(Trainer):
        def make_scaler(self):
            return GradScaler(init_scale=2.0**20, backoff_factor=0.95)

    found = first(lambda: T().parts())
    assert found.repair.startswith("scaler = GradScaler(backoff_factor=0.5)")
    minamp.manual_seed(0)
    t, skipped = T(), 0
    while t.scaler.get_scale() > found.evidence["largest_allowed"]:
        t.train_step()
        skipped += 1
    assert f"comes down slowly: {skipped} steps are skipped" in found.what


def test_advice_where_the_forward_leaves_float16():
    """Of a float32 loop, of which nothing has overflowed yet."""
    model, x = mlp(4, 8, 4), 1e5 * minamp.randn(16, 4)
    report = minamp.doctor(lambda: model(x).square().mean().sqrt().backward(), model)
    said, numbers = str(report.advice), report.advice.numbers
    assert "the forward overflows there, whatever the scale" in said and "GradScaler" not in said
    assert numbers["bfloat16_would_do"] and numbers["largest_in_products"] > 65504


@pytest.mark.parametrize("small, fits", [(1e-12, False), (1e-3, True)])
def test_advice_recommends_no_scale_that_does_not_fit(small, fits):
    heads = nn.ModuleList([nn.Linear(16, 4), nn.Linear(16, 4)])
    x, y = minamp.randn(8, 16), minamp.randint(0, 4, (8,))

    def step():
        (F.cross_entropy(heads[0](x), y) * 1e5 + F.cross_entropy(heads[1](x), y) * small).backward()

    report = minamp.doctor(step, heads)
    said, numbers = str(report.advice), report.advice.numbers
    assert ("starts without a skipped step" in said) is fits is not ("No scale fits" in said)
    assert numbers["bfloat16_would_do"] is not fits


def test_a_step_that_trains_nothing_is_not_said_to_be_well():
    def forgotten():
        yield mlp(4, 4)

    assert "ran no backward() in this thread" in str(minamp.doctor(forgotten))
