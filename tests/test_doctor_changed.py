"""Every repaired twin of the gallery with lines put in, taken out or replaced: ill changes are found first, well ones not at all.

The changes are made in the text of the twin, so that all 27 architectures and loops meet all changes.
"""

import inspect
import re

import pytest
from test_doctor import GALLERY

import minamp
from minamp import GradScaler

GRADS = "[p.grad for group in optimizer.param_groups for p in group['params'] if p.grad is not None]"
CLEAR = r"optimizer\.zero_grad\(\)"
REGION = r"with autocast\(\):"
BACKWARD = r"scaler\.scale\((.*)\)\.backward\(\)"
STEP = r"scaler\.step\(optimizer\)"
UPDATE = r"scaler\.update\(\)"
MAKE = r"scaler = GradScaler\(.*\)"

# change -> (code of the finding, the line, what stands in its place: \g<line> is the line itself)
ILL = {
    "gradients are not cleared": ("zero_grad_missing", CLEAR, "pass"),
    "no region": ("autocast_covers_nothing", REGION, "if True:"),
    "backward in a region": ("backward_in_autocast", BACKWARD, r"with autocast():\n    \g<line>"),
    "clipped while scaled": (
        "clip_before_unscale",
        STEP,
        r"minamp.nn.utils.clip_grad_norm_(optimizer.param_groups[0]['params'], 1e-3)\n\g<line>",
    ),
    "clamped while scaled": (
        "clip_before_unscale or clip_value_hides_overflow",  # where the first step overflows
        STEP,
        rf"for g in {GRADS}: g.clamp_(-1e-3, 1e-3)\n\g<line>",
    ),
    "nan_to_num while scaled": (
        "clip_value_hides_overflow",
        STEP,
        r"for p in optimizer.param_groups[0]['params']: p.grad = p.grad.nan_to_num()\n\g<line>",
    ),
    "a step of its own": ("raw_optimizer_step", STEP, "optimizer.step()"),
    "a step of its own before": ("raw_optimizer_step", STEP, r"optimizer.step()\n\g<line>"),
    "a step of its own after": ("raw_optimizer_step", STEP, r"\g<line>\noptimizer.step()"),
    "no update": ("update_forgotten", UPDATE, "pass"),
    "two updates": ("update_repeated", UPDATE, r"\g<line>\n\g<line>"),
    "an update after unscale_": (
        "update_repeated",
        STEP,
        r"scaler.unscale_(optimizer)\nscaler.update()\n\g<line>",
    ),
    "unscaled twice": (
        "unscale_every_micro_batch",
        STEP,
        r"scaler.unscale_(optimizer)\nscaler.unscale_(optimizer)\n\g<line>",
    ),
    "a scaler for every step": (
        "scaler_rebuilt",
        BACKWARD,
        r"scaler = GradScaler(init_scale=256.0)\n\g<line>",
    ),
    "a scale far too high": ("scale_pinned", MAKE, "scaler = GradScaler(init_scale=2.0**60)"),
}
WELL = {
    "clipped": (
        STEP,
        r"scaler.unscale_(optimizer)\nminamp.nn.utils.clip_grad_norm_(optimizer.param_groups[0]['params'], 1.0)\n\g<line>",
    ),
    "clipped by hand": (
        STEP,
        rf"scaler.unscale_(optimizer)\nnorm = sum((g.float() ** 2).sum() for g in {GRADS}).item() ** 0.5\n"
        rf"for g in {GRADS}: g.mul_(min(1.0, 1.0 / (norm + 1e-6)))\n\g<line>",
    ),
    "noise": (
        STEP,
        rf"scaler.unscale_(optimizer)\nfor g in {GRADS}: g.add_(1e-4 * minamp.randn(*g.shape))\n\g<line>",
    ),
    "a norm for a log": (
        STEP,
        rf"sum((g.float() ** 2).sum() for g in {GRADS}).item() ** 0.5 / scaler.get_scale()\n\g<line>",
    ),
    "a look at the gradients": (STEP, rf"any(not minamp.isfinite(g).all() for g in {GRADS})\n\g<line>"),
    "a decaying rate": (STEP, r"\g<line>\nfor group in optimizer.param_groups: group['lr'] *= 0.999"),
    "weights kept small": (
        STEP,
        r"\g<line>\nwith minamp.no_grad():\n    for p in optimizer.param_groups[0]['params']: p.clamp_(-5.0, 5.0)",
    ),
    "whether it was skipped": (UPDATE, r"before = scaler.get_scale()\n\g<line>\nscaler.get_scale() < before"),
    "gradients cleared twice": (STEP, r"\g<line>\noptimizer.zero_grad(set_to_none=False)"),
    "another growth": (MAKE, "scaler = GradScaler(init_scale=2.0**10, growth_interval=1)"),
    "no cache": (REGION, "with autocast(cache_enabled=False):"),
}


def change(twin, line, by):
    """The builder of a twin with every such line replaced, each keeping its indentation; None if it has none.

    Before the step of a twin that unscales its gradients nothing is put: they are not what the change expects.
    """
    module = GALLERY[twin]
    text = inspect.getsource(module.repaired)
    if line == STEP and not by.startswith(r"\g<line>") and "unscale_" in text:
        return None

    def put(found):
        return "\n".join(found["indent"] + new for new in found.expand(by).split("\n"))

    changed, count = re.subn(rf"^(?P<indent> +)(?P<line>{line})$", put, text, flags=re.M)
    if not count:
        return None
    names = {**vars(module), "minamp": minamp, "GradScaler": GradScaler}
    exec(compile(changed, f"<{twin}, changed>", "exec"), names)
    return names["repaired"]


def cases(changes):
    """(code, builder), or (builder,), of all twins and changes that fit."""
    found = []
    for twin in GALLERY:
        for name, (*code, line, by) in changes.items():
            build = change(twin, line, by)
            if build is not None:
                found.append(pytest.param(*code, build, id=f"{twin}: {name}"))
    return found


def codes(build):
    minamp.manual_seed(0)
    it = build()
    return [f.code for f in minamp.doctor(it["step"], it["model"], it["optimizer"], it["scaler"])]


@pytest.mark.parametrize("code, build", cases(ILL))
def test_an_ill_change_is_found_first(code, build):
    assert codes(build)[0] in code.split(" or ")


@pytest.mark.parametrize("build", cases(WELL))
def test_a_well_change_is_no_finding(build):
    assert codes(build) == []


def test_most_twins_can_be_changed():
    assert len(cases(ILL)) > 300 and len(cases(WELL)) > 200
