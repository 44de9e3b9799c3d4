"""Loops as scripts ported from PyTorch have them: several losses and scalers, logs beside the training, own decisions."""

import copy
import math
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import minamp
import minamp.nn.functional as F
from gallery.loops import MicroBatches
from gallery.parts import Scripts, digits, mlp
from gallery.variations import AttentionTrainer, Trainer
from minamp import GradScaler, autocast, float16, nn, optim
from minamp.autograd import Function, backward, grad
from minamp.nn.utils import clip_grad_norm_

_scripts = Scripts()
BROKEN, HEALTHY, broken, healthy = _scripts.ill, _scripts.well, _scripts.broken, _scripts.healthy


# -------------------------------------------------------------------------------------------- an optimizer past the scaler


class StepsItself(Trainer):
    init_scale = 256.0

    def train_step(self):
        self.optimizer.zero_grad()
        loss = self.forward()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        norm = clip_grad_norm_(self.model.parameters(), 1.0)
        self.step(norm)
        self.scaler.update()
        return loss.item()


@broken("raw_optimizer_step")
def unscaled_clipped_and_stepped_without_a_look():
    """Nothing is wrong with these gradients; the first that overflow will be written into the weights."""

    class T(StepsItself):
        def step(self, norm):
            self.optimizer.step()

    return T().parts()


@healthy
def unscaled_clipped_and_stepped_if_the_norm_is_finite():
    class T(StepsItself):
        def step(self, norm):
            if math.isfinite(norm.item()):
                self.optimizer.step()

    return T().parts()


class Careful(optim.SGD):
    """An optimizer that looks for itself."""

    def step(self):
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        if all(minamp.isfinite(g).all() for g in grads):
            super().step()


@healthy
def unscaled_for_an_optimizer_that_looks_itself():
    class T(StepsItself):
        def __init__(self):
            super().__init__()
            self.optimizer = Careful(self.model.parameters(), lr=0.05)

        def step(self, norm):
            self.optimizer.step()

    return T().parts()


@healthy
def tries_again_until_the_gradients_are_finite():
    class T(StepsItself):
        def train_step(self):
            norm = minamp.tensor(math.inf)
            while not math.isfinite(norm.item()):
                self.optimizer.zero_grad()
                loss = self.forward()
                self.scaler.scale(loss).backward()
                for p in self.model.parameters():
                    p.grad /= self.scaler.get_scale()
                norm = clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.scaler.update(self.scaler.get_scale())
            return loss.item()

    return T().parts()


@healthy
def ends_the_program_where_the_gradients_are_not_finite():
    class T(StepsItself):
        def step(self, norm):
            if not math.isfinite(norm.item()):
                raise SystemExit("diverged")
            self.optimizer.step()

    return T().parts()


@healthy
def a_scaler_that_loads_no_state():
    class Fixed(GradScaler):
        def load_state_dict(self, state):
            raise NotImplementedError

    class T(StepsItself):
        def make_scaler(self):
            return Fixed(init_scale=256.0)

        def step(self, norm):
            if math.isfinite(norm.item()):
                self.optimizer.step()

    return T().parts()


# ---------------------------------------------------------------------------------------------------- losses in other forms


class HalfError(Trainer):
    """A squared error that autocast leaves in half."""

    init_scale = 256.0

    def forward(self):
        with autocast():
            z = self.model(self.x)
            d = z - F.one_hot(self.y, 10).half()
            self.each = (d * d).mean(1)
            return F.cross_entropy(z, self.y)


@broken("loss_in_half")
def a_loss_for_each_sample_weighed_by_backward():
    class T(HalfError):
        def backward(self, loss):
            self.scaler.scale(self.each).backward(minamp.full((len(self.x),), 1 / 32, dtype=float16))

    return T().parts()


@broken("loss_in_half")
def the_second_of_two_losses_given_to_backward():
    class T(HalfError):
        def backward(self, loss):
            backward([self.scaler.scale(loss), self.scaler.scale(self.each.mean())])

    return T().parts()


@broken("loss_in_half")
def gradients_of_a_half_loss_by_grad():
    class T(HalfError):
        def backward(self, loss):
            weights = list(self.model.parameters())
            for p, g in zip(weights, grad(self.scaler.scale(self.each.mean()), weights), strict=True):
                p.grad = g

    return T().parts()


@healthy
def rows_of_a_jacobian_beside_the_loss():
    class T(Trainer):
        def forward(self):
            with autocast():
                z = self.model(self.x)
                loss = F.cross_entropy(z, self.y)
            self.row = grad(z[0, 0], list(self.model.parameters()), retain_graph=True)
            return loss

    return T().parts()


@healthy
def a_gradient_of_ones_own_for_what_lies_within():
    class T(Trainer):
        def forward(self):
            first, *rest = self.model
            with autocast():
                self.within = first(self.x)
                return F.cross_entropy(nn.Sequential(*rest)(self.within), self.y)

        def backward(self, loss):
            own = minamp.full(self.within.shape, 1e-4, dtype=self.within.dtype)
            backward([self.scaler.scale(loss), self.within], [None, own])

    return T().parts()


class MatrixOfLabels(Trainer):
    """Cross entropy in float32, with a matrix of zeros and ones in place of class ids."""

    spread = 1.0  # of the scores

    def make_scaler(self):
        return GradScaler(enabled=False)

    def forward(self):
        p = F.softmax(self.spread * self.model(self.x), dim=1)
        return -(F.one_hot(self.y, 10).float() * minamp.log(p.clamp(1e-7, 1.0))).sum(1).mean()


@broken("log_of_softmax")
def a_matrix_of_labels_and_a_floor_that_bites():
    class T(MatrixOfLabels):
        spread = 400.0

    return T().parts()


@healthy
def a_matrix_of_labels_and_a_floor_that_does_not():
    return MatrixOfLabels().parts()


@healthy
def logarithms_times_large_returns():
    class T(MatrixOfLabels):
        def forward(self):
            chosen = F.softmax(self.model(self.x), dim=1).gather(1, self.y[:, None]).squeeze(1)
            return -((chosen + 1e-8).log() * minamp.full((32,), 100.0)).mean() / 100.0

    return T().parts()


# ---------------------------------------------------------------------------------------------------- what protects from 0


class Divides(AttentionTrainer):
    """Attention whose rows are divided by a sum; `protect` keeps that from 0."""

    def network(self):
        protect = self.protect

        class Attention(super().network().__class__):
            def forward(self, x):
                with autocast(enabled=False):
                    seen = F.relu(self.query(x).half() @ self.key(x).half().mT)
                    total = seen.sum(dim=-1, keepdim=True)
                    seen = seen / protect(total)
                return self.out((seen @ self.value(x)).mean(dim=1))

        return Attention()


@broken("eps_rounds_to_zero")
def a_zero_replaced_by_what_half_rounds_to_zero():
    class T(Divides):
        def protect(self, total):
            return minamp.where(total == 0, 1e-8, total) + 1e-3

    return T().parts()


@broken("eps_rounds_to_zero")
def a_zero_filled_with_what_half_rounds_to_zero():
    class T(Divides):
        def protect(self, total):
            return total.masked_fill(total == 0, 1e-9) + 1e-3

    return T().parts()


@healthy
def a_count_that_happens_to_be_zero():
    class T(Divides):
        def protect(self, total):
            none = (total < 0).sum().half()
            return none + 1.0

    return T().parts()


@healthy
def a_small_number_where_nothing_is_divided():
    class T(Trainer):
        def forward(self):
            first, *rest = self.model
            with autocast():
                h = first(self.x)
                h = minamp.where(h > 0, h, 1e-10).masked_fill(h < -1.0, 1e-9)
                return F.cross_entropy(nn.Sequential(*rest)(h), self.y)

    return T().parts()


# ------------------------------------------------------------------------------------------------------------- by hand


class ByHand:
    """Half weights that the user's own lines change, from what autograd.grad gives."""

    def __init__(self):
        self.x, self.y = digits(32)
        self.model = mlp(784, 48, 10).half()

    def train_step(self):
        weights = list(self.model.parameters())
        loss = F.cross_entropy(self.model(self.x.half()).float(), self.y)
        for p, g in zip(weights, grad(loss, weights), strict=True):
            self.write(p, g)
        return loss.item()

    def parts(self):
        return dict(step=self.train_step, model=self.model, optimizer=None, scaler=None)


@broken("updates_swamped")
def updates_from_grad_that_half_rounds_away():
    class T(ByHand):
        def write(self, p, g):
            with minamp.no_grad():
                p -= 1e-4 * g

    return T().parts()


@healthy
def what_half_rounds_away_kept_beside_it():
    class T(ByHand):
        def __init__(self):
            super().__init__()
            self.rest = {id(p): minamp.zeros_like(p) for p in self.model.parameters()}

        def write(self, p, g):
            with minamp.no_grad():
                meant = p.float() + self.rest[id(p)].float() - 1e-3 * g.float()
                p.copy_(meant)
                self.rest[id(p)].copy_(meant - p.float())

    return T().parts()


@healthy
def masters_in_one_padded_vector():
    class T(ByHand):
        def __init__(self):
            super().__init__()
            total = sum(p.numel() for p in self.model.parameters())
            self.flat, self.at = minamp.zeros(-total % 4096 + total), {}
            for p in self.model.parameters():
                self.at[id(p)] = at = sum(q.numel() for q in self.model.parameters() if id(q) in self.at)
                self.flat[at : at + p.numel()] = p.detach().float().reshape(-1)

        def write(self, p, g):
            with minamp.no_grad():
                master = self.flat[self.at[id(p)] :][: p.numel()]
                master -= 1e-3 * g.float().reshape(-1)
                p.copy_(master.reshape(p.shape))

    return T().parts()


@broken("updates_swamped")
def updates_in_numpy_that_half_rounds_away():
    class T(ByHand):
        def write(self, p, g):
            p.detach().numpy()[...] -= np.float16(1e-3) * g.numpy()

    return T().parts()


# ------------------------------------------------------------------------------------------------ several losses and scalers


class Two(Trainer):
    """Two networks, each with its loss, its optimizer and its scaler."""

    def __init__(self):
        super().__init__()
        self.other = mlp(784, 32, 10)
        self.others = optim.SGD(self.other.parameters(), lr=0.05)
        self.second = GradScaler(init_scale=2.0**12)

    def train_step(self):
        self.optimizer.zero_grad()
        self.others.zero_grad()
        loss = self.forward()
        with autocast():
            also = F.cross_entropy(self.other(self.x), self.y)
        self.scaler.scale(loss).backward()
        self.second.scale(also).backward()
        self.scaler.step(self.optimizer)
        self.second.step(self.others)
        self.scaler.update()
        self.second.update()
        return loss.item()

    def parts(self):
        both, optimizers = [self.model, self.other], [self.optimizer, self.others]
        return dict(step=self.train_step, model=both, optimizer=optimizers, scaler=self.scaler)


@healthy
def one_of_two_scalers_that_comes_down_once():
    class T(Two):
        def __init__(self):
            super().__init__()
            self.second = GradScaler(init_scale=2.0**20)

        init_scale = 64.0

    return T().parts()


class SavesBoth(Two):
    def train_step(self):
        loss = super().train_step()
        with tempfile.TemporaryDirectory() as folder:
            states = {
                "models": [self.model.state_dict(), self.other.state_dict()],
                "optimizers": [self.optimizer.state_dict(), self.others.state_dict()],
                "scalers": [s.state_dict() for s in self.saved()],
            }
            minamp.save(states, Path(folder) / "last")
        return loss


@broken("scaler_not_saved")
def one_of_two_scalers_is_not_saved():
    class T(SavesBoth):
        def saved(self):
            return [self.scaler]

    return T().parts()


@healthy
def both_scalers_are_saved():
    class T(SavesBoth):
        def saved(self):
            return [self.scaler, self.second]

    return T().parts()


@healthy
def a_loss_without_a_scale_before_the_scaled_one():
    """The temperature of a soft actor-critic, or a critic in float32."""

    class T(Trainer):
        def __init__(self):
            super().__init__()
            self.temperature = nn.Parameter(minamp.ones(1))
            self.warming = optim.SGD([self.temperature], lr=0.01)

        def network(self):
            return nn.Sequential(*(layer for _ in range(7) for layer in (nn.Linear(784, 784), nn.Sigmoid())))

        def forward(self):
            with autocast():
                return F.cross_entropy(self.model(self.x)[:, :10], self.y)

        def train_step(self):
            self.warming.zero_grad()
            (self.temperature - 2.0).square().sum().backward()
            self.warming.step()
            return super().train_step()

    return T().parts()


@healthy
def a_float32_critic_without_a_scale_before_the_scaled_loss():
    class T(Trainer):
        def __init__(self):
            super().__init__()
            self.critic = nn.Linear(784, 1)
            self.judging = optim.SGD(self.critic.parameters(), lr=1e-9)

        init_scale = 2.0**20

        def train_step(self):
            self.judging.zero_grad()
            F.mse_loss(self.critic(self.x), 1e5 * self.x[:, 300:301]).backward()
            self.judging.step()
            return super().train_step()

    return T().parts()


# ------------------------------------------------------------------------------------------------------- beside the training


class Logs(Trainer):
    """Numbers for a log, of a tensor that nobody has detached."""

    def __init__(self):
        super().__init__()
        self.log = []

    def forward(self):
        with autocast():
            z = self.model(self.x)
            loss = F.cross_entropy(z, self.y)
        self.log.append(self.number(z).item())
        return loss


@healthy
def the_confidence_for_the_log():
    class T(Logs):
        def number(self, z):
            return z.softmax(1).amax(1).float().mean()

    return T().parts()


@healthy
def a_root_mean_square_for_the_log():
    class T(Logs):
        def number(self, z):
            far = 2000.0 * z
            return (far * far).mean().sqrt()

    return T().parts()


@healthy
def a_share_of_right_answers_for_the_log():
    class T(Logs):
        def number(self, z):
            right = (z.argmax(1) == self.y).half()
            return right.sum().half() / (z.max().half() + 1e-8)

    return T().parts()


@healthy
def a_large_number_for_the_log():
    class T(Logs):
        def number(self, z):
            return (1e6 * z).abs().mean()

    return T().parts()


@healthy
def a_root_mean_square_in_the_shape_of_a_bias():
    class T(Trainer):
        def train_step(self):
            loss = super().train_step()
            with autocast():
                z = self.model(self.x).detach()
            self.spread = (z * z).mean(0).sqrt()
            return loss

    return T().parts()


@healthy
def an_average_of_weights_and_the_rate_in_the_log():
    class T(Trainer):
        def train_step(self):
            loss = super().train_step()
            self.average = self.model.state_dict()
            self.rate = self.optimizer.state_dict()["param_groups"][0]["lr"]
            return loss

    return T().parts()


@healthy
def a_limit_that_is_computed_times_the_scale():
    class T(Trainer):
        def before_step(self):
            clip_grad_norm_(self.model.parameters(), 0.125 * self.scaler.get_scale())

    return T().parts()


@healthy
def a_limit_so_large_that_it_only_measures():
    class T(Trainer):
        def before_step(self):
            self.norm = clip_grad_norm_(self.model.parameters(), 1e10)

    return T().parts()


@healthy
def a_function_whose_backward_only_repeats():
    class AddUp(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.size = x.shape
            return x.sum(1)

        @staticmethod
        def backward(ctx, g):
            return g.unsqueeze(1).expand(*ctx.size)

    class T(Trainer):
        def forward(self):
            with autocast():
                z = self.model(self.x)
                return F.cross_entropy(z, self.y) + 1e-3 * AddUp.apply(z).square().mean()

    return T().parts()


# -------------------------------------------------------------------------------------------------------- more of each kind


@broken("update_forgotten")
def updated_between_the_clipping_and_the_step():
    class T(StepsItself):
        def train_step(self):
            self.optimizer.zero_grad()
            self.backward(self.forward())
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.update()
            self.scaler.step(self.optimizer)

    return T().parts()


@broken("mean_of_too_many")
def two_sums_added_and_divided():
    """Total variation, by the book: both sums are half, and so is theirs."""
    image = minamp.tensor(np.random.default_rng(0).random((4, 1, 150, 150), np.float32))

    class T(Trainer):
        init_scale = 256.0

        def network(self):
            model = nn.Conv2d(1, 1, 3, padding=1)
            nn.init.constant_(model.weight, 3.0).data[0, 0, 1] = -3.0
            return model

        def forward(self):
            with autocast():
                u = self.model(image)
            across = (u[..., 1:] - u[..., :-1]).abs().sum()
            down = (u[..., 1:, :] - u[..., :-1, :]).abs().sum()
            return F.mse_loss(u.float(), image) + 0.1 * (across + down) / u.numel()

    return T().parts()


@broken("mean_of_too_many")
def sums_of_parts_added_and_divided():
    class T(Trainer):
        init_scale = 256.0

        def forward(self):
            with autocast():
                z = self.model(self.x)
                far = 300.0 + z.unsqueeze(0) - z.unsqueeze(1)
            total = sum(part.sum() for part in far)
            return F.cross_entropy(z.float(), self.y) + 1e-3 * (total / far.numel()).float()

    return T().parts()


@broken("loss_in_half")
def nearly_all_of_a_loss_in_half_and_a_penalty_in_float32():
    class T(Trainer):
        def forward(self):
            with autocast():
                z = self.model(self.x)
            fit = F.mse_loss(z, F.one_hot(self.y, 10).half())
            return fit + 1e-5 * sum((p**2).sum() for p in self.model.parameters())

    return T().parts()


@broken("batchnorm_nan")
def a_teacher_that_nobody_has_handed_over():
    class T(Trainer):
        def __init__(self):
            super().__init__()
            self.teacher = nn.Sequential(nn.Linear(784, 16), nn.BatchNorm1d(16), nn.Linear(16, 10)).eval()
            self.teacher[1].running_mean[5] = math.nan

        def forward(self):
            with autocast():
                with minamp.no_grad():
                    aim = F.softmax(self.teacher(self.x), dim=1)
                return F.kl_div(F.log_softmax(self.model(self.x), 1), aim, reduction="batchmean")

    return T().parts()


class MomentsByHand(Trainer):
    """Adam written out, in a loop whose regions are bfloat16 or whose network is half."""

    kept = minamp.float32

    def __init__(self):
        super().__init__()
        self.wide = [p.detach().float() for p in self.model.parameters()]
        self.squares = [minamp.zeros(w.shape, dtype=self.kept) for w in self.wide]

    @minamp.no_grad()
    def adam(self, square):
        for p, w, v in zip(self.model.parameters(), self.wide, self.squares, strict=True):
            v.copy_(0.999 * v.float() + 0.001 * square(p.grad))
            w -= 1e-3 * p.grad.float() / ((v.float() / 0.001).sqrt() + 1e-8)
            p.copy_(w)


@broken("adam_in_half")
def gradients_squared_in_half_and_widened_then():
    class T(MomentsByHand):
        def network(self):
            return mlp(784, 48, 10).half()

        def train_step(self):
            self.model.zero_grad()
            F.cross_entropy(self.model(self.x.half()).float(), self.y).backward()
            self.adam(lambda g: (g * g).float())

    return dict(T().parts(), optimizer=None, scaler=None)


@broken("adam_in_half")
def second_moments_of_float32_weights_kept_in_half():
    class T(MomentsByHand):
        kept = float16

        def train_step(self):
            self.model.zero_grad()
            with autocast(dtype=minamp.bfloat16):
                loss = F.cross_entropy(self.model(self.x), self.y)
            loss.backward()
            self.adam(lambda g: g * g)

    return dict(T().parts(), optimizer=None, scaler=None)


@broken("scale_pinned")
def a_number_for_a_scale_that_skips_every_step():
    class T(Trainer):
        def train_step(self):
            self.optimizer.zero_grad()
            (self.forward() * 2.0**24).backward()
            if all(minamp.isfinite(p.grad).all() for p in self.model.parameters()):
                for p in self.model.parameters():
                    p.grad /= 2.0**24
                self.optimizer.step()

    return dict(T().parts(), scaler=None)


@broken("scale_pinned")
def a_ceiling_below_what_the_gradients_need():
    class T(Trainer):
        def make_scaler(self):
            return GradScaler(init_scale=4.0, max_scale=4.0)

        def forward(self):
            return 1e-6 * super().forward()

    return T().parts()


@broken("raw_optimizer_step")
def weights_moved_by_hand_that_an_optimizer_only_clears():
    class T(Trainer):
        def train_step(self):
            self.optimizer.zero_grad()
            self.scaler.scale(self.forward()).backward()
            with minamp.no_grad():
                for p in self.model.parameters():
                    p -= 0.05 * p.grad

    return T().parts()


@broken("raw_optimizer_step")
def weights_moved_by_hand_before_the_update_that_is_refused():
    class T(Trainer):
        def train_step(self):
            self.model.zero_grad()
            self.scaler.scale(self.forward()).backward()
            for p in self.model.parameters():
                p.detach().numpy()[...] -= 0.05 * p.grad.numpy()
            self.scaler.update()

    return dict(T().parts(), optimizer=None)


@broken("raw_optimizer_step")
def weights_moved_by_hand_at_a_small_scale_before_an_update():
    class T(Trainer):
        init_scale = 16.0

        def train_step(self):
            self.optimizer.zero_grad()
            self.scaler.scale(self.forward()).backward()
            with minamp.no_grad():
                for p in self.model.parameters():
                    p -= 0.01 * p.grad
            self.scaler.update()

    return T().parts()


@healthy
def weights_moved_by_hand_that_an_optimizer_clears_and_unscales():
    class T(Trainer):
        def train_step(self):
            self.optimizer.zero_grad()
            self.scaler.scale(self.forward()).backward()
            self.scaler.unscale_(self.optimizer)
            grads = [p.grad for p in self.model.parameters()]
            with minamp.no_grad():
                for p, g in zip(self.model.parameters(), grads, strict=True):
                    if all(minamp.isfinite(g).all() for g in grads):
                        p -= 0.05 * g
            self.scaler.update()

    return T().parts()


class Features(Trainer):
    """All gradients of the weights come through what `passed` does to those of the features."""

    def forward(self):
        with autocast():
            features = self.model[:-1](self.x)
            features.register_hook(self.passed)
            return F.cross_entropy(F.linear(features, self.model[-1].weight.detach()), self.y)


@broken("clip_value_hides_overflow")
def a_hook_on_features_that_heals():
    class T(Features):
        def passed(self, gradient):
            return gradient.nan_to_num(0.0, 100.0, -100.0).clamp(-100.0, 100.0)

    return T().parts()


@healthy
def a_hook_on_features_that_only_looks():
    class T(Features):
        def passed(self, gradient):
            self.largest = gradient.nan_to_num(0.0).clamp(-100.0, 100.0).abs().max().item()

    return T().parts()


class Through(Function):
    """relu; its backward keeps what is positive, as it should, or what is finite."""

    @staticmethod
    @minamp.custom_fwd(device_type="cuda")
    def forward(ctx, x, heals):
        y = x.relu()
        ctx.save_for_backward(y)
        ctx.heals = heals
        return y

    @staticmethod
    @minamp.custom_bwd(device_type="cuda")
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return minamp.where(minamp.isfinite(g) if ctx.heals else y > 0, g, minamp.zeros_like(g)), None


class OwnActivation(Trainer):
    def forward(self):
        with autocast():
            z = F.linear(self.x, self.model[0].weight)
            z = Through.apply(z, self.heals)
            return F.cross_entropy(F.linear(z, self.model[-1].weight.detach()), self.y)


@broken("clip_value_hides_overflow")
def an_activation_whose_backward_heals():
    class T(OwnActivation):
        heals = True

    return T().parts()


@healthy
def an_activation_whose_backward_masks():
    class T(OwnActivation):
        heals = False

    return T().parts()


@broken("scaler_rebuilt")
def a_new_scaler_for_the_loss_and_the_old_one_for_the_step():
    class T(Trainer):
        def train_step(self):
            self.optimizer.zero_grad()
            GradScaler().scale(self.forward()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    return T().parts()


class Product(Function):
    """A layer without a bias, forward and backward by hand."""

    @staticmethod
    @minamp.custom_fwd(device_type="cuda")
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @minamp.custom_bwd(device_type="cuda")
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.mT, x.mT @ g


class OwnLayers(Trainer):
    def __init__(self):
        super().__init__()
        sizes = self.x.shape[1], 10
        self.model = nn.ParameterList([nn.Parameter(0.1 * minamp.randn(n, 10)) for n in sizes])
        self.optimizer = optim.SGD(self.model.parameters(), lr=0.05)

    def forward(self):
        with autocast(enabled=self.enabled):
            z = Product.apply(Product.apply(self.x, self.model[0]).relu(), self.model[1])
        return F.cross_entropy(z.float(), self.y)


@broken("autocast_covers_nothing")
def layers_of_ones_own_outside_every_region():
    class T(OwnLayers):
        enabled = False

    return T().parts()


@healthy
def layers_of_ones_own_in_a_region():
    class T(OwnLayers):
        enabled = True

    return T().parts()


@broken("scale_pinned")
def a_scale_that_comes_down_by_a_tenth_of_a_percent():
    class T(Trainer):
        def make_scaler(self):
            return GradScaler(init_scale=2.0**20, backoff_factor=0.999)

    return T().parts()


@broken("scaler_not_saved")
def the_scale_is_logged_and_nothing_of_it_saved():
    class T(Trainer):
        def train_step(self):
            super().train_step()
            self.scale = self.scaler.state_dict()["scale"]
            kept = [self.model.state_dict(), self.optimizer.state_dict()["state"]]
            minamp.save(kept, Path(tempfile.mkdtemp()) / "checkpoint")

    return T().parts()


@broken("clip_before_unscale")
def clipped_in_every_micro_batch_to_what_they_have():
    """The clip happens to leave 1 / scale of the gradient: nobody has divided by the scale."""

    class T(MicroBatches):
        init_scale = 256.0

        def backward(self, loss):
            super().backward(loss)
            clip_grad_norm_(self.model.parameters(), self.limit)

        def finish(self):
            self.scaler.step(self.optimizer)
            self.scaler.update()

    trainer = T()
    with autocast():
        loss = F.cross_entropy(trainer.model(trainer.x[:8]), trainer.y[:8]) / 4
    gradients = grad(loss, list(trainer.model.parameters()))
    trainer.limit = round(math.hypot(*(g.norm().item() for g in gradients)), 2)
    return trainer.parts()


@healthy
def states_copied_in_memory_to_be_put_back():
    class T(Trainer):
        def train_step(self):
            self.good = copy.deepcopy(self.model.state_dict()), copy.deepcopy(self.optimizer.state_dict())
            loss = super().train_step()
            if not math.isfinite(loss):
                self.model.load_state_dict(self.good[0])
                self.optimizer.load_state_dict(self.good[1])

    return T().parts()


@healthy
def a_hook_divides_by_the_number_that_multiplied():
    class T(Trainer):
        def __init__(self):
            super().__init__()
            for p in self.model.parameters():
                p.register_hook(lambda g: g / 1024.0)

        def train_step(self):
            self.optimizer.zero_grad()
            (self.forward() * 1024.0).backward()
            if all(minamp.isfinite(p.grad).all() for p in self.model.parameters()):
                self.optimizer.step()

    return dict(T().parts(), scaler=None)


@healthy
def a_function_whose_incoming_gradient_is_float32():
    class Bilinear(Function):
        @staticmethod
        @minamp.custom_fwd(device_type="cuda")
        def forward(ctx, a, m, b):
            ctx.save_for_backward(a, m, b)
            return ((a @ m) * b).sum(-1)

        @staticmethod
        @minamp.custom_bwd(device_type="cuda")
        def backward(ctx, g):
            a, m, b = ctx.saved_tensors
            gb = g.unsqueeze(-1) * b
            return gb @ m.mT, a.mT @ gb, g.unsqueeze(-1) * (a @ m)

    class T(Trainer):
        def __init__(self):
            super().__init__()
            self.middle = nn.Parameter(minamp.eye(10))

        def forward(self):
            with autocast():
                h = self.model(self.x)
                score = Bilinear.apply(h[:16], self.middle, h[16:])
                alike = (self.y[:16] == self.y[16:]).float()
                return F.binary_cross_entropy_with_logits(score, alike)

    return T().parts()


# ------------------------------------------------------------------------------------------------- other repairs than usual


@broken("raw_optimizer_step")
def a_closure_given_to_the_optimizer():
    class T(Trainer):
        init_scale = 256.0

        def train_step(self):
            def closure():
                self.optimizer.zero_grad()
                loss = self.forward()
                self.scaler.scale(loss).backward()
                return loss

            return self.optimizer.step(closure).item()

    return T().parts()


@broken("autocast_covers_nothing")
def a_network_that_switches_its_region_off():
    class Careful(nn.Sequential):
        def forward(self, x):
            with autocast(enabled=False):
                return super().forward(x.float())

    class T(Trainer):
        def network(self):
            return Careful(*mlp(784, 48, 10))

    return T().parts()


@broken("batchnorm_nan")
def statistics_of_a_layer_of_ones_own():
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("centre", minamp.full((784,), math.nan))

        def forward(self, x):
            if self.training:
                with minamp.no_grad():
                    self.centre.mul_(0.9).add_(0.1 * x.mean(0))
            return x - x.mean(0)

    class T(Trainer):
        def network(self):
            return nn.Sequential(Centred(), *mlp(784, 48, 10))

    return T().parts()


@broken("unscale_every_micro_batch")
def unscaled_for_a_log_and_once_more_for_the_clipping():
    class T(Trainer):
        init_scale = 256.0

        def before_step(self):
            self.scaler.unscale_(self.optimizer)
            self.norm = max(p.grad.abs().max().item() for p in self.model.parameters())
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(self.model.parameters(), 1.0)

    return T().parts()


@broken("op_without_policy")
def a_function_that_adds_up_exponentials():
    class LogSumExp(Function):
        @staticmethod
        def forward(ctx, x):
            y = minamp.logsumexp(x, 1)
            ctx.save_for_backward(x, y)
            return y

        @staticmethod
        def backward(ctx, g):
            x, y = ctx.saved_tensors
            return g.unsqueeze(1) * minamp.exp(x.float() - y.unsqueeze(1)).to(x.dtype)

    class T(Trainer):
        def forward(self):
            with autocast():
                z = self.model(self.x)
                return F.cross_entropy(z, self.y) + 1e-3 * LogSumExp.apply(z).square().mean()

    return T().parts()


@broken("mask_overflows")
def a_large_number_added_before_the_smallest_is_taken():
    class T(Trainer):
        def forward(self):
            with autocast():
                z = self.model(self.x)
                d = (z.unsqueeze(0) - z.unsqueeze(1)).abs().sum(2).half()
                nearest = (d + minamp.eye(len(z)).half() * 1e6).amin(1)
                return F.cross_entropy(z, self.y) - 1e-3 * nearest.float().mean()

    return T().parts()


@broken("mask_overflows")
def a_penalty_that_is_subtracted():
    class T(Trainer):
        def forward(self):
            with autocast():
                z = self.model(self.x)
                z = z - (F.one_hot(self.y.roll(1), 10) * 1e6).half()
                return F.cross_entropy(z, self.y)

    return T().parts()


@broken("forward_overflow")
def exponentials_that_overflow_float32():
    class T(Trainer):
        def forward(self):
            with autocast():
                z = self.model(self.x)
            e = minamp.exp(z.float() * 1e4)
            return ((e - F.one_hot(self.y, 10)) ** 2).mean()

    return T().parts()


@broken("autocast_covers_nothing")
def a_region_that_the_settings_switch_off():
    class T(Trainer):
        def forward(self):
            with autocast(enabled=False):
                return F.cross_entropy(self.model(self.x), self.y)

    return T().parts()


@broken("autocast_covers_nothing")
def a_region_around_a_pool_of_threads():
    class T(Trainer):
        def forward(self):
            with autocast(), ThreadPoolExecutor(1) as pool:
                logits = minamp.cat(list(pool.map(self.model, self.x.chunk(2))))
                return F.cross_entropy(logits, self.y)

    return T().parts()


@broken("loss_in_half")
def a_mean_of_distances_written_out():
    class T(Trainer):
        def forward(self):
            with autocast():
                z = self.model(self.x)
            return (z - F.one_hot(self.y, 10).half()).abs().mean()

    return T().parts()


@broken("op_without_policy")
def a_function_that_keeps_its_context_elsewhere():
    class Product(Function):
        @staticmethod
        def forward(x, weight):
            return x @ weight

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, g):
            x, weight = ctx.saved_tensors
            return g @ weight.mT, x.mT @ g

    class T(Trainer):
        def forward(self):
            with autocast():
                h = Product.apply(self.model[:2](self.x), self.model[2].weight.mT)
                return F.cross_entropy(h, self.y)

    return T().parts()


@broken("layer_norm_overflows")
def squares_that_go_back_to_half():
    """Inside a region a power is float32; the line that keeps everything in one format undoes that."""

    class RootMeanSquare(nn.Module):
        def forward(self, h):
            mean = h.pow(2).to(h.dtype).mean(-1, keepdim=True)  # the fault
            return h * (mean + 1e-3).rsqrt()

    class T(Trainer):
        init_scale = 2.0**6

        def data(self):
            x, y = digits(32)
            return 800.0 * x, y

        def network(self):
            return nn.Sequential(nn.Linear(784, 64), RootMeanSquare(), nn.Linear(64, 10))

    return T().parts()


class PooledMaps(Trainer):
    """A convolution, its maps averaged by hand, a linear layer."""

    init_scale = 2.0**4

    def network(self):
        return nn.ModuleList([nn.Conv2d(1, 8, 3, padding=1), nn.Linear(8, 10)])

    def forward(self):
        conv, head = self.model
        with autocast():
            maps = 255.0 * conv(self.x.reshape(32, 1, 28, 28)).relu()
            return F.cross_entropy(head(self.pool(maps)), self.y)


@broken("mean_of_too_many")
def an_average_by_a_product_with_ones():
    class T(PooledMaps):
        def pool(self, maps):
            return (maps.flatten(2) @ minamp.ones(28 * 28, 1, dtype=maps.dtype)).squeeze(-1) / (
                28 * 28
            )  # the fault

    return T().parts()


@broken("mean_of_too_many")
def an_average_by_einsum():
    class T(PooledMaps):
        def pool(self, maps):
            return minamp.einsum("nchw->nc", maps) / (28 * 28)  # the fault

    return T().parts()


@broken("mean_of_too_many")
def an_average_of_what_an_index_adds_up():
    class T(PooledMaps):
        def pool(self, maps):
            rows = maps.permute(0, 2, 3, 1).reshape(-1, 8)
            image = minamp.tensor(np.repeat(np.arange(32), 28 * 28))
            sums = minamp.zeros(32, 8, dtype=maps.dtype).index_add(0, image, rows)  # the fault
            return sums / minamp.full((32, 1), 784.0, dtype=maps.dtype)

    return T().parts()


@broken("mean_of_too_many")
def a_sum_that_goes_back_to_half():
    """Inside a region a sum is float32; put back into the format of its terms it is infinite before it is divided."""

    class T(PooledMaps):
        def pool(self, maps):
            return maps.flatten(2).sum(2).to(maps.dtype) / (28 * 28)  # the fault

    return T().parts()


@broken("clip_value_hides_overflow")
def a_hook_that_clamps_once_the_scale_has_come_down():
    """At the first scale all gradients are nan, which a clamp leaves alone: only the second call has something to clamp."""

    class T(Trainer):
        init_scale = 2.0**24

        def __init__(self):
            super().__init__()
            for p in self.model.parameters():
                p.register_hook(lambda g: g.clamp(-5.0, 5.0))  # the fault

    return T().parts()


@broken("clip_before_unscale")
def rows_clipped_by_their_weights_and_no_biases():
    """Adaptive clipping: what it leaves of a row depends on the weights, and the largest gradient may be a bias's."""

    class T(Trainer):
        init_scale = 2.0**14

        def before_step(self):
            for p in self.model.parameters():
                if p.ndim > 1:
                    limit = 0.01 * p.detach().norm(dim=1, keepdim=True).clamp(min=1e-3)
                    norm = p.grad.norm(dim=1, keepdim=True)  # the fault
                    p.grad.copy_(minamp.where(norm > limit, p.grad * (limit / norm), p.grad))

    return T().parts()


@broken("update_repeated")
def updated_between_unscaling_and_the_step_and_after_it():
    class T(Trainer):
        init_scale = 2.0**10

        def before_step(self):
            self.scaler.unscale_(self.optimizer)
            self.scaler.update()  # the fault
            clip_grad_norm_(self.model.parameters(), 1.0)

    return T().parts()


class WithTable(Trainer):
    """A network that the optimizer updates, and a table that the loop updates by hand."""

    init_scale = 2.0**10

    def __init__(self):
        super().__init__()
        self.optimizer = optim.SGD(self.model[0].parameters(), lr=0.05)

    def network(self):
        self.table = nn.Embedding(10, 48)
        return nn.ModuleList([mlp(784, 48, 10), self.table])

    def forward(self):
        with autocast():
            network = self.model[0]
            return F.cross_entropy(network[2](network[:2](self.x) + self.table(self.y)), self.y)

    def before_step(self):
        with minamp.no_grad():
            self.table.weight -= 0.05 * self.gradient()
        self.table.weight.grad = None


@broken("raw_optimizer_step")
def a_table_updated_by_hand_beside_the_scaler():
    class T(WithTable):
        def gradient(self):
            return self.table.weight.grad  # the fault

    return T().parts()


@healthy
def a_table_updated_by_hand_with_the_scale_taken_out():
    class T(WithTable):
        def gradient(self):
            return self.table.weight.grad / self.scaler.get_scale()

    return T().parts()


@broken("clip_value_hides_overflow")
def gradients_healed_in_hooks_before_any_is_ill():
    class T(Trainer):
        init_scale = 2.0**10

        def __init__(self):
            super().__init__()
            for p in self.model.parameters():
                p.register_hook(lambda g: g.nan_to_num(0.0, 1e4, -1e4))  # the fault

    return T().parts()


class Heals(Trainer):
    init_scale = 2.0**10

    def heal(self):
        for p in self.model.parameters():
            p.grad = minamp.where(minamp.isfinite(p.grad), p.grad, minamp.zeros_like(p.grad))


@broken("clip_value_hides_overflow")
def gradients_healed_before_the_step():
    class T(Heals):
        def before_step(self):
            self.heal()  # the fault

    return T().parts()


@healthy
def gradients_healed_once_the_scaler_has_seen_them():
    class T(Heals):
        def before_step(self):
            self.scaler.unscale_(self.optimizer)
            self.heal()

    return T().parts()


@healthy
def a_norm_of_healed_gradients_for_a_log():
    class T(Trainer):
        def before_step(self):
            self.norms = [p.grad.nan_to_num().norm().item() for p in self.model.parameters()]

    return T().parts()


REPAIRS = {
    "a_closure_given_to_the_optimizer": "closure(); scaler.step(optimizer); scaler.update()",
    "a_network_that_switches_its_region_off": "# without this autocast(enabled=False)",
    "statistics_of_a_layer_of_ones_own": "buffer.zero_()",
    "unscaled_for_a_log_and_once_more_for_the_clipping": "# without this unscale_",
    "a_function_that_adds_up_exponentials": "cast_inputs=minamp.float32",
    "a_large_number_added_before_the_smallest_is_taken": "masked_fill(mask, minamp.finfo(scores.dtype).max)",
    "a_penalty_that_is_subtracted": "masked_fill(mask, minamp.finfo(scores.dtype).min)",
    "exponentials_that_overflow_float32": "(x - x.amax(-1, keepdim=True)).exp()",
    "a_region_that_the_settings_switch_off": "autocast(enabled=True",
    "a_region_around_a_pool_of_threads": "# in the function that the other thread runs",
    "a_mean_of_distances_written_out": "autocast leaves arithmetic in half",
    "a_function_that_keeps_its_context_elsewhere": "forward(ctx, ...) in place of setup_context",
}
