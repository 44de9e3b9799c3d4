"""Training loops with nothing wrong: in each of them the doctor must find nothing."""

import tempfile
from pathlib import Path

import minamp
import minamp.nn.functional as F
from gallery.parts import digits, mlp
from minamp import GradScaler, autocast, nn, optim
from minamp.nn.utils import clip_grad_norm_

LOOPS = {}


def loop(build):
    LOOPS[build.__name__] = build
    return build


@loop
def mlp_float32():
    x, y = digits(32)
    model = mlp(784, 64, 10)
    optimizer = optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=None)


@loop
def mlp_float16():
    x, y = digits(32)
    model = mlp(784, 64, 10)
    optimizer = optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
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


@loop
def mlp_bfloat16():
    """bfloat16 has float32's range and needs no scaler."""
    x, y = digits(32)
    model = mlp(784, 64, 10)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad()
        with autocast(dtype=minamp.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=None)


def _cnn(dropout=0.0):
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(16, 10),
    )


@loop
def cnn_float16():
    x, y = digits(16, shape=(1, 28, 28))
    model = _cnn()
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
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


@loop
def cnn_bfloat16_with_random_batches():
    """Batches and dropout masks come from minamp's generator."""
    x, y = digits(64, shape=(1, 28, 28))
    model = _cnn(dropout=0.2)
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

    def step():
        pick = minamp.randint(0, 64, (16,))
        optimizer.zero_grad()
        with autocast(dtype=minamp.bfloat16):
            loss = F.cross_entropy(model(x[pick]), y[pick])
        loss.backward()
        optimizer.step()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=None)


@loop
def detector():
    """Every cell of a 7 x 7 grid says whether it holds ink, how much, and which digit it belongs to."""
    x, y = digits(16, shape=(1, 28, 28))
    ink = F.avg_pool2d(x, 4)
    found = (ink > 0.0).float()
    label = y.reshape(16, 1, 1).expand(16, 7, 7)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.SiLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.GroupNorm(4, 16),
        nn.SiLU(),
        nn.Conv2d(16, 12, 1),
    )
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    scaler = GradScaler()

    def step():
        optimizer.zero_grad()
        with autocast():
            out = model(x)
            objectness = F.binary_cross_entropy_with_logits(out[:, :1], found)
            amount = (F.smooth_l1_loss(out[:, 1:2], ink, reduction="none") * found).sum() / found.sum()
            kind = F.cross_entropy(out[:, 2:], label)
            loss = objectness + amount + kind
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


class Block(nn.Module):
    """A transformer block, normalised first."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        n, t, c = x.shape
        q, k, v = (
            part.reshape(n, t, self.heads, c // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(h.transpose(1, 2).reshape(n, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, vocabulary=29, length=16, width=32):
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(Block(width, 4), Block(width, 4))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, ids):
        x = self.token(ids) + self.place(minamp.arange(ids.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def _next_token(model, ids):
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.reshape(-1, 29), ids[:, 1:].reshape(-1))


@loop
def transformer_float16():
    ids = minamp.randint(0, 29, (8, 17))
    model = Transformer()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    scaler = GradScaler()

    def step():
        optimizer.zero_grad()
        with autocast():
            loss = _next_token(model, ids)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


@loop
def transformer_bfloat16():
    ids = minamp.randint(0, 29, (8, 17))
    model = Transformer()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        with autocast(dtype=minamp.bfloat16):
            loss = _next_token(model, ids)
        loss.backward()
        clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=None)


@loop
def transformer_float32():
    ids = minamp.randint(0, 29, (8, 17))
    model = Transformer()
    optimizer = optim.Adam(model.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad()
        loss = _next_token(model, ids)
        loss.backward()
        optimizer.step()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=None)


@loop
def accumulation():
    """Four micro-batches, then one unscale_, one clip, one step, one update."""
    x, y = digits(32)
    model = mlp(784, 64, 10)
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    scaler = GradScaler()

    def step():
        optimizer.zero_grad()
        total = 0.0
        for i in range(0, 32, 8):
            with autocast():
                loss = F.cross_entropy(model(x[i : i + 8]), y[i : i + 8]) / 4
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), max_norm=5.0)
        scaler.step(optimizer)
        scaler.update()
        return total

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


@loop
def two_optimizers_one_scaler():
    """An autoencoder whose halves have an optimizer each; both are stepped before the one update."""
    x, _ = digits(32)
    model = nn.ModuleList([mlp(784, 64, 16), mlp(16, 64, 784)])
    encoder, decoder = optim.Adam(model[0].parameters(), lr=1e-3), optim.SGD(model[1].parameters(), lr=0.1)
    scaler = GradScaler()

    def step():
        encoder.zero_grad()
        decoder.zero_grad()
        with autocast():
            loss = F.mse_loss(model[1](model[0](x)), x)
        scaler.scale(loss).backward()
        scaler.step(encoder)
        scaler.step(decoder)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=[encoder, decoder], scaler=scaler)


@loop
def unscale_then_clip():
    x, y = digits(32)
    model = mlp(784, 128, 64, 10)
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = GradScaler()

    def step():
        optimizer.zero_grad()
        with autocast():
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), max_norm=0.5)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


@loop
def half_model_with_masters():
    x, y = digits(32)
    model = mlp(784, 64, 10).half()
    optimizer = optim.SGD(model.parameters(), lr=0.02, momentum=0.9, master_weights=True)
    scaler = GradScaler(init_scale=2.0**12)

    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.half()).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), max_norm=5.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


@loop
def bfloat16_weights_rounded_at_random():
    x, y = digits(32)
    model = mlp(784, 64, 10).bfloat16()
    optimizer = optim.SGD(model.parameters(), lr=0.01, write_back="stochastic")

    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.bfloat16()).float(), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=None)


@loop
def full_checkpoint():
    x, y = digits(32)
    model = mlp(784, 64, 10)
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    scaler = GradScaler()
    folder = Path(tempfile.mkdtemp())

    def step():
        optimizer.zero_grad()
        with autocast():
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        state = {k: v.state_dict() for k, v in dict(model=model, optimizer=optimizer, scaler=scaler).items()}
        minamp.save(state, folder / "last.ckpt")
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


@loop
def decaying_rate_and_growing_scale():
    """The learning rate lives in the optimizer's groups, and the scale doubles after every second step."""
    x, y = digits(32)
    model = mlp(784, 64, 10)
    optimizer = optim.SGD(
        [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.02}], lr=0.05
    )
    scaler = GradScaler(init_scale=256.0, growth_interval=2)

    @autocast(dtype=minamp.float16)
    def forward():
        return F.cross_entropy(model(x), y, label_smoothing=0.1)

    def step():
        optimizer.zero_grad(set_to_none=False)
        loss = forward()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        for group in optimizer.param_groups:
            group["lr"] *= 0.95
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


@loop
def lstm_row_by_row():
    """Digits read row by row, both ways, with dropout between the layers; gradients clipped."""
    x, y = digits(32, shape=(28, 28))
    recurrent, head = nn.LSTM(28, 24, 2, batch_first=True, dropout=0.1, bidirectional=True), nn.Linear(48, 10)
    model = nn.ModuleList([recurrent, head])
    optimizer = optim.Adam(model.parameters(), lr=5e-3)
    scaler = GradScaler()

    def step():
        optimizer.zero_grad()
        with autocast():
            output, _ = recurrent(x)
            loss = F.cross_entropy(head(output.mean(dim=1)), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)
