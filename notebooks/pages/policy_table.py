"""Writes policy_table.md from the registry of ops: python notebooks/pages/policy_table.py"""

import re
from pathlib import Path

from minamp import ops  # noqa: F401  declares every op
from minamp.op import NOT_LISTED, POLICIES, Op
from minamp.tensor import OPS

PAGE = Path(__file__).with_name("policy_table.md")

MEANING = {
    "lower_precision_fp": "every float tensor is cast to the region's half dtype, then the op runs",
    "fp32": "every float tensor is cast to float32, then the op runs",
    "fp32_set_opt_dtype": "`dtype=float32` is filled in unless the caller gave a dtype",
    "fp32_append_dtype": "as fp32_set_opt_dtype; only `norm`",
    "promote": "every float tensor is cast to float32 if one of them is float32, else to the region's half dtype; the other half "
    "format is refused, unless a float32 stands before it",
    "banned": "refused inside a region, with the repair in the error",
    "not listed": "runs in the dtypes it is given, with the ordinary type promotion",
}

# On PyTorch's lists (2.13), and not here.
ABSENT = {
    "lower_precision_fp": "`conv_tbc`, `conv_transpose3d`, and the cells of recurrent networks as single ops (`lstm_cell`, "
    "`gru_cell`, `rnn_tanh_cell`, `rnn_relu_cell`): nn.LSTM and its kin are made of linear and of ops/cells.py",
    "fp32": "`nuclear_norm` and `frobenius_norm`, the resizing of volumes (`upsample_nearest3d`, `upsample_trilinear3d`), "
    "`nearest-exact` and antialiased resizing",
}


def page():
    """The text of policy_table.md."""
    listed = [o for o in OPS.values() if isinstance(o, Op) or o.policy != NOT_LISTED]
    declared = sorted(listed, key=lambda o: o.name)
    lines = [
        "# What autocast does with every op",
        "",
        "Made from the registry by `python notebooks/pages/policy_table.py`; a test fails if the two differ.",
        "The lists are those of `torch.autocast('cuda')`, on every device. float64, integers and bools are never cast,",
        "nor are in-place forms such as `x.add_(y)`. Functions made of several ops that are on no list (`cross_entropy`,",
        "`normalize`) have no policy of their own: each op inside is treated as listed here.",
        "",
    ]
    for policy in POLICIES:
        members = [o for o in declared if o.policy == policy]
        lines += [
            f"## {policy}: {len(members)} op{'s' * (len(members) != 1)}",
            "",
            MEANING[policy][0].upper() + MEANING[policy][1:] + ".",
            *([f"On PyTorch's list and not here: {ABSENT[policy]}."] if policy in ABSENT else []),
            "",
        ]
        if not members:
            continue
        lines += ["| op | what it is |", "|---|---|"]
        for o in members:
            file = o.__module__.replace(".", "/") + ".py"
            first = re.split(r"(?<=[^.][.;:]) ", " ".join((o.__doc__ or "").split()))[0].rstrip(".;:")
            text = re.sub(r"[|*]", r"\\\g<0>", first)  # neither a column's end nor bold
            lines.append(f"| [`{o.name}`](../../{file}) | {text} |")
        lines.append("")
    composites = sorted(name for name, f in OPS.items() if f not in listed)
    lines += ["## Made of other ops", "", ", ".join(f"`{n}`" for n in composites) + ".", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
