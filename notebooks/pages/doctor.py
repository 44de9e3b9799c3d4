"""Writes doctor.md from the doctor's rules and the gallery of broken scripts: python notebooks/pages/doctor.py"""

import importlib
import sys
from pathlib import Path

import minamp
from minamp.clinic.rules.base import CODES, RULES

PAGE = Path(__file__).with_name("doctor.md")
GALLERY = PAGE.parents[2] / "tests" / "gallery"

# How each rule sees its fault: what it compares, in words. The rest of the page is what the doctor says of a broken script.
SEEN = {
    "half_parameters_with_scaler": "float16 weights without a master under a scaled loss; or `unscale_` refuses",
    "loss_in_half": "what backward starts from, before it was scaled, is float16, or the term that is half of it or more",
    "softmax_in_half": "a softmax, log_softmax, logsumexp or `e / e.sum()` that is float16, or whose `e` is, before a gradient",
    "log_of_softmax": "a logarithm with a gradient of a softmax, in any format; one kept from 0 if the choice is below that",
    "mask_overflows": "a large negative constant is added or filled in and -inf comes out in half; or `masked_fill` refuses it",
    "eps_rounds_to_zero": "a constant that is not 0, but at most half the smallest number of the half format that it is used in",
    "layer_norm_overflows": "a square or a sum of squares turns infinite in half, and a root before a gradient is taken of it",
    "mean_of_too_many": "a float16 sum that is divided afterwards and is infinite, or has over 65504 terms large enough for it",
    "backward_in_autocast": "the region that is open when backward is called",
    "autocast_covers_nothing": "there is a region or a scaler, and no matmul or convolution of the training ran in half",
    "clip_before_unscale": "nothing has divided all gradients, or the limit, by the scale before clipping; or `unscale_` is late",
    "clip_value_hides_overflow": "as clip_before_unscale, and gradients that were infinite before clipping are finite after it",
    "raw_optimizer_step": "`optimizer.step` outside `scaler.step`, or a descent by hand, uses gradients of a scaled loss",
    "update_forgotten": "`scaler.step` is called and `scaler.update` is not, or stands before it",
    "update_repeated": "two updates in one step of the loop, for different optimizers or with nothing between them",
    "unscale_every_micro_batch": "a second `unscale_`, or division by the scale, after a backward that added to gradients",
    "zero_grad_missing": "at a second step the gradients of the first are still there, and backward has added to them",
    "scaler_rebuilt": "scalers are made in more than one of the observed steps",
    "scaler_not_saved": "model and optimizer are asked for their state, the scaler is not, or its state is not in the file",
    "gradients_flushed": "the share of float32 gradients that float16 flushes at the present scale, and at a better one",
    "forward_overflow": "an op gave inf or nan of finite inputs on the way to a loss, and no rule above knows why",
    "updates_swamped": "most half weights with a gradient, kept nowhere in float32, have the same bits after the update",
    "adam_in_half": "after backward a half root, or half root + eps, of a weight's shape; or an optimizer keeps half moments",
    "scale_pinned": "the scale falls in every step, is put back after a skip, or stands at a floor or ceiling that is in the way",
    "op_without_policy": "an `autograd.Function` runs in a region, without `custom_fwd` or `custom_bwd`, and its ops are cast",
    "batchnorm_nan": "`running_mean` or `running_var` hold inf or nan before the first step, or a layer in eval mode reads such",
    "widened_by_scalar": "an array of a wider format, without a gradient, meets a tensor of the network and widens what follows",
}

HEAD = """# What the doctor finds

Made from the rules and the gallery of broken scripts by `python notebooks/pages/doctor.py`; a test fails if they differ.
The course's notebook 8 uses the doctor on a detector.

`minamp.doctor(step, model=model, optimizer=optimizer, scaler=scaler)` runs `step` once as it is and once with autocast switched
off, and more often where that leaves a question, puts everything back, and returns a list of findings: errors first, the cause
before its consequences. A finding has a `code`, a `severity`, `what`, `where`, `evidence` and a `repair`. An *error* makes
training wrong or stops it; a *warning* makes it worse than it could be. **An empty list** means that in these steps nothing was
done that is known to go wrong. It does not mean that the network learns, nor that other batches can't overflow.

Meaning, severity and repair are what the doctor says of the script named in each section: broken on purpose, with its repaired
twin beside it. Numbers in the text are that script's.
"""


def examine(code):
    """The doctor's finding of that code in the gallery's broken script."""
    if str(GALLERY.parent) not in sys.path:
        sys.path.insert(0, str(GALLERY.parent))
    patient = importlib.import_module(f"gallery.{code}").broken()
    report = minamp.doctor(**patient)
    return next(finding for finding in report if finding.code == code)


def page():
    """The text of doctor.md."""
    lines = [HEAD]
    for code in CODES:
        finding = examine(code)
        file = RULES[code].__module__.replace(".", "/") + ".py"
        lines += [
            f"## {code}",
            "",
            f"{finding.severity.capitalize()}. {finding.what}",
            "",
            f"- Recognised by: {SEEN[code]}. Rule: [{file}](../../{file}).",
            f"- Repair: `{finding.repair}`",
            f"- Script: [tests/gallery/{code}.py](../../tests/gallery/{code}.py)",
            "",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
