"""Answers to exercise 6: right mends, each in another way, and wrong ones: still broken, broken elsewhere, convicted of nothing.

An answer holds two functions, the mended loop and the settings that convict the broken one. The reference holds a third: the
broken loop, with which the student begins, comes first.
"""

import re

from grading.local import Wrong, instead

PLAIN = "lr=0.1, init_scale=1024.0, growth_interval=2000"
MODEL = """
    model, trace = MLP(weights), []
    optimizer, scaler = SGD(model.parameters(), lr), GradScaler(init_scale, growth_interval)
"""
FORWARD = """
    for x, y in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
"""
LAST = """
        trace.append((loss.item(), scaler.get_scale()))
    return report(model.weights(), trace)
"""
SCALED, STEP, UPDATE = "scaler.scale(loss).backward()", "scaler.step(optimizer)", "        scaler.update()\n"
LOOP = "    for x, y in batches:\n"


def answer(task, more, settings, *body):
    """An answer from the arguments beside PLAIN, the convicting settings and the pieces of the loop's body."""
    body = "\n".join(piece.strip("\n") for piece in body)
    return (
        f"def convict_{task}():\n    return {settings}\n\n"
        f"def mended_{task}(weights, batches, *, {PLAIN}{more}):\n{body}\n"
    )


def lines(indent, *code):
    """Lines of code, all but the first indented: to put in place of a statement."""
    return ("\n" + " " * indent).join(code)


def untouched(reference):
    """What the student begins with, and the right conviction."""
    return reference[: reference.rindex("def mended_")]


def mended(*pairs, before=""):
    """The reference's mended loop with pieces of text replaced, one after the other; `before` is put in front."""

    def patched(reference):
        source = reference[reference.index("def convict_") :]
        for old, new in pairs:
            source = instead(old, new)(source)
        return before + source

    return patched


def convict(settings):
    """The reference with other settings for the conviction."""

    def patched(reference):
        source, n = re.subn(r"(### BEGIN SOLUTION\n    return ).*", rf"\g<1>{settings}", reference)
        assert n == 1
        return source

    return patched


FLOAT32 = '''
class Wide(MLP):
    """The network in float32."""

    def __call__(self, x):
        def linear(x, w, b):
            parents = (x, lambda g: g @ w.data.T), (w, lambda g: x.data.T @ np.float32(g)), (b, lambda g: np.float32(g).sum(0))
            return Tensor(np.float32(x.data @ w.data + b.data), parents)

        h = linear(Tensor(np.float32(x)), *self.w[:2])
        y = np.tanh(h.data)
        return linear(Tensor(y, ((h, lambda g: g * (1 - y * y)),)), *self.w[2:])

'''


def common(task, twin=PLAIN, off=((STEP, "optimizer.step()"),), model="MLP(weights)"):
    """What goes wrong in every loop."""
    trains, keeps, convicts = (f"{task}_{group}" for group in ("trains", "keeps", "convicts"))
    both = frozenset({trains, keeps})
    names = ", ".join(f"{name}={name}" for name in re.findall(r"(\w+)=", twin))
    return [
        Wrong("nothing was mended", untouched, both),
        Wrong("the scaler is switched off", mended((SCALED, "loss.backward()"), (UPDATE, ""), *off), both),
        Wrong(
            "the loss is not scaled, the gradients are unscaled", mended((SCALED, "loss.backward()")), both
        ),
        Wrong("update is forgotten", mended((UPDATE, "")), both),
        Wrong(
            "update is called after good steps alone",
            mended((UPDATE, "        if not any(scaler.bad.values()):\n            scaler.update()\n")),
            both,
        ),
        Wrong(
            "a new scaler in every step",
            mended((LOOP, f"{LOOP}        scaler = GradScaler(init_scale, growth_interval)\n")),
            both,
        ),
        Wrong(
            "the scale is kept so low that nothing overflows",
            mended(("GradScaler(init_scale, growth_interval)", "GradScaler(min(init_scale, 16.0), 10**9)")),
            both,
        ),
        Wrong(
            "the report is the twin's",
            mended((LOOP, f"    return twin(weights, batches, {names})\n{LOOP}")),
            both,
        ),
        Wrong(
            "the network is computed in float32",
            mended((model, model.replace("MLP", "Wide")), before=FLOAT32),
            both,
        ),
        Wrong("convicted of passing the short test", convict("{}"), frozenset({convicts})),
        Wrong(
            "convicted of a scale with which nothing trains",
            convict('{"init_scale": 2.0**24}'),
            frozenset({convicts}),
        ),
        Wrong(
            "convicted with a setting that there is not", convict('{"momentum": 0.0}'), frozenset({convicts})
        ),
    ]


def lost(task, *groups):
    return frozenset(f"{task}_{group}" for group in groups or ("trains", "keeps"))


RIGHT = {
    "plain": [
        answer(
            "plain",
            "",
            '{"init_scale": 1.0}',
            MODEL,
            LOOP,
            """
        loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()  # at the end, for the next one
""",
            LAST,
        ),
        answer(
            "plain",
            "",
            "dict(init_scale=2**19, lr=0.01)",
            MODEL,
            """
    for batch in batches:
        for p in model.parameters():
            p.grad = None
        loss = cross_entropy(model(batch[0]), batch[1])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
""",
            LAST,
        ),
        answer(
            "plain",
            "",
            '{"init_scale": 1, "growth_interval": 100}',
            """
    weights, losses, scales = [np.float32(w) for w in weights], [], []
    model = MLP(weights)
    optimizer = SGD(model.parameters(), lr)
    scaler = GradScaler(init_scale, growth_interval)
    for x, y in batches:
        loss = cross_entropy(model(x), y)
        for p in optimizer.parameters:
            p.grad = np.zeros_like(p.data)
        (loss * scaler.get_scale()).backward()
        scaler.step(optimizer)
        scaler.update()
        losses += [loss.item()]
        scales += [scaler.get_scale()]
    return dict(weights=model.weights(), losses=np.array(losses), scales=tuple(scales))
""",
        ),
    ],
    "clipped": [
        answer(
            "clipped",
            ", max_norm=1e4",
            '{"max_norm": 0.5, "init_scale": 2.0**14}',
            MODEL,
            FORWARD,
            """
        clip_grad_norm_(model.parameters(), max_norm * scaler.get_scale())  # scaled gradients, scaled norm
        scaler.step(optimizer)
        scaler.update()
""",
            LAST,
        ),
        answer(
            "clipped",
            ", max_norm=1e4",
            '{"max_norm": 0.1}',
            MODEL,
            FORWARD,
            """
        scaler.unscale_(optimizer)
        norm = grad_norm(optimizer.parameters)
        if norm > max_norm:
            for p in optimizer.parameters:
                p.grad = p.grad * (max_norm / norm)
        scaler.step(optimizer)
        scaler.update()
""",
            LAST,
        ),
        answer(
            "clipped",
            ", max_norm=1e4",
            '{"max_norm": 0.01, "init_scale": 1024, "growth_interval": 1}',
            MODEL,
            FORWARD,
            """
        scaler.unscale_(optimizer)
        if not scaler.bad[optimizer]:
            clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
""",
            LAST,
        ),
    ],
    "watched": [
        answer(
            "watched",
            "",
            '{"init_scale": 2.0**19}',
            MODEL.replace("model, trace = MLP(weights), []", "model, trace, norms = MLP(weights), [], []"),
            FORWARD,
            """
        scaler.unscale_(optimizer)
        norms.append(grad_norm(model.parameters()))
        if np.isfinite(norms[-1]):  # the skip by hand; update() knows what unscale_ has seen
            optimizer.step()
        scaler.update()
        trace.append((loss.item(), scaler.get_scale()))
    return report(model.weights(), trace) | {"norms": norms}
""",
        ),
        answer(
            "watched",
            "",
            '{"init_scale": 2.0**18, "growth_interval": 1}',
            MODEL,
            "    norms = []",
            FORWARD,
            """
        norms.append(grad_norm(model.parameters()) / scaler.get_scale())  # step() unscales
        scaler.step(optimizer)
        scaler.update()
        trace.append((loss.item(), scaler.get_scale()))
    return {"norms": norms, **report(model.weights(), trace)}
""",
        ),
        answer(
            "watched",
            "",
            '{"init_scale": float(2**20), "lr": 0.2}',
            MODEL,
            "    norms = []",
            FORWARD,
            """
        scaler.step(optimizer)
        norms.append(grad_norm(optimizer.parameters))  # the gradients are still there, and unscaled
        scaler.update()
        trace.append((loss.item(), scaler.get_scale()))
    return report(model.weights(), trace) | {"norms": np.array(norms)}
""",
        ),
    ],
    "accumulated": [
        answer(
            "accumulated",
            ", parts=1, max_norm=1e4",
            '{"parts": 16}',
            MODEL,
            """
    for x, y in batches:
        optimizer.zero_grad()
        total, rows = 0.0, len(x) // parts
        for i in range(parts):
            part = slice(i * rows, (i + 1) * rows)
            loss = cross_entropy(model(x[part]), y[part]) / parts
            scaler.scale(loss).backward()
            total += loss.item()
            if i == parts - 1:
                scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        trace.append((total, scaler.get_scale()))
    return report(model.weights(), trace)
""",
        ),
        answer(
            "accumulated",
            ", parts=1, max_norm=1e4",
            '{"parts": 4, "init_scale": 2.0**12}',
            MODEL,
            """
    for x, y in batches:
        optimizer.zero_grad()
        losses = []
        for a, b in zip(x.reshape(parts, -1, x.shape[1]), y.reshape(parts, -1)):
            loss = cross_entropy(model(a), b)
            losses.append(loss.item())
            scaler.scale(loss * (1 / parts)).backward()
        clip_grad_norm_(model.parameters(), max_norm * scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        trace.append((np.mean(losses), scaler.get_scale()))
    return report(model.weights(), trace)
""",
        ),
        answer(
            "accumulated",
            ", parts=1, max_norm=1e4",
            '{"parts": 8, "growth_interval": 2}',
            MODEL,
            """
    for x, y in batches:
        optimizer.zero_grad()
        pieces = list(zip(np.array_split(x, parts), np.array_split(y, parts)))
        losses = [cross_entropy(model(a), b) / parts for a, b in pieces]  # all forwards first
        for loss in losses:
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(optimizer.parameters, max_norm)
        scaler.step(optimizer)
        scaler.update()
        trace.append((sum(loss.item() for loss in losses), scaler.get_scale()))
    return report(model.weights(), trace)
""",
        ),
    ],
    "shared": [
        answer(
            "shared",
            "",
            '{"init_scale": 2.0**19, "growth_interval": 1}',
            """
    model, trace = MLP(weights), []
    both = [SGD(model.parameters()[k : k + 2], lr) for k in (0, 2)]
    scaler = GradScaler(init_scale, growth_interval)
    for x, y in batches:
        loss = cross_entropy(model(x), y)
        for optimizer in both:
            optimizer.zero_grad()
        scaler.scale(loss).backward()
        for optimizer in both:
            scaler.step(optimizer)
        scaler.update()
""",
            LAST,
        ),
        answer(
            "shared",
            "",
            '{"growth_interval": 1, "init_scale": 2.0**10}',
            """
    model, trace = MLP(weights), []
    body, head = SGD(model.w[:2], lr), SGD(model.w[2:], lr)
    scaler = GradScaler(init_scale, growth_interval)
    for x, y in batches:
        head.zero_grad()
        body.zero_grad()
        loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(head)
        scaler.unscale_(body)
        scaler.step(head)
        scaler.step(body)
        scaler.update()
""",
            LAST,
        ),
        answer(
            "shared",
            "",
            '{"growth_interval": 1, "lr": 0.01}',
            """
    model, trace = MLP(weights), []
    body, head = SGD(model.parameters()[:2], lr), SGD(model.parameters()[2:], lr)
    scaler = GradScaler(init_scale, growth_interval)
    for x, y in batches:
        for p in model.parameters():
            p.grad = None
        loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        for optimizer in (body, head):
            scaler.unscale_(optimizer)
            if not scaler.bad[optimizer]:
                optimizer.step()
        scaler.update()
""",
            LAST,
        ),
    ],
    "tempered": [
        answer(
            "tempered",
            ", temperature=1.0",
            '{"temperature": 1 / 64}',
            MODEL,
            """
    for x, y in batches:
        optimizer.zero_grad()
        raw = model(x)
        wide = Tensor(np.float32(raw.data) / np.float32(temperature), ((raw, lambda g: half(np.float32(g) / temperature)),))
        loss = cross_entropy(wide, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
            LAST,
        ),
        answer(
            "tempered",
            ", temperature=1.0",
            '{"temperature": 0.05, "lr": 0.001}',
            """
    def log_softmax(x):
        z = np.float32(x.data)
        z = z - z.max(1, keepdims=True)
        y = z - np.log(np.exp(z).sum(1, keepdims=True))
        return Tensor(y, ((x, lambda g: half(g - np.exp(y) * g.sum(1, keepdims=True))),))
""",
            MODEL,
            FORWARD.replace("cross_entropy(model(x), y)", "nll_loss(log_softmax(model(x) / temperature), y)"),
            """
        scaler.step(optimizer)
        scaler.update()
""",
            LAST,
        ),
        answer(
            "tempered",
            ", temperature=1.0",
            '{"temperature": 2.0**-8, "init_scale": 16}',
            MODEL,
            FORWARD.replace("model(x), y", "model(x) * (1 / temperature), y"),
            """
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
""",
            LAST,
        ),
    ],
    "resumed": [
        answer(
            "resumed",
            ", checkpoint=None",
            '{"init_scale": 2.0**20}',
            """
    start = checkpoint or {"model": weights, "scaler": {"now": init_scale, "good": 0}}
    model, trace = MLP(start["model"]), []
    optimizer, scaler = SGD(model.parameters(), lr), GradScaler(init_scale, growth_interval)
    scaler.load_state_dict(start["scaler"])
    optimizer.momenta = list(start.get("momenta", optimizer.momenta))
""",
            FORWARD,
            """
        scaler.step(optimizer)
        scaler.update()
""",
            LAST.rstrip()
            + """ | {
        "checkpoint": {"model": model.weights(), "momenta": optimizer.momenta, "scaler": scaler.state_dict()}
    }
""",
        ),
        answer(
            "resumed",
            ", checkpoint=None",
            '{"init_scale": 2.0**19, "stop": 4}',
            MODEL,
            """
    if checkpoint is not None:
        (scale, good), momenta, saved = checkpoint["scaler"], checkpoint["momenta"], checkpoint["weights"]
        scaler.load_state_dict({"now": scale, "good": good})
        optimizer.momenta = [m.copy() for m in momenta]
        for p, w in zip(model.parameters(), saved):
            p.data = w
""",
            FORWARD,
            """
        scaler.step(optimizer)
        scaler.update()
""",
            LAST.replace("return", "run ="),
            """
    run["checkpoint"] = dict(weights=model.weights(), momenta=optimizer.momenta, scaler=(scaler.now, scaler.good))
    return run
""",
        ),
        answer(
            "resumed",
            ", checkpoint=None",
            '{"init_scale": 2.0**20, "stop": 2, "growth_interval": 5}',
            """
    good = 0
    if checkpoint:
        weights, init_scale, good = checkpoint["weights"], checkpoint["scale"], checkpoint["good"]
""",
            MODEL,
            """
    scaler.good = good
    if checkpoint:
        optimizer.momenta = checkpoint["momenta"]
""",
            FORWARD,
            """
        scaler.step(optimizer)
        scaler.update()
""",
            LAST.replace("return", "run ="),
            """
    state = scaler.state_dict()
    saved = {"weights": model.weights(), "scale": state["now"], "good": state["good"]}
    return {**run, "checkpoint": saved | {"momenta": list(optimizer.momenta)}}
""",
        ),
    ],
    "stored": [
        answer(
            "stored",
            "",
            '{"lr": 2e-4, "init_scale": 2.0**12}',
            """
    masters, trace = [Tensor(w.copy()) for w in weights], []
    optimizer, scaler = SGD(masters, lr), GradScaler(init_scale, growth_interval)
    for x, y in batches:
        model = MLP([half(m.data) for m in masters])  # a new half copy for each step
        loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        for m, p in zip(masters, model.parameters()):
            m.grad = p.grad.astype(np.float32)
        scaler.step(optimizer)
        scaler.update()
        trace.append((loss.item(), scaler.get_scale()))
    return report([m.data for m in masters], trace)
""",
        ),
        answer(
            "stored",
            "",
            '{"lr": 1e-4, "growth_interval": 10}',
            """
    model, trace = MLP([half(w) for w in weights]), []
    masters = [Tensor(np.array(w, np.float32)) for w in weights]
    optimizer, scaler = SGD(masters, lr), GradScaler(init_scale, growth_interval)
    for x, y in batches:
        optimizer.zero_grad()
        for p in model.parameters():
            p.grad = None
        loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        for k, p in enumerate(model.parameters()):
            masters[k].grad = np.float32(p.grad)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        if not scaler.bad[optimizer]:
            for k, p in enumerate(model.parameters()):
                p.data = half(masters[k].data)
        scaler.update()
        trace.append((loss.item(), scaler.get_scale()))
    return report([master.data for master in masters], trace)
""",
        ),
        answer(
            "stored",
            "",
            '{"lr": 0.0001}',
            """
    exact = [np.float32(w) for w in weights]  # the masters as arrays, put into the optimizer for the step
    model, trace = MLP([half(w) for w in weights]), []
    masters = [Tensor(w) for w in exact]
    optimizer, scaler = SGD(masters, lr), GradScaler(init_scale, growth_interval)
    for x, y in batches:
        for p in model.parameters():
            p.grad = None
        loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        for w, master, p in zip(exact, masters, model.parameters()):
            master.data, master.grad = w, np.float32(p.grad)
        scaler.step(optimizer)
        scaler.update()
        exact = [master.data for master in masters]
        for w, p in zip(exact, model.parameters()):
            p.data = half(w)
        trace.append((loss.item(), scaler.get_scale()))
    return report(exact, trace)
""",
        ),
    ],
}

ZERO = "        optimizer.zero_grad()\n"
UNSCALE = "        scaler.unscale_(optimizer)\n"
CLIP = "        clip_grad_norm_(model.parameters(), max_norm)\n"
NO_UNSCALE = (UNSCALE, "")
PARTS = "for a, b in zip(np.split(x, parts), np.split(y, parts), strict=True):"
COUNTED = "for i, (a, b) in enumerate(zip(np.split(x, parts), np.split(y, parts), strict=True)):"
EACH = "        for p in model.parameters():\n            "

WRONG = {
    "plain": [
        *common("plain"),
        Wrong(
            "zero_grad between backward and step",
            mended((ZERO, ""), (SCALED, f"{SCALED}\n{ZERO}")),
            lost("plain"),
        ),
        Wrong(
            "zero_grad once, before the loop",
            mended((ZERO, ""), (LOOP, f"    optimizer.zero_grad()\n{LOOP}")),
            lost("plain"),
        ),
        Wrong(
            "zero_grad after good steps alone",
            mended((ZERO, ""), (UPDATE, f"        if not scaler.bad[optimizer]:\n    {ZERO}{UPDATE}")),
            lost("plain"),
        ),
        Wrong(
            "zero_grad after bad steps alone",
            mended((ZERO, ""), (UPDATE, f"        if scaler.bad[optimizer]:\n    {ZERO}{UPDATE}")),
            lost("plain"),
        ),
        Wrong(
            "old gradients are multiplied by 0, and inf times 0 is NaN",
            mended((ZERO, f"{EACH}p.grad = None if p.grad is None else p.grad * 0\n")),
            lost("plain"),
        ),
        Wrong(
            "old gradients stay, what is not finite in them is made 0",
            mended(
                (
                    ZERO,
                    f"{EACH}p.grad = None if p.grad is None else np.nan_to_num(p.grad, posinf=0, neginf=0)\n",
                )
            ),
            lost("plain"),
        ),
        Wrong(
            "convicted of a scale that fits", convict('{"init_scale": 2.0**12}'), lost("plain", "convicts")
        ),
    ],
    "clipped": [
        *common("clipped", f"{PLAIN}, max_norm=1e4", off=((STEP, "optimizer.step()"), NO_UNSCALE)),
        Wrong("unscale_ after the clipping", mended(NO_UNSCALE, (CLIP, CLIP + UNSCALE)), lost("clipped")),
        Wrong("no clipping", mended((CLIP, "")), lost("clipped")),
        Wrong("clipped after the step", mended((CLIP, ""), (UPDATE, CLIP + UPDATE)), lost("clipped")),
        Wrong(
            "max_norm is divided by the scale as well",
            mended((CLIP, CLIP.replace("max_norm", "max_norm / scaler.get_scale()"))),
            lost("clipped"),
        ),
        Wrong(
            "each weight is clipped by itself",
            mended((CLIP, f"{EACH}clip_grad_norm_([p], max_norm)\n")),
            lost("clipped"),
        ),
        Wrong(
            "values are clipped",
            mended((CLIP, f"{EACH}p.grad = np.clip(p.grad, -max_norm, max_norm)\n")),
            lost("clipped"),
        ),
        Wrong(
            "max_norm grows with the first scale, not with the one there is",
            mended(NO_UNSCALE, (CLIP, CLIP.replace("max_norm", "max_norm * init_scale"))),
            lost("clipped"),
        ),
        Wrong(
            "the gradients are divided by hand, and once more by step",
            mended((UNSCALE, f"{EACH}p.grad = p.grad * (1 / scaler.get_scale())\n")),
            lost("clipped"),
        ),
        Wrong(
            "convicted of a norm that clips nothing",
            convict('{"max_norm": 1e6}'),
            lost("clipped", "convicts"),
        ),
    ],
    "watched": [
        *common("watched", off=((STEP, "optimizer.step()"), NO_UNSCALE)),
        Wrong("both steps", mended((STEP, f"{STEP}\n        optimizer.step()")), lost("watched")),
        Wrong(
            "skipped where the loss is not finite",
            mended((STEP, "if np.isfinite(loss.item()):\n            optimizer.step()")),
            lost("watched"),
        ),
        Wrong(
            "what is not finite is made 0, and the step is made",
            mended(
                (
                    STEP,
                    lines(
                        8,
                        "for p in model.parameters():",
                        "    p.grad = np.nan_to_num(p.grad, posinf=0, neginf=0)",
                        "optimizer.step()",
                    ),
                )
            ),
            lost("watched"),
        ),
        Wrong(
            "infinities are made large numbers, and the step is made",
            mended(
                (
                    STEP,
                    lines(
                        8,
                        "for p in model.parameters():",
                        "    p.grad = np.clip(np.nan_to_num(p.grad), -1, 1)",
                        "optimizer.step()",
                    ),
                )
            ),
            lost("watched"),
        ),
        Wrong(
            "unscale_ after step", mended(NO_UNSCALE, (STEP, f"{STEP}\n{UNSCALE.rstrip()}")), lost("watched")
        ),
        Wrong("the norms of the scaled gradients", mended(NO_UNSCALE), lost("watched", "keeps")),
        Wrong(
            "the norms are no longer reported", mended((' | {"norms": norms}', "")), lost("watched", "keeps")
        ),
        Wrong(
            "norms of good steps alone",
            mended(
                ("        norms.append(", "        if not scaler.bad[optimizer]:\n            norms.append(")
            ),
            lost("watched", "keeps"),
        ),
        Wrong(
            "convicted of a scale that fits", convict('{"init_scale": 2.0**12}'), lost("watched", "convicts")
        ),
    ],
    "accumulated": [
        *common(
            "accumulated",
            f"{PLAIN}, parts=1, max_norm=1e4",
            off=((STEP, "optimizer.step()"), NO_UNSCALE),
        ),
        Wrong(
            "unscale_ in every part",
            mended(NO_UNSCALE, (SCALED, f"{SCALED}\n    {UNSCALE.rstrip()}")),
            lost("accumulated"),
        ),
        Wrong(
            "unscaled by hand in every part",
            mended(
                (
                    SCALED,
                    lines(
                        12,
                        SCALED,
                        "for p in model.parameters():",
                        "    p.grad = p.grad * (1 / scaler.get_scale())",
                    ),
                )
            ),
            lost("accumulated"),
        ),
        Wrong(
            "unscale_ before the last part",
            mended(
                NO_UNSCALE,
                (
                    PARTS,
                    lines(12, COUNTED, "if i == parts - 1 and i:", "    scaler.unscale_(optimizer)"),
                ),
            ),
            lost("accumulated"),
        ),
        Wrong("no unscale_ before the clipping", mended(NO_UNSCALE), lost("accumulated")),
        Wrong("unscale_ after the clipping", mended(NO_UNSCALE, (CLIP, CLIP + UNSCALE)), lost("accumulated")),
        Wrong(
            "a step for every part",
            mended(
                NO_UNSCALE,
                (CLIP, ""),
                (f"        {STEP}\n", ""),
                (UPDATE, ""),
                (
                    "            total += loss.item()\n",
                    lines(
                        12,
                        "            total += loss.item()",
                        "scaler.unscale_(optimizer)",
                        "clip_grad_norm_(model.parameters(), max_norm)",
                        "scaler.step(optimizer)",
                        "scaler.update()",
                        "optimizer.zero_grad()\n",
                    ),
                ),
            ),
            lost("accumulated"),
        ),
        Wrong(
            "update in every part, so that unscale_ is allowed again",
            mended(
                NO_UNSCALE,
                (UPDATE, ""),
                (
                    SCALED,
                    lines(
                        12, SCALED, "scaler.unscale_(optimizer)", "if i < parts - 1:", "    scaler.update()"
                    ),
                ),
                (
                    PARTS,
                    COUNTED,
                ),
                ("trace.append", "scaler.update()\n        trace.append"),
            ),
            lost("accumulated"),
        ),
        Wrong(
            "the sum of the parts' gradients, not their mean",
            mended((" / parts\n", "\n"), ("total, scaler", "total / parts, scaler")),
            lost("accumulated"),
        ),
        Wrong(
            "zero_grad in every part",
            mended(("            loss = ", "            optimizer.zero_grad()\n            loss = ")),
            lost("accumulated"),
        ),
        Wrong(
            "clipped in every part",
            mended(
                (CLIP, ""),
                (
                    SCALED,
                    f"{SCALED}\n            clip_grad_norm_(model.parameters(), max_norm * scaler.get_scale())",
                ),
            ),
            lost("accumulated"),
        ),
        Wrong(
            "the whole batch at once, without parts, and the loss of the last part",
            mended(("total += loss.item()", "total = loss.item()")),
            lost("accumulated"),
        ),
        Wrong(
            "convicted of one part", convict('{"parts": 1, "max_norm": 0.1}'), lost("accumulated", "convicts")
        ),
    ],
    "shared": [
        *common("shared", off=(("scaler.step(body)", "body.step()"), ("scaler.step(head)", "head.step()"))),
        Wrong(
            "update between the steps alone",
            mended((UPDATE, ""), ("        scaler.step(head)", f"{UPDATE}        scaler.step(head)")),
            lost("shared"),
        ),
        Wrong("update twice at the end", mended((UPDATE, UPDATE * 2)), lost("shared")),
        Wrong(
            "update before the steps",
            mended((UPDATE, ""), ("        scaler.step(body)", f"{UPDATE}        scaler.step(body)")),
            lost("shared"),
        ),
        Wrong(
            "a scaler for each optimizer, the loss scaled by the first",
            mended(
                (
                    "    scaler = GradScaler(init_scale, growth_interval)\n",
                    "    scaler, other = (GradScaler(init_scale, growth_interval) for _ in range(2))\n",
                ),
                ("scaler.step(head)\n", "other.step(head)\n        other.update()\n"),
            ),
            lost("shared"),
        ),
        Wrong(
            "one optimizer for all weights",
            mended(
                (
                    "body, head = SGD(model.parameters()[:2], lr), SGD(model.parameters()[2:], lr)",
                    "body = SGD(model.parameters(), lr)",
                ),
                ("        head.zero_grad()\n", ""),
                ("        scaler.step(head)\n", ""),
            ),
            lost("shared"),
        ),
        Wrong("the head is never stepped", mended(("        scaler.step(head)\n", "")), lost("shared")),
        Wrong(
            "the head's gradients are never cleared",
            mended(("        head.zero_grad()\n", "")),
            lost("shared"),
        ),
        Wrong(
            "twice the growth interval to make up for it",
            lambda reference: untouched(reference).replace(
                "GradScaler(init_scale, growth_interval)", "GradScaler(init_scale, 2 * growth_interval)"
            ),
            lost("shared"),
        ),
        Wrong(
            "convicted of a long growth interval",
            convict('{"growth_interval": 10_000}'),
            lost("shared", "convicts"),
        ),
    ],
    "tempered": [
        *common("tempered", f"{PLAIN}, temperature=1.0"),
        Wrong(
            "1e-8 is added before the logarithm, in float16",
            mended(
                (
                    "loss = cross_entropy(scores, y)",
                    "p = softmax(scores)\n        p.data = p.data + 1e-8\n        loss = nll_loss(log(p), y)",
                )
            ),
            lost("tempered"),
        ),
        Wrong(
            "probabilities are at least 1e-7",
            mended(
                (
                    "loss = cross_entropy(scores, y)",
                    "p = softmax(scores)\n        p.data = np.maximum(p.data, half(1e-7))\n        loss = nll_loss(log(p), y)",
                )
            ),
            lost("tempered"),
        ),
        Wrong(
            "only the logarithm is float32",
            mended(
                (
                    "loss = cross_entropy(scores, y)",
                    lines(
                        8,
                        "p = softmax(scores)",
                        "wide = Tensor(np.float32(p.data), ((p, half),))",
                        "loss = nll_loss(log(wide), y)",
                    ),
                )
            ),
            lost("tempered"),
        ),
        Wrong(
            "log of softmax in float32",
            mended(
                (
                    "loss = cross_entropy(scores, y)",
                    "wide = Tensor(np.float32(scores.data), ((scores, half),))\n        loss = nll_loss(log(softmax(wide)), y)",
                )
            ),
            lost("tempered"),
        ),
        Wrong(
            "the temperature is at least 0.25",
            mended(("/ temperature", "/ max(temperature, 0.25)")),
            lost("tempered"),
        ),
        Wrong(
            "the temperature divides the loss",
            mended(
                ("model(x) / temperature", "model(x)"),
                ("cross_entropy(scores, y)", "cross_entropy(scores, y) / temperature"),
            ),
            lost("tempered"),
        ),
        Wrong(
            "an infinite loss is reported as a large one",
            lambda reference: untouched(reference).replace(
                "trace.append((loss.item()", "trace.append((min(loss.item(), 1e4)"
            ),
            lost("tempered"),
        ),
        Wrong(
            "convicted of a high temperature", convict('{"temperature": 4.0}'), lost("tempered", "convicts")
        ),
    ],
    "resumed": [
        *common("resumed"),
        Wrong(
            "the scaler is saved and not loaded",
            mended(('        scaler.load_state_dict(checkpoint["scaler"])\n', "")),
            lost("resumed"),
        ),
        Wrong(
            "the scaler is loaded and not saved",
            mended((', "scaler": scaler.state_dict()', "")),
            lost("resumed"),
        ),
        Wrong(
            "the scale is saved, the count of good steps is not",
            mended(("scaler.state_dict()}", '{"now": scaler.get_scale(), "good": 0}}')),
            lost("resumed", "keeps"),
        ),
        Wrong(
            "the count is saved, the scale is not",
            mended(("scaler.state_dict()}", '{"now": init_scale, "good": scaler.good}}')),
            lost("resumed"),
        ),
        Wrong(
            "the scaler as it was before the first batch is saved",
            mended((LOOP, f"    state = scaler.state_dict()\n{LOOP}"), ("scaler.state_dict()}", "state}")),
            lost("resumed"),
        ),
        Wrong(
            "the momenta are lost",
            mended(('        optimizer.momenta = list(checkpoint["momenta"])\n', "")),
            lost("resumed"),
        ),
        Wrong("the weights are lost", mended(('MLP(checkpoint["model"])', "MLP(weights)")), lost("resumed")),
        Wrong(
            "the optimizer still has the weights of the first model",
            mended(("        optimizer = SGD(model.parameters(), lr)\n", "")),
            lost("resumed"),
        ),
        Wrong(
            "half the scale, to be on the safe side",
            mended(
                (
                    "scaler.load_state_dict(checkpoint",
                    'checkpoint["scaler"]["now"] /= 2\n        scaler.load_state_dict(checkpoint',
                )
            ),
            lost("resumed"),
        ),
        Wrong(
            "convicted of a run that is never interrupted",
            convict('{"init_scale": 2.0**20, "stop": 0}'),
            lost("resumed", "convicts"),
        ),
    ],
    "stored": [
        *common("stored", model="MLP([half(w) for w in weights])"),
        Wrong(
            "the masters are rounded to half after the step",
            mended(
                (
                    "p.data = half(master.data)",
                    "p.data = half(master.data)\n            master.data = np.float32(p.data)",
                )
            ),
            lost("stored"),
        ),
        Wrong(
            "the masters begin as half weights and are updated in half",
            mended(
                ("Tensor(np.float32(w))", "Tensor(half(w))"),
                ("[master.data for", "[np.float32(master.data) for"),
            ),
            lost("stored"),
        ),
        Wrong(
            "the optimizer works on the half weights",
            mended(
                ("SGD(masters, lr)", "SGD(model.parameters(), lr)"),
                ("p.data = half(master.data)", "master.data = np.float32(p.data)"),
            ),
            lost("stored"),
        ),
        Wrong(
            "the half weights are reported",
            mended(("[master.data for master in masters]", "model.weights()")),
            lost("stored"),
        ),
        Wrong(
            "the half weights are never renewed",
            mended(("p.data = half(master.data)", "pass")),
            lost("stored"),
        ),
        Wrong(
            "the half weights are renewed before the step",
            mended(
                (
                    "master.grad = np.float32(p.grad)",
                    "master.grad = np.float32(p.grad)\n            p.data = half(master.data)",
                ),
                ("            p.data = half(master.data)\n        trace", "            pass\n        trace"),
            ),
            lost("stored"),
        ),
        Wrong(
            "the old gradients stay",
            mended(("            p.grad = None\n", "            pass\n")),
            lost("stored"),
        ),
        Wrong(
            "a learning rate that float16 can see",
            lambda reference: untouched(reference).replace("SGD(masters, lr)", "SGD(masters, max(lr, 0.01))"),
            lost("stored"),
        ),
        Wrong(
            "convicted of a learning rate that is large enough",
            convict('{"lr": 0.1}'),
            lost("stored", "convicts"),
        ),
    ],
}
