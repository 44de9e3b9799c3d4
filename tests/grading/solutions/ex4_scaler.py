"""Answers to try on exercise 4: right ones written differently, and the misconceptions that its tests must see."""

from grading.local import Wrong, changed, groups, instead

UNSCALE, UPDATE, SCALER, LOOP = "unscale", "update_scale", "GradScaler", "train_iteration"


RIGHT = {
    UNSCALE: [
        '''
def unscale(grads, scale):
    """Divides instead of multiplying by the inverse: the same for a power of two."""
    unscaled = [None if g is None else np.divide(g, np.float32(scale), dtype=np.float32) for g in grads]
    return unscaled, not all(np.isfinite(g).all() for g in unscaled if g is not None)
''',
        '''
def unscale(grads, scale):
    """In float64, with one rounding at the end, and two looks."""
    found_inf, answer = 0.0, []
    for g in grads:
        if g is None:
            answer.append(None)
            continue
        wide = np.array(g, dtype=np.float64) * (1 / scale)
        new = wide.astype(np.float32)
        for array in (g, new):
            if np.any(np.isnan(array) | np.isinf(array)):
                found_inf = 1.0
        answer.append(new)
    return answer, found_inf
''',
        '''
def unscale(grads, scale):
    """The bits: an exponent field of all ones is inf or NaN. ldexp moves the exponent."""
    power = int(np.log2(scale))
    found, answer = [], []
    for g in grads:
        g = g if g is None else np.ldexp(g.astype("f4"), -power)
        if g is not None:
            found.append(bool(((g.view(np.uint32) & 0x7F800000) == 0x7F800000).any()))
        answer.append(g)
    return (answer, any(found))
''',
    ],
    UPDATE: [
        '''
def update_scale(state, found_inf):
    """Counting the good ones, with >= and a look by NumPy."""
    new = dict(state)
    if found_inf:
        new["scale"] *= new["backoff_factor"]
        new["_growth_tracker"] = 0
        return new
    new["_growth_tracker"] += 1
    if new["_growth_tracker"] >= new["growth_interval"]:
        new["_growth_tracker"] = 0
        grown = np.float32(new["scale"] * new["growth_factor"])
        if np.isfinite(grown):
            new["scale"] = float(grown)
    return new
''',
        '''
def update_scale(state, found_inf):
    """All in float32."""
    scale = np.float32(state["scale"])
    row = 0 if found_inf else (state["_growth_tracker"] + 1) % state["growth_interval"]
    if found_inf:
        scale = scale * np.float32(state["backoff_factor"])
    elif row == 0:
        grown = scale * np.float32(state["growth_factor"])
        scale = scale if np.isinf(grown) else grown
    return state | {"scale": scale, "_growth_tracker": row}
''',
        '''
def update_scale(state, found_inf):
    """Exponents of two: float32 ends below 2**128."""
    power = np.log2(state["scale"])
    up, down = np.log2(state["growth_factor"]), np.log2(state["backoff_factor"])
    complete = state["_growth_tracker"] + 1 == state["growth_interval"]
    power += down if found_inf else up if complete and power + up < 128 else 0
    answer = {key: state[key] for key in ("growth_factor", "backoff_factor", "growth_interval")}
    answer["scale"] = float(2.0**power)
    answer["_growth_tracker"] = 0 if found_inf or complete else state["_growth_tracker"] + 1
    return answer
''',
    ],
    SCALER: [
        '''
class GradScaler:
    """A record for each optimizer, as in PyTorch: its stage and what was found."""

    def __init__(self, init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000):
        self._scale, self.growth_factor, self.backoff_factor = init_scale, growth_factor, backoff_factor
        self.growth_interval, self._growth_tracker, self.records = growth_interval, 0, {}

    def record(self, optimizer):
        return self.records.setdefault(id(optimizer), {"stage": "ready", "found": False})

    def get_scale(self):
        return float(self._scale)

    def scale(self, loss):
        return loss * float(self._scale)

    def unscale_(self, optimizer):
        record = self.record(optimizer)
        if record["stage"] != "ready":
            raise RuntimeError("unscale_ comes once, and before step")
        record["stage"] = "unscaled"
        new, record["found"] = unscale([p.grad for p in optimizer.params], self._scale)
        for p, g in zip(optimizer.params, new):
            p.grad = g

    def step(self, optimizer):
        record = self.record(optimizer)
        if record["stage"] == "stepped":
            raise RuntimeError("step comes once")
        if record["stage"] == "ready":
            self.unscale_(optimizer)
        record["stage"] = "stepped"
        if not record["found"]:
            return optimizer.step()

    def update(self):
        found = sum(record["found"] for record in self.records.values()) > 0
        self.load_state_dict(update_scale(self.state_dict(), found))
        self.records.clear()

    def state_dict(self):
        return {
            "scale": self.get_scale(),
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": self._growth_tracker,
        }

    def load_state_dict(self, state):
        self._scale, self.growth_factor, self.backoff_factor = (state[k] for k in list(self.state_dict())[:3])
        self.growth_interval, self._growth_tracker = state["growth_interval"], state["_growth_tracker"]
''',
        '''
class GradScaler:
    """Without the functions of tasks 1 and 2, in place, in float32."""

    def __init__(self, init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000):
        self.s, self.count, self.bad = np.float32(init_scale), 0, False
        self.rule = growth_factor, backoff_factor, growth_interval
        self.unscaled, self.stepped = [], []

    def get_scale(self):
        return self.s.item()

    def scale(self, loss):
        return loss * self.s.item()

    def unscale_(self, optimizer):
        if any(optimizer is other for other, _ in self.unscaled):
            raise RuntimeError("once")
        bad = False
        for p in optimizer.params:
            if p.grad is not None:
                p.grad = p.grad.astype(np.float32)
                p.grad /= self.s
                bad |= bool(~np.isfinite(p.grad).all())
        self.unscaled.append((optimizer, bad))

    def step(self, optimizer):
        if optimizer in self.stepped:
            raise RuntimeError("once")
        if optimizer not in [other for other, _ in self.unscaled]:
            self.unscale_(optimizer)
        self.stepped.append(optimizer)
        if dict(self.unscaled)[optimizer]:
            return None
        return optimizer.step()

    def update(self):
        growth, backoff, interval = self.rule
        if any(bad for _, bad in self.unscaled):
            self.s, self.count = np.float32(self.s * backoff), 0
        else:
            self.count += 1
            if self.count == interval:
                self.s, self.count = np.float32(self.s * growth), 0
        self.unscaled, self.stepped = [], []

    def state_dict(self):
        keys = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
        return dict(zip(keys, (self.s.item(), *self.rule, self.count)))

    def load_state_dict(self, state):
        self.s, self.count = np.float32(state["scale"]), state["_growth_tracker"]
        self.rule = tuple(state[k] for k in ("growth_factor", "backoff_factor", "growth_interval"))
''',
        '''
class GradScaler:
    """The stages are methods' names that are still allowed."""

    def __init__(self, init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000):
        self.load_state_dict(
            dict(
                scale=init_scale,
                growth_factor=growth_factor,
                backoff_factor=backoff_factor,
                growth_interval=growth_interval,
                _growth_tracker=0,
            )
        )

    def load_state_dict(self, state):
        self.__dict__.update(state={**state}, allowed={}, found=[], bad=set())

    def state_dict(self):
        return {**self.state}

    def get_scale(self):
        return self.state["scale"]

    def scale(self, loss):
        return self.state["scale"] * loss

    def take(self, optimizer, call):
        calls = self.allowed.setdefault(optimizer, {"unscale_", "step"})
        if call not in calls:
            raise RuntimeError(call + " at the wrong time")
        calls -= {call, "unscale_"}

    def unscale_(self, optimizer):
        self.take(optimizer, "unscale_")
        grads, found = unscale([p.grad for p in optimizer.params], self.state["scale"])
        for p, p.grad in zip(optimizer.params, grads):
            pass
        self.found.append(found)
        if found:
            self.bad.add(optimizer)

    def step(self, optimizer):
        if "unscale_" in self.allowed.get(optimizer, {"unscale_"}):
            self.unscale_(optimizer)
        self.take(optimizer, "step")
        return None if optimizer in self.bad else optimizer.step()

    def update(self):
        self.load_state_dict(update_scale(self.state, True in self.found))
''',
    ],
    LOOP: [
        '''
def train_iteration(scaler, optimizers, batches, clip, max_norm):
    """In phases, with a loss that is scaled first and divided afterwards."""
    [optimizer.zero_grad() for optimizer in optimizers]
    for batch in batches:
        loss = scaler.scale(batch())
        loss = loss / len(batches)
        loss.backward()
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    for optimizer in optimizers:
        clip(optimizer, max_norm)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
''',
        '''
def train_iteration(scaler, optimizers, batches, clip, max_norm):
    """Gradients are dropped before and after; all forwards weighted by a factor."""
    weight = 1.0 / len(batches)
    for optimizer in optimizers:
        optimizer.zero_grad()
    for batch in batches:
        scaler.scale(weight * batch()).backward()
    for optimizer in reversed(optimizers):
        scaler.unscale_(optimizer)
        clip(optimizer, max_norm)
        made = scaler.step(optimizer)
        if made:
            optimizer.zero_grad()
    scaler.update()
    return None
''',
        '''
def train_iteration(scaler, optimizers, batches, clip, max_norm):
    """Gradients are dropped when the first loss is there; steps at the last micro-batch."""
    for i, batch in enumerate(batches):
        loss = batch() * (1 / len(batches))
        if i == 0:
            for optimizer in optimizers:
                optimizer.zero_grad()
        scaler.scale(loss).backward()
        del loss
        if i + 1 == len(batches):
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
                clip(optimizer, max_norm)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
''',
    ],
}

FINITE = "not np.isfinite(g).all()"
APPEND = "        unscaled.append(g)"
QUOTIENT = "g.astype(np.float32) * inverse"
FULL = 'tracker == state["growth_interval"]'
GROWTH = 'scale * state["growth_factor"], 0'
BACKOFF = 'scale * state["backoff_factor"]'
FITS = "if larger <= float(np.finfo(np.float32).max):"

UNSCALE_FIRST = "if optimizer not in self.found:\n            self.unscale_(optimizer)"
REFUSE_UNSCALE = """        if optimizer in self.found:
            raise RuntimeError("unscale_: call it once between two updates, and before step")
"""
SKIP = "if self.found[optimizer]:"
UPDATE_STATE = "self.state = update_scale(self.state, found_inf)"
UPDATE_IN_PLACE = "self.state.update(update_scale(self.state, found_inf))"
ALL_OF_SCALER = groups(SCALER, "step", "once", "several", "state")

ZERO_GRAD = "    for optimizer in optimizers:\n        optimizer.zero_grad()\n"
UNSCALE_AND_CLIP = "        scaler.unscale_(optimizer)\n        clip(optimizer, max_norm)\n"

WRONG = {
    UNSCALE: [
        Wrong(
            "only infinities are looked for",
            instead(FINITE, "np.isinf(g).any()"),
            groups(UNSCALE, "found"),
        ),
        Wrong(
            "only NaNs are looked for",
            instead(FINITE, "np.isnan(g).any()"),
            groups(UNSCALE, "found") | groups(SCALER, "step", "once", "several"),
        ),
        Wrong(
            "negative infinity is forgotten",
            instead(FINITE, "(np.isnan(g) | (g == np.inf)).any()"),
            groups(UNSCALE, "found"),
        ),
        Wrong(
            "the largest value is compared with infinity",
            instead(FINITE, "np.abs(g).max(initial=0) == np.inf"),
            groups(UNSCALE, "found"),
        ),
        Wrong(
            "the sum is looked at, which large values overflow",
            instead(FINITE, "not np.isfinite(g.sum())"),
            groups(UNSCALE, "found"),
        ),
        Wrong(
            "the norm is looked at, which large values overflow",
            instead(FINITE, "not np.isfinite(np.linalg.norm(g))"),
            groups(UNSCALE, "found"),
        ),
        Wrong(
            "what float16 could not hold counts as infinite",
            instead(FINITE, "not (np.abs(g) <= 65504).all()"),
            groups(UNSCALE, "half", "found"),
        ),
        Wrong(
            "the last gradient decides",
            instead("found_inf or " + FINITE, FINITE),
            groups(UNSCALE, "found") | groups(SCALER, "step"),
        ),
        Wrong(
            "only the first gradient is looked at",
            instead("found_inf or " + FINITE, f"found_inf or (not unscaled and {FINITE})"),
            groups(UNSCALE, "found") | groups(SCALER, "step"),
        ),
        Wrong(
            "found_inf for each gradient",
            changed(
                ("[], False", "[], []"),
                ("found_inf = found_inf or " + FINITE, f"found_inf.append(bool({FINITE}))"),
                ("bool(found_inf)", "found_inf"),
            ),
            groups(UNSCALE, "values", "half", "found") | ALL_OF_SCALER,
        ),
        Wrong(
            "one look, before the division",
            changed(
                ("g = " + QUOTIENT, "before, g = g, " + QUOTIENT), (FINITE, "not np.isfinite(before).all()")
            ),
            groups(UNSCALE, "found"),
        ),
        Wrong(
            "what is not finite becomes 0",
            instead(
                APPEND,
                "        unscaled.append(g if g is None else np.where(np.isfinite(g), g, np.float32(0)))",
            ),
            groups(UNSCALE, "found"),
        ),
        Wrong(
            "a gradient that is not finite is dropped, so that its parameter alone is skipped",
            instead(APPEND, "        unscaled.append(None if g is None or not np.isfinite(g).all() else g)"),
            groups(UNSCALE, "found") | groups(SCALER, "once"),
        ),
        Wrong(
            "float16 gradients are divided in float16",
            instead(QUOTIENT, "(g * inverse.astype(g.dtype)).astype(np.float32)"),
            groups(UNSCALE, "half"),
        ),
        Wrong(
            "float16 gradients stay float16",
            instead(QUOTIENT, "(g.astype(np.float32) * inverse).astype(g.dtype)"),
            groups(UNSCALE, "half"),
        ),
        Wrong(
            "gradients are multiplied by the scale",
            instead("1.0 / scale", "scale"),
            groups(UNSCALE, "values", "half", "found") | groups(SCALER, "step", "once", "several"),
        ),
        Wrong(
            "the gradients are divided in place",
            instead("g = " + QUOTIENT, "g *= inverse.astype(g.dtype)\n            g = g.astype(np.float32)"),
            groups(UNSCALE, "values", "half", "found"),
        ),
        Wrong(
            "a missing gradient becomes zeros",
            instead(APPEND, "        unscaled.append(np.zeros(1, np.float32) if g is None else g)"),
            groups(UNSCALE, "values") | groups(SCALER, "step"),
        ),
        Wrong(
            "missing gradients are left out of the list",
            instead(APPEND, "            unscaled.append(g)"),
            groups(UNSCALE, "values", "found") | groups(SCALER, "step"),
        ),
    ],
    UPDATE: [
        Wrong(
            "growth after one good iteration more",
            instead(FULL, 'tracker == state["growth_interval"] + 1'),
            groups(UPDATE, "growth", "row", "limit"),
        ),
        Wrong(
            "growth after one good iteration less",
            instead(FULL, 'tracker >= state["growth_interval"] - 1'),
            groups(UPDATE, "growth", "row"),
        ),
        Wrong(
            "growth after every good iteration",
            instead(FULL, "True"),
            groups(UPDATE, "growth", "row") | groups(SCALER, "several", "state"),
        ),
        Wrong(
            "the tracker goes on after a bad iteration",
            instead(BACKOFF + ", 0", BACKOFF + ", tracker"),
            groups(UPDATE, "backoff", "row"),
        ),
        Wrong(
            "a bad iteration counts too",
            instead(BACKOFF + ", 0", BACKOFF + ", tracker + 1"),
            groups(UPDATE, "backoff", "row"),
        ),
        Wrong(
            "a bad iteration takes one off the count",
            instead(BACKOFF + ", 0", BACKOFF + ", max(0, tracker - 1)"),
            groups(UPDATE, "backoff", "row"),
        ),
        Wrong(
            "the tracker goes on after growth",
            instead(GROWTH, 'scale * state["growth_factor"], tracker'),
            groups(UPDATE, "growth", "row", "limit"),
        ),
        Wrong(
            "after growth the tracker begins at 1",
            instead(GROWTH, 'scale * state["growth_factor"], 1'),
            groups(UPDATE, "growth", "row", "limit"),
        ),
        Wrong(
            "the scale is divided by the backoff factor",
            instead(BACKOFF, 'scale / state["backoff_factor"]'),
            groups(UPDATE, "backoff", "row") | groups(SCALER, "several"),
        ),
        Wrong(
            "a bad iteration goes back to the default scale",
            instead(BACKOFF, "2.0**16"),
            groups(UPDATE, "backoff", "row") | groups(SCALER, "several"),
        ),
        Wrong(
            "the scale never falls below 1",
            instead(BACKOFF, f"max(1.0, {BACKOFF})"),
            groups(UPDATE, "backoff"),
        ),
        Wrong(
            "factors of 2 and 1/2 whatever the state says",
            changed(('state["growth_factor"]', "2.0"), ('state["backoff_factor"]', "0.5")),
            groups(UPDATE, "backoff", "growth", "limit"),
        ),
        Wrong(
            "the interval is always 2000",
            instead('state["growth_interval"]', "2000"),
            groups(UPDATE, "growth", "row", "limit"),
        ),
        Wrong("the scale grows to infinity", instead(FITS, "if True:"), groups(UPDATE, "limit")),
        Wrong(
            "the scale is cut to the largest float32 number, which is no power of two",
            changed(
                (
                    FITS + "\n                scale = larger",
                    "scale = min(larger, float(np.finfo(np.float32).max))",
                ),
            ),
            groups(UPDATE, "limit"),
        ),
        Wrong(
            "the scale must fit into float16",
            instead("np.finfo(np.float32)", "np.finfo(np.float16)"),
            groups(UPDATE, "growth", "row", "limit"),
        ),
        Wrong(
            "the tracker stays full where the scale cannot grow",
            changed(
                ("larger, tracker = " + GROWTH, 'larger = scale * state["growth_factor"]'),
                ("scale = larger", "scale, tracker = larger, 0"),
            ),
            groups(UPDATE, "limit"),
        ),
        Wrong(
            "only scale and tracker come back",
            instead("{**state, ", "{"),
            groups(UPDATE, "backoff", "growth", "row") | ALL_OF_SCALER,
        ),
    ],
    SCALER: [
        Wrong(
            "step leaves unscaling to the user",
            changed((UNSCALE_FIRST, ""), (SKIP, "if self.found.get(optimizer):")),
            groups(SCALER, "step", "once", "several"),
        ),
        Wrong(
            "step unscales again what is unscaled",
            instead(UNSCALE_FIRST, "self.found.pop(optimizer, None)\n        self.unscale_(optimizer)"),
            groups(SCALER, "once", "several"),
        ),
        Wrong(
            "step looks at the gradients as they are then",
            instead(SKIP, "if unscale([p.grad for p in optimizer.params], 1.0)[1]:"),
            groups(SCALER, "once"),
        ),
        Wrong(
            "only the parameter with the bad gradient is skipped",
            instead(
                SKIP + "\n            return None",
                "for p in optimizer.params:\n"
                "            if p.grad is not None and not np.isfinite(p.grad).all():\n"
                "                p.grad = None",
            ),
            groups(SCALER, "step", "once", "several"),
        ),
        Wrong(
            "bad values are set to 0 and the step is made",
            instead(
                SKIP + "\n            return None",
                "for p in optimizer.params:\n"
                "            if p.grad is not None:\n"
                "                p.grad = np.where(np.isfinite(p.grad), p.grad, np.float32(0))",
            ),
            groups(SCALER, "step", "once", "several"),
        ),
        Wrong(
            "a second unscale_ divides again",
            instead("if optimizer in self.found:", "if optimizer in self.stepped:"),
            groups(SCALER, "once"),
        ),
        Wrong(
            "a second unscale_ is passed over in silence",
            instead(
                'raise RuntimeError("unscale_: call it once between two updates, and before step")', "return"
            ),
            groups(SCALER, "once"),
        ),
        Wrong(
            "a second unscale_ divides before it is refused",
            changed(
                (REFUSE_UNSCALE, "        again = optimizer in self.found\n"),
                (
                    "            p.grad = g\n",
                    '            p.grad = g\n        if again:\n            raise RuntimeError("twice")\n',
                ),
            ),
            groups(SCALER, "once"),
        ),
        Wrong(
            "a second step is made",
            instead("if optimizer in self.stepped:", "if False:"),
            groups(SCALER, "once"),
        ),
        Wrong(
            "a second step is refused only after one that was made",
            changed(
                ("        self.stepped.add(optimizer)\n", ""),
                (
                    "        return optimizer.step()",
                    "        self.stepped.add(optimizer)\n        return optimizer.step()",
                ),
            ),
            groups(SCALER, "once"),
        ),
        Wrong(
            "unscale_ is allowed after step",
            instead(
                "if optimizer in self.found:", "if optimizer in self.found and optimizer not in self.stepped:"
            ),
            groups(SCALER, "once"),
        ),
        Wrong(
            "update does not begin a new iteration",
            instead("        self.found, self.stepped = {}, set()\n", ""),
            groups(SCALER, "step", "once", "several", "state"),
        ),
        Wrong(
            "one stage for all optimizers",
            instead("if optimizer in self.stepped:", "if self.stepped:"),
            groups(SCALER, "several"),
        ),
        Wrong(
            "one bad gradient skips every optimizer that comes after it",
            instead(SKIP, "if any(self.found.values()):"),
            groups(SCALER, "several"),
        ),
        Wrong(
            "the optimizer that comes last decides about the scale",
            instead("any(self.found.values())", "list(self.found.values())[-1]"),
            groups(SCALER, "several"),
        ),
        Wrong(
            "one update of the scale for each optimizer",
            instead(UPDATE_STATE, "for found_inf in self.found.values():\n            " + UPDATE_STATE),
            groups(SCALER, "several"),
        ),
        Wrong(
            "the scale shrinks in step, once for each bad optimizer",
            changed(
                (SKIP, SKIP + "\n            self.state = update_scale(self.state, True)"),
                ("        " + UPDATE_STATE, "        if not found_inf:\n            " + UPDATE_STATE),
            ),
            groups(SCALER, "several"),
        ),
        Wrong(
            "only optimizers that were stepped count for the scale",
            instead("any(self.found.values())", "any(self.found[optimizer] for optimizer in self.stepped)"),
            groups(SCALER, "several"),
        ),
        Wrong(
            "update counts skipped iterations only",
            instead("        " + UPDATE_STATE, "        if found_inf:\n            " + UPDATE_STATE),
            groups(SCALER, "several", "state"),
        ),
        Wrong(
            "a skipped step gives False",
            instead("return None", "return False"),
            groups(SCALER, "step", "once", "several"),
        ),
        Wrong(
            "a step gives nothing",
            instead("return optimizer.step()", "optimizer.step()"),
            groups(SCALER, "step", "once", "several"),
        ),
        Wrong(
            "the scaled loss is float64",
            instead('loss * self.state["scale"]', 'loss * np.float64(self.state["scale"])'),
            groups(SCALER, "step"),
        ),
        Wrong(
            "the state is the scale alone",
            changed(
                ("return dict(self.state)", 'return {"scale": self.state["scale"]}'),
                ("self.state = dict(state)", "self.state.update(state)"),
            ),
            groups(SCALER, "several", "state"),
        ),
        Wrong(
            "the tracker is not restored",
            instead("self.state = dict(state)", 'self.state = {**state, "_growth_tracker": 0}'),
            groups(SCALER, "state"),
        ),
        Wrong(
            "factors and interval are not restored",
            instead(
                "self.state = dict(state)",
                'self.state.update({key: state[key] for key in ("scale", "_growth_tracker")})',
            ),
            groups(SCALER, "state"),
        ),
        Wrong(
            "the saved state goes on changing with the scaler",
            changed(("return dict(self.state)", "return self.state"), (UPDATE_STATE, UPDATE_IN_PLACE)),
            groups(SCALER, "state"),
        ),
        Wrong(
            "the loaded state goes on changing with the scaler",
            changed(("self.state = dict(state)", "self.state = state"), (UPDATE_STATE, UPDATE_IN_PLACE)),
            groups(SCALER, "state"),
        ),
    ],
    LOOP: [
        Wrong(
            "clipping comes before unscaling",
            instead(
                UNSCALE_AND_CLIP, "        clip(optimizer, max_norm)\n        scaler.unscale_(optimizer)\n"
            ),
            groups(LOOP, "order"),
        ),
        Wrong(
            "nothing is unscaled before clipping, since step will do it",
            instead("        scaler.unscale_(optimizer)\n", ""),
            groups(LOOP, "order", "several"),
        ),
        Wrong(
            "clipping comes after the step",
            changed(
                ("        clip(optimizer, max_norm)\n", ""),
                (
                    "        scaler.step(optimizer)\n",
                    "        scaler.step(optimizer)\n        clip(optimizer, max_norm)\n",
                ),
            ),
            groups(LOOP, "order"),
        ),
        Wrong(
            "gradients are unscaled and clipped in each micro-batch",
            changed(
                (UNSCALE_AND_CLIP, ""),
                (
                    ".backward()\n",
                    ".backward()\n        for optimizer in optimizers:\n"
                    "            scaler.unscale_(optimizer)\n            clip(optimizer, max_norm)\n",
                ),
            ),
            groups(LOOP, "accumulate", "several"),
        ),
        Wrong(
            "a step and an update in each micro-batch",
            """
def train_iteration(scaler, optimizers, batches, clip, max_norm):
    for batch in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(batch()).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
            clip(optimizer, max_norm)
            scaler.step(optimizer)
        scaler.update()
""",
            groups(LOOP, "accumulate", "several"),
        ),
        Wrong(
            "the scaler is updated only if a step was skipped",
            changed(
                ("scaler.step(optimizer)", "made = scaler.step(optimizer)"),
                ("    scaler.update()", "    if made is None:\n        scaler.update()"),
            ),
            groups(LOOP, "order", "several"),
        ),
        Wrong(
            "the scaler is updated only if the step was made",
            changed(
                ("scaler.step(optimizer)", "made = scaler.step(optimizer)"),
                ("    scaler.update()", "    if made:\n        scaler.update()"),
            ),
            groups(LOOP, "order", "several"),
        ),
        Wrong(
            "the scaler is never updated",
            instead("    scaler.update()\n", ""),
            groups(LOOP, "order", "several"),
        ),
        Wrong(
            "the scaler is updated for each optimizer",
            instead("    scaler.update()", "        scaler.update()"),
            groups(LOOP, "several"),
        ),
        Wrong(
            "the scaler is updated before the steps",
            changed(("    scaler.update()\n", ""), (".backward()\n", ".backward()\n    scaler.update()\n")),
            groups(LOOP, "order", "several"),
        ),
        Wrong(
            "the optimizer makes the step, not the scaler",
            instead("scaler.step(optimizer)", "optimizer.step()"),
            groups(LOOP, "order", "several"),
        ),
        Wrong(
            "an old optimizer.step() is left behind",
            instead("scaler.step(optimizer)", "scaler.step(optimizer)\n        optimizer.step()"),
            groups(LOOP, "order"),
        ),
        Wrong(
            "backward begins at the loss that is not scaled",
            instead(
                "scaler.scale(batch() / len(batches)).backward()",
                "loss = batch() / len(batches)\n        scaler.scale(loss)\n        loss.backward()",
            ),
            groups(LOOP, "order", "accumulate"),
        ),
        Wrong(
            "the gradient is that of the sum of the losses",
            instead("batch() / len(batches)", "batch()"),
            groups(LOOP, "accumulate"),
        ),
        Wrong(
            "gradients are dropped before each micro-batch",
            changed(
                (ZERO_GRAD, ""),
                (
                    "in batches:\n",
                    "in batches:\n        for optimizer in optimizers:\n            optimizer.zero_grad()\n",
                ),
            ),
            groups(LOOP, "accumulate"),
        ),
        Wrong("old gradients are never dropped", instead(ZERO_GRAD, ""), groups(LOOP, "order")),
        Wrong(
            "gradients are dropped after backward",
            changed(
                (ZERO_GRAD, ""), (UNSCALE_AND_CLIP, "        optimizer.zero_grad()\n" + UNSCALE_AND_CLIP)
            ),
            groups(LOOP, "order"),
        ),
        Wrong(
            "all forward passes come first",
            changed(
                ("for batch in batches:", "for loss in [batch() for batch in batches]:"),
                ("batch() / len(batches)", "loss / len(batches)"),
            ),
            groups(LOOP, "accumulate"),
        ),
        Wrong(
            "only the first optimizer is served",
            instead(
                "    for optimizer in optimizers:\n" + UNSCALE_AND_CLIP,
                "    for optimizer in optimizers[:1]:\n" + UNSCALE_AND_CLIP,
            ),
            groups(LOOP, "several"),
        ),
    ],
}
