"""Answers to exercise 5: right ones, each written in another way, and the misconceptions with the groups they lose."""

from grading.local import Wrong, instead

SMALL, MOMENTUM, DECAY, WRITE = (f"sgd_step_{group}" for group in ("small", "momentum", "decay", "write"))
FIRST, MEANS, RUN, ADAM_DECAY = (f"adam_step_{group}" for group in ("first", "means", "run", "decay"))
NEIGHBOURS, ODDS, INDEPENDENT = (
    f"stochastic_bits_{group}" for group in ("neighbours", "odds", "independent")
)
KAHAN_SMALL, ONCE, REMEMBERS = (f"kahan_step_{group}" for group in ("small", "once", "remembers"))

USED = 'bfloat16_values(state["compensation"])'  # as the reference's Kahan step reads it

RIGHT = {
    "sgd_step": [
        """
def sgd_step(state, grad, lr, momentum=0.0, weight_decay=0.0):
    w, b, g = (np.float64(a) for a in (state["master"], state["momentum"], grad))  # better than float32
    b = b * momentum + g + w * weight_decay
    w = np.float32(w - b * lr)
    return dict(momentum=np.float32(b), master=w, weight=np.float16(w))
""",
        """
def sgd_step(state, grad, lr, momentum=0.0, weight_decay=0.0):
    new = {name: value.copy() for name, value in state.items()}
    scratch = np.multiply(new["master"], np.float32(weight_decay))
    scratch += grad
    new["momentum"] *= np.float32(momentum)
    new["momentum"] += scratch
    np.multiply(new["momentum"], np.float32(lr), out=scratch)
    new["master"] -= scratch
    new["weight"][...] = new["master"]  # rounds
    return new
""",
        """
def _master(w, step, lr):
    return np.subtract(w, np.multiply(step, lr, dtype=np.float32), dtype=np.float32)

def sgd_step(state, grad, lr, momentum=0.0, weight_decay=0.0):
    w = state["master"]
    d = grad.astype("f4")
    if weight_decay:
        d = d + np.float32(weight_decay) * w
    b = state["momentum"] * np.float32(momentum) + d if momentum else d
    w = _master(w, b, lr)
    return {"weight": w.astype("f2"), "master": w, "momentum": b}
""",
    ],
    "adam_step": [
        """
def adam_step(state, grad, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
    # torch's order: the corrections go into the step size and the denominator
    t, w = int(state["step"]) + 1, state["master"]
    d = np.float32(grad)
    if weight_decay != 0:
        d = d + weight_decay * w
    m = state["exp_avg"] + (d - state["exp_avg"]) * (1 - betas[0])
    v = state["exp_avg_sq"] * betas[1] + (1 - betas[1]) * (d * d)
    denominator = np.sqrt(v) / (1 - betas[1] ** t) ** 0.5 + eps
    w = w - (lr / (1 - betas[0] ** t)) * (m / denominator)
    return {"step": t, "weight": np.float16(w), "master": w, "exp_avg": m, "exp_avg_sq": v}
""",
        """
def adam_step(state, grad, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
    new = {k: np.float64(a) for k, a in state.items()}  # better than float32
    new["step"] = t = state["step"] + 1
    g = grad + weight_decay * new["master"]
    for name, beta, x in (("exp_avg", betas[0], g), ("exp_avg_sq", betas[1], g**2)):
        new[name] = beta * new[name] + (1 - beta) * x
    m, v = new["exp_avg"] / (1 - betas[0] ** t), new["exp_avg_sq"] / (1 - betas[1] ** t)
    new["master"] = np.float32(new["master"] - lr * m / (v**0.5 + eps))
    new["weight"] = new["master"].astype(np.float16)
    for name in ("exp_avg", "exp_avg_sq"):
        new[name] = new[name].astype(np.float32)
    return new
""",
        """
def adam_step(state, grad, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
    one, (b1, b2) = np.float32(1), (np.float32(b) for b in betas)  # float32 all through
    t = state["step"] + np.int64(1)
    g = grad.astype(np.float32)
    g += np.float32(weight_decay) * state["master"]
    m = b1 * state["exp_avg"]
    m += (one - b1) * g
    v = b2 * state["exp_avg_sq"]
    v += (one - b2) * np.square(g)
    update = np.sqrt(v / (one - b2 ** np.float32(t)))
    update += np.float32(eps)
    update = m / (one - b1 ** np.float32(t)) / update
    w = state["master"] - np.float32(lr) * update
    return {"weight": w.astype(np.float16), "master": w, "exp_avg": m, "exp_avg_sq": v, "step": t}
""",
    ],
    "stochastic_bits": [
        """
def stochastic_bits(x, seed):
    # a uniform number against the part of a step that lies above the lower neighbour
    bits = x.view(np.uint32)
    part = (bits & 0xFFFF) / 65536
    up = np.random.default_rng(seed).random(x.shape) < part
    return (bits >> 16).astype(np.uint16) + up.astype(np.uint16)
""",
        """
def stochastic_bits(x, seed):
    # by value: the step of the format from the exponent, then floor
    wide = np.float64(x)
    exponent = np.maximum(np.frexp(wide)[1] - 1, -126)
    steps = np.ldexp(wide, 7 - exponent)
    low = np.floor(steps)
    low += np.random.default_rng(seed).uniform(size=x.shape) < steps - low
    value = np.copysign(np.ldexp(low, exponent - 7), wide).astype(np.float32)
    return (value.view(np.uint32) >> 16).astype(np.uint16)
""",
        """
def stochastic_bits(x, seed):
    # the older generator, value by value
    random = np.random.RandomState(seed)
    noise = random.randint(65536, size=x.size)
    out = np.empty(x.size, np.uint16)
    for i, (bits, n) in enumerate(zip(x.view(np.uint32).ravel().tolist(), noise.tolist())):
        out[i] = (bits >> 16) + ((bits & 0xFFFF) > n)
    return out.reshape(x.shape)
""",
    ],
    "kahan_step": [
        """
def kahan_step(state, update):
    # as in a textbook: y = x - c, t = s + y, c = (t - s) - y
    s, c = bfloat16_values(state["weight"]), bfloat16_values(state["compensation"])
    y = np.float64(-update) - c
    t = bfloat16_bits(s + y)
    c = (bfloat16_values(t) - np.float64(s)) - y
    return {"weight": t, "compensation": bfloat16_bits(c)}
""",
        """
def kahan_step(state, update):
    new = {name: bits.copy() for name, bits in state.items()}
    t = np.subtract(bfloat16_values(state["weight"]), bfloat16_values(state["compensation"]))
    t -= update
    new["weight"][...] = bfloat16_bits(t)
    np.subtract(bfloat16_values(new["weight"]), t, out=t)
    new["compensation"][...] = bfloat16_bits(t)
    return new
""",
        """
def _round(x):
    # the multiple of the format's step that is nearest, ties to even
    step = np.ldexp(1.0, np.frexp(x)[1] - 8)
    return np.round(x / step) * step

def _bits(x):
    return (np.float32(x).view(np.uint32) >> 16).astype(np.uint16)

def kahan_step(state, update):
    w, c = (np.float64(bfloat16_values(state[name])) for name in ("weight", "compensation"))
    t = w - (c + update)
    w = _round(t)
    return {"weight": _bits(w), "compensation": _bits(_round(w - t))}
""",
    ],
}

WRONG = {
    "sgd_step": [
        Wrong(
            "the master is made anew from the half weight in each step",
            instead('master, g = state["master"],', 'master, g = state["weight"].astype(np.float32),'),
            frozenset({SMALL, MOMENTUM, DECAY}),
        ),
        Wrong(
            "the gradient stays float16, and so does lr times it",
            """
def sgd_step(state, grad, lr, momentum=0.0, weight_decay=0.0):
    buffer = momentum * state["momentum"] + (grad + weight_decay * state["master"])
    master = state["master"] - (lr * grad if not momentum else lr * buffer)
    return {"weight": master.astype(np.float16), "master": master, "momentum": buffer}
""",
            frozenset({SMALL}),
        ),
        Wrong(
            "the update is rounded to float16 and then added to the master",
            instead("master = master - lr * buffer", "master = master - (lr * buffer).astype(np.float16)"),
            frozenset({SMALL, MOMENTUM, DECAY}),
        ),
        Wrong(
            "the momentum is kept in half",
            instead(
                "buffer = momentum",
                'state = state | {"momentum": state["momentum"].astype(np.float16)}\n    buffer = momentum',
            ),
            frozenset({MOMENTUM, DECAY}),
        ),
        Wrong(
            "the momentum is a float16 array",
            instead('"momentum": buffer', '"momentum": buffer.astype(np.float16)'),
            frozenset({SMALL, MOMENTUM, DECAY, WRITE}),
        ),
        Wrong(
            "weight decay is decoupled as in AdamW",
            """
def sgd_step(state, grad, lr, momentum=0.0, weight_decay=0.0):
    buffer = momentum * state["momentum"] + grad.astype(np.float32)
    master = state["master"] * np.float32(1 - lr * weight_decay) - lr * buffer
    return {"weight": master.astype(np.float16), "master": master, "momentum": buffer}
""",
            frozenset({DECAY}),
        ),
        Wrong(
            "weight decay acts on the half weight",
            instead("weight_decay * master", 'weight_decay * state["weight"].astype(np.float32)'),
            frozenset({DECAY}),
        ),
        Wrong("weight decay is forgotten", instead(" + weight_decay * master", ""), frozenset({DECAY})),
        Wrong(
            "the decay is taken twice, in the gradient and in the weight",
            instead("master = master - lr", "master = master * np.float32(1 - lr * weight_decay) - lr"),
            frozenset({DECAY}),
        ),
        Wrong(
            "lr is inside the momentum, so that a new lr does not act on old gradients",
            """
def sgd_step(state, grad, lr, momentum=0.0, weight_decay=0.0):
    master = state["master"]
    buffer = momentum * state["momentum"] + lr * (grad.astype(np.float32) + weight_decay * master)
    master = master - buffer
    return {"weight": master.astype(np.float16), "master": master, "momentum": buffer}
""",
            frozenset({MOMENTUM}),
        ),
        Wrong(
            "the momentum is a running mean",
            instead("+ direction", "+ (1 - momentum) * direction"),
            frozenset({MOMENTUM, DECAY}),
        ),
        Wrong(
            "Nesterov momentum",
            instead("lr * buffer", "lr * (direction + momentum * buffer)"),
            frozenset({MOMENTUM, DECAY}),
        ),
        Wrong(
            "the weights move by the old momentum",
            instead("lr * buffer", 'lr * state["momentum"]'),
            frozenset({SMALL, MOMENTUM, DECAY, WRITE}),
        ),
        Wrong(
            "the write-back rounds toward zero",
            instead(
                '"weight": master.astype(np.float16)',
                '"weight": (master.view(np.uint32) & 0xFFFFE000).view(np.float32).astype(np.float16)',
            ),
            frozenset({WRITE}),
        ),
        Wrong(
            "ties are rounded away from zero",
            instead(
                '"weight": master.astype(np.float16)',
                '"weight": ((master.view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32).astype(np.float16)',
            ),
            frozenset({WRITE}),
        ),
        Wrong(
            "the weight is updated in half, and the master is another number",
            instead(
                '"weight": master.astype(np.float16)',
                '"weight": state["weight"] - (lr * buffer).astype(np.float16)',
            ),
            frozenset({WRITE}),
        ),
        Wrong(
            "the state is changed in place",
            """
def sgd_step(state, grad, lr, momentum=0.0, weight_decay=0.0):
    g = grad.astype(np.float32) + weight_decay * state["master"]
    state["momentum"][...] = momentum * state["momentum"] + g
    state["master"] -= lr * state["momentum"]
    state["weight"][...] = state["master"]
    return state
""",
            frozenset({WRITE}),
        ),
        Wrong(
            "the master is rounded to half as well",
            instead("    return", "    master = master.astype(np.float16).astype(np.float32)\n    return"),
            frozenset({SMALL, MOMENTUM, DECAY}),
        ),
    ],
    "adam_step": [
        Wrong(
            "the master is made anew from the half weight in each step",
            instead(
                'step, master = state["step"] + 1, state["master"]',
                'step, master = state["step"] + 1, state["weight"].astype(np.float32)',
            ),
            frozenset({RUN, ADAM_DECAY}),
        ),
        Wrong(
            "g times g in half",
            instead("(1 - beta2) * g * g", "(1 - beta2) * (grad * grad).astype(np.float32)"),
            frozenset({FIRST, MEANS, RUN, ADAM_DECAY}),
        ),
        Wrong(
            "the gradient stays float16 when there is no decay",
            instead(
                "g = grad.astype(np.float32) + weight_decay * master",
                "g = grad + weight_decay * master if weight_decay else grad",
            ),
            frozenset({FIRST, MEANS, RUN}),
        ),
        Wrong(
            "the means are kept in half",
            instead(
                "    m_hat, v_hat",
                "    m, v = (a.astype(np.float16).astype(np.float32) for a in (m, v))\n    m_hat, v_hat",
            ),
            frozenset({FIRST, MEANS, RUN, ADAM_DECAY}),
        ),
        Wrong(
            "eps is a float16 number and so 0",
            instead("+ eps", "+ np.float16(eps)"),
            frozenset({FIRST, RUN}),
        ),
        Wrong(
            "the denominator is formed in half",
            instead("(np.sqrt(v_hat) + eps)", "(np.sqrt(v_hat).astype(np.float16) + eps).astype(np.float32)"),
            frozenset({FIRST, RUN, ADAM_DECAY}),
        ),
        Wrong(
            "eps inside the root",
            instead("np.sqrt(v_hat) + eps", "np.sqrt(v_hat + eps)"),
            frozenset({FIRST, RUN}),
        ),
        Wrong(
            "eps is added before the bias is corrected",
            instead("(np.sqrt(v_hat) + eps)", "((np.sqrt(v) + eps) / np.float32(1 - beta2**step) ** 0.5)"),
            frozenset({FIRST, RUN}),
        ),
        Wrong(
            "no bias correction",
            instead("m_hat, v_hat = m / (1 - beta1**step), v / (1 - beta2**step)", "m_hat, v_hat = m, v"),
            frozenset({FIRST, RUN, ADAM_DECAY}),
        ),
        Wrong(
            "the bias of the second mean is not corrected",
            instead("v / (1 - beta2**step)", "v"),
            frozenset({FIRST, RUN, ADAM_DECAY}),
        ),
        Wrong(
            "bias correction with the number of steps before this one",
            instead(
                "m / (1 - beta1**step), v / (1 - beta2**step)",
                "m / (1 - beta1 ** (step - 1)), v / (1 - beta2 ** (step - 1))",
            ),
            frozenset({FIRST, MEANS, RUN, ADAM_DECAY}),
        ),
        Wrong(
            "bias correction one step ahead",
            instead(
                "m / (1 - beta1**step), v / (1 - beta2**step)",
                "m / (1 - beta1 ** (step + 1)), v / (1 - beta2 ** (step + 1))",
            ),
            frozenset({FIRST, RUN, ADAM_DECAY}),
        ),
        Wrong(
            "the step is not counted",
            instead('"step": step', '"step": state["step"]'),
            frozenset({FIRST, RUN, ADAM_DECAY}),
        ),
        Wrong(
            "decoupled weight decay, which is AdamW",
            """
def adam_step(state, grad, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
    beta1, beta2 = betas
    step, master, g = state["step"] + 1, state["master"], grad.astype(np.float32)
    m = beta1 * state["exp_avg"] + (1 - beta1) * g
    v = beta2 * state["exp_avg_sq"] + (1 - beta2) * g * g
    master = master * np.float32(1 - lr * weight_decay)
    master = master - lr * (m / (1 - beta1**step)) / (np.sqrt(v / (1 - beta2**step)) + eps)
    return {"weight": master.astype(np.float16), "master": master, "exp_avg": m, "exp_avg_sq": v, "step": step}
""",
            frozenset({ADAM_DECAY}),
        ),
        Wrong(
            "weight decay acts on the half weight",
            instead("weight_decay * master", 'weight_decay * state["weight"].astype(np.float32)'),
            frozenset({ADAM_DECAY}),
        ),
        Wrong("weight decay is forgotten", instead(" + weight_decay * master", ""), frozenset({ADAM_DECAY})),
        Wrong(
            "the step is rounded to float16 and then added to the master",
            instead(
                "lr * m_hat / (np.sqrt(v_hat) + eps)",
                "(lr * m_hat / (np.sqrt(v_hat) + eps)).astype(np.float16)",
            ),
            frozenset({FIRST, RUN, ADAM_DECAY}),
        ),
        Wrong(
            "beta1 for both means",
            instead("beta1, beta2 = betas", "beta1, beta2 = betas[0], betas[0]"),
            frozenset({MEANS, RUN, ADAM_DECAY}),
        ),
        Wrong(
            "the gradient in place of its mean",
            instead("m_hat / (np", "g / (np"),
            frozenset({RUN, ADAM_DECAY}),
        ),
        Wrong("no root", instead("np.sqrt(v_hat) + eps", "v_hat + eps"), frozenset({FIRST, RUN, ADAM_DECAY})),
        Wrong(
            "the write-back rounds toward zero",
            instead(
                '"weight": master.astype(np.float16)',
                '"weight": (master.view(np.uint32) & 0xFFFFE000).view(np.float32).astype(np.float16)',
            ),
            frozenset({RUN}),
        ),
        Wrong(
            "the state is changed in place",
            """
def adam_step(state, grad, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
    beta1, beta2 = betas
    state["step"] += 1
    g = grad.astype(np.float32) + weight_decay * state["master"]
    state["exp_avg"] *= beta1
    state["exp_avg"] += (1 - beta1) * g
    state["exp_avg_sq"] *= beta2
    state["exp_avg_sq"] += (1 - beta2) * g * g
    m_hat = state["exp_avg"] / (1 - beta1 ** state["step"])
    v_hat = state["exp_avg_sq"] / (1 - beta2 ** state["step"])
    state["master"] -= lr * m_hat / (np.sqrt(v_hat) + eps)
    state["weight"][...] = state["master"]
    return state
""",
            frozenset({FIRST}),
        ),
    ],
    "stochastic_bits": [
        Wrong(
            "nearest, no chance at all",
            "def stochastic_bits(x, seed):\n    return bfloat16_bits(x)\n",
            frozenset({ODDS, INDEPENDENT}),
        ),
        Wrong(
            "the lower half is cut off",
            "def stochastic_bits(x, seed):\n    return (x.view(np.uint32) >> 16).astype(np.uint16)\n",
            frozenset({ODDS, INDEPENDENT}),
        ),
        Wrong(
            "half a step is added before the random number",
            instead("bits + noise", "bits + 0x8000 + noise // 2"),
            frozenset({ODDS, INDEPENDENT}),
        ),
        Wrong(
            "noise of a whole step on top of rounding to nearest",
            instead(
                "return ((bits + noise) >> 16).astype(np.uint16)",
                "return bfloat16_bits((bits + noise).view(np.float32))",
            ),
            frozenset({NEIGHBOURS, ODDS, INDEPENDENT}),
        ),
        Wrong(
            "noise of half a step",
            instead("integers(0, 2**16", "integers(0, 2**15"),
            frozenset({ODDS, INDEPENDENT}),
        ),
        Wrong(
            "the same random number for all values",
            instead("integers(0, 2**16, x.shape, dtype=np.uint32)", "integers(0, 2**16, dtype=np.uint32)"),
            frozenset({ODDS, INDEPENDENT}),
        ),
        Wrong(
            "a random number for each row",
            instead("x.shape, dtype=np.uint32)", "x.shape[:1] + (1,) * (x.ndim - 1), dtype=np.uint32)"),
            frozenset({INDEPENDENT}),
        ),
        Wrong(
            "a random number for each column",
            instead("x.shape, dtype=np.uint32)", "x.shape[-1:], dtype=np.uint32)"),
            frozenset({INDEPENDENT}),
        ),
        Wrong(
            "only ties are rounded by chance",
            """
def stochastic_bits(x, seed):
    bits = x.view(np.uint32)
    coin = np.random.default_rng(seed).integers(0, 2, x.shape, dtype=np.uint32)
    return np.where(bits & 0xFFFF == 0x8000, (bits >> 16) + coin, bfloat16_bits(x)).astype(np.uint16)
""",
            frozenset({ODDS}),
        ),
        Wrong(
            "a coin decides between the neighbours",
            """
def stochastic_bits(x, seed):
    bits = x.view(np.uint32)
    coin = np.random.default_rng(seed).integers(0, 2, x.shape, dtype=np.uint32)
    return ((bits >> 16) + coin * (bits & 0xFFFF != 0)).astype(np.uint16)
""",
            frozenset({ODDS}),
        ),
        Wrong(
            "negative numbers get the odds of the other neighbour",
            """
def stochastic_bits(x, seed):
    bits = x.view(np.uint32)
    part = (bits & 0xFFFF) / 65536
    part = np.where((x < 0) & (part > 0), 1 - part, part)  # up is toward zero here, and the bits count away from it
    return ((bits >> 16) + (np.random.default_rng(seed).random(x.shape) < part)).astype(np.uint16)
""",
            frozenset({ODDS}),
        ),
        Wrong(
            "negative numbers go toward zero, one step too far",
            """
def stochastic_bits(x, seed):
    bits = x.view(np.uint32)
    up = np.random.default_rng(seed).random(x.shape) < (bits & 0xFFFF) / 65536
    return ((bits >> 16) + np.where(x < 0, -1, 1) * up).astype(np.uint16)
""",
            frozenset({NEIGHBOURS, ODDS}),
        ),
        Wrong(
            "the sign is lost",
            instead("bits = x.view(np.uint32)", "bits = np.abs(x).view(np.uint32)"),
            frozenset({NEIGHBOURS, ODDS, INDEPENDENT}),
        ),
        Wrong(
            "the wrong way round, with the odds of the other neighbour",
            """
def stochastic_bits(x, seed):
    bits = x.view(np.uint32)
    up = np.random.default_rng(seed).random(x.shape) > (bits & 0xFFFF) / 65536
    return ((bits >> 16) + up * (bits & 0xFFFF != 0)).astype(np.uint16)
""",
            frozenset({ODDS}),
        ),
        Wrong("the seed is not used", instead("default_rng(seed)", "default_rng()"), frozenset({NEIGHBOURS})),
        Wrong(
            "every seed gives the same noise",
            instead("default_rng(seed)", "default_rng(0)"),
            frozenset({INDEPENDENT}),
        ),
        Wrong(
            "noise in proportion to the value",
            """
def stochastic_bits(x, seed):
    noise = np.random.default_rng(seed).uniform(-0.5, 0.5, x.shape).astype(np.float32)
    return bfloat16_bits(x * (1 + noise * np.float32(2.0**-7)))
""",
            frozenset({NEIGHBOURS, ODDS}),
        ),
        Wrong(
            "values are returned instead of bits",
            instead(
                "return ((bits + noise) >> 16).astype(np.uint16)",
                "return bfloat16_values((bits + noise) >> 16)",
            ),
            frozenset({NEIGHBOURS, ODDS, INDEPENDENT}),
        ),
    ],
    "kahan_step": [
        Wrong(
            "the compensation is added to the weight",
            instead(
                'bfloat16_values(state["weight"]) - bfloat16_values(state["compensation"])',
                'bfloat16_values(state["weight"]) + bfloat16_values(state["compensation"])',
            ),
            frozenset({KAHAN_SMALL, ONCE, REMEMBERS}),
        ),
        Wrong(
            "the compensation is kept with the other sign, and used with it",
            """
def kahan_step(state, update):
    meant = bfloat16_values(state["weight"]) + bfloat16_values(state["compensation"]) - update
    weight = bfloat16_bits(meant)
    return {"weight": weight, "compensation": bfloat16_bits(meant - bfloat16_values(weight))}
""",
            frozenset({KAHAN_SMALL, ONCE, REMEMBERS}),
        ),
        Wrong(
            "the compensation is kept with the other sign",
            instead("bfloat16_values(weight) - meant", "meant - bfloat16_values(weight)"),
            frozenset({KAHAN_SMALL, ONCE, REMEMBERS}),
        ),
        Wrong(
            "no compensation",
            """
def kahan_step(state, update):
    weight = bfloat16_bits(bfloat16_values(state["weight"]) - update)
    return {"weight": weight, "compensation": state["compensation"].copy()}
""",
            frozenset({KAHAN_SMALL, ONCE, REMEMBERS}),
        ),
        Wrong(
            "the compensation is kept and never used",
            instead(' - bfloat16_values(state["compensation"])', ""),
            frozenset({KAHAN_SMALL, ONCE, REMEMBERS}),
        ),
        Wrong(
            "what rounding adds is added to the old compensation",
            instead(
                "bfloat16_bits(bfloat16_values(weight) - meant)",
                'bfloat16_bits(bfloat16_values(state["compensation"]) + bfloat16_values(weight) - meant)',
            ),
            frozenset({KAHAN_SMALL, ONCE, REMEMBERS}),
        ),
        Wrong(
            "the compensation is subtracted from the weight and rounded before the update",
            instead(
                f'bfloat16_values(state["weight"]) - {USED} - update',
                f'bfloat16_values(bfloat16_bits(bfloat16_values(state["weight"]) - {USED})) - update',
            ),
            frozenset({KAHAN_SMALL, ONCE, REMEMBERS}),
        ),
        Wrong(
            "the update is rounded to bfloat16 first",
            instead("- update", "- bfloat16_values(bfloat16_bits(update))"),
            frozenset({ONCE}),
        ),
        Wrong(
            "the weight is rounded toward zero",
            instead(
                "weight = bfloat16_bits(meant)", "weight = (meant.view(np.uint32) >> 16).astype(np.uint16)"
            ),
            frozenset({KAHAN_SMALL, ONCE}),
        ),
        Wrong(
            "the compensation forgets this update, because it compares with the old weight",
            instead("bfloat16_values(weight) - meant", 'bfloat16_values(state["weight"]) - meant - update'),
            frozenset({KAHAN_SMALL, ONCE, REMEMBERS}),
        ),
        Wrong(
            "the compensation holds float16 bits",
            instead(
                '"compensation": bfloat16_bits(bfloat16_values(weight) - meant)',
                '"compensation": (bfloat16_values(weight) - meant).astype(np.float16).view(np.uint16)',
            ),
            frozenset({KAHAN_SMALL, ONCE, REMEMBERS}),
        ),
        Wrong(
            "the compensation is a float32 array",
            instead(
                '"compensation": bfloat16_bits(bfloat16_values(weight) - meant)',
                '"compensation": bfloat16_values(weight) - meant',
            ),
            frozenset({KAHAN_SMALL, ONCE, REMEMBERS}),
        ),
        Wrong(
            "the update is added",
            instead("- update", "+ update"),
            frozenset({KAHAN_SMALL, ONCE, REMEMBERS}),
        ),
        Wrong(
            "the state is changed in place",
            """
def kahan_step(state, update):
    meant = bfloat16_values(state["weight"]) - bfloat16_values(state["compensation"]) - update
    state["weight"][...] = bfloat16_bits(meant)
    state["compensation"][...] = bfloat16_bits(bfloat16_values(state["weight"]) - meant)
    return state
""",
            frozenset({ONCE}),
        ),
        Wrong(
            "compensations below a thousandth are ignored",
            instead(USED, f"np.where(np.abs({USED}) > 1e-3, {USED}, np.float32(0))"),
            frozenset({KAHAN_SMALL, ONCE, REMEMBERS}),
        ),
    ],
}
