"""What verify_amp found: the numbers, the table, and the verdict, which follows from the numbers alone."""

import io
import json
import shutil
from dataclasses import asdict, dataclass, field

# A ratio above it is no gain: the shortest of ten steps on a busy machine differ by several per cent.
PAYS = 0.9
BOUND = 0.5  # more than half of the time decides what can be won
HALVED = 0.5  # what autocast can make of the bytes kept for backward at best


@dataclass(frozen=True)
class Pair:
    """One figure of the step as it is, and with autocast switched off."""

    with_amp: object
    without_amp: object

    @property
    def ratio(self):
        """with / without."""
        return self.with_amp / self.without_amp if self.without_amp else float("nan")


@dataclass
class Seen:
    """One step, op by op. Tables: dtype -> name of the op -> how many results; casts are counted apart."""

    activations: dict = field(default_factory=dict)  # what forward ops put out
    products: dict = field(default_factory=dict)  # those of matmuls and convolutions among them
    passed_back: dict = field(default_factory=dict)  # gradients of those outputs, by the same names
    saved_bytes: int = 0
    casts: int = 0
    op_calls: int = 0  # forward ops and gradients computed
    region_ops: int = 0  # ops that ran inside an enabled autocast region
    covered: int = 0  # products that did so and came out in half


@dataclass(frozen=True)
class Report:
    """The three indicators, each with autocast and without: memory in bytes, time in seconds, dtypes as tables.

    print() shows one table and the verdict; to_json() holds every number.
    """

    device: str
    rounds: int
    with_amp: Seen
    without_amp: Seen
    fixed_bytes: int  # parameters, their gradients and the optimizer's state
    peak_bytes: Pair | None  # device memory, on a GPU
    forward_time: Pair  # the shortest of `rounds`
    step_time: Pair
    overhead: float  # seconds that an op on a single number takes
    parameters: dict  # dtype -> name -> number of values
    gradients: dict

    @property
    def on(self):
        """Whether a matmul or convolution ran in half inside an autocast region."""
        return self.with_amp.covered > 0

    saved_bytes = property(
        lambda self: Pair(self.with_amp.saved_bytes, self.without_amp.saved_bytes), doc="Kept for backward."
    )
    all_bytes = property(
        lambda self: Pair(*(self.fixed_bytes + s.saved_bytes for s in (self.with_amp, self.without_amp))),
        doc="Kept for backward, parameters, their gradients and the optimizer's state.",
    )
    activations = property(lambda self: self.with_amp.activations, doc="dtype -> op -> how many outputs.")
    verdict = property(lambda self: verdict(self), doc="Whether it is on, whether it pays, and why not.")

    def to_json(self):
        """Every number, and the verdict, as JSON."""
        return json.dumps({"on": self.on, "verdict": self.verdict, **asdict(self)}, indent=1)

    def __str__(self):
        return table(self)


# ------------------------------------------------------------------------------------------------------------- the verdict


def verdict(report):
    """Whether mixed precision is on, whether it pays, and the measured reason where it does not: from the numbers alone."""
    seen, plain = report.with_amp, report.without_amp
    n, half = _total(seen.products), _halves(seen.products)
    if not report.on:
        return f"Mixed precision is not on: {_why_off(seen, n, half)}."
    on = f"Mixed precision is on: {seen.covered} of {n} matmuls and convolutions ran in {half}. "
    if _total(plain.products, _is_half) == n:
        return on + (
            f"No gain here, because without autocast they run in {_halves(plain.products)} as well: what they are given is half "
            "already."
        )
    gains, losses = [], []
    for gain, sentence in (_memory(report), _time(report)):
        (gains if gain else losses).append(sentence)
    if not gains:
        return on + f"No gain here, because {'; and '.join(losses)}."
    return on + " ".join([f"It pays: {' and '.join(gains)}.", *(f"But {loss}." for loss in losses)])


def _why_off(seen, n, half):
    if half and not seen.covered:
        return (
            f"matmuls and convolutions ran in {half}, but outside every enabled autocast region. That is plain half precision: "
            "softmax, losses and sums are in half too, but for what the code itself converts"
        )
    if not seen.region_ops:
        return (
            f"no op of the step ran inside an enabled autocast region, so all {n} matmuls and convolutions ran in float32. "
            "Put the forward inside `with minamp.autocast():`"
        )
    if not n:
        return "the step has no matmul and no convolution, and little else is cast to half"
    return (
        f"autocast covers nothing that counts. {seen.region_ops} ops ran inside a region, but all {n} matmuls and convolutions "
        "ran in float32, outside it. Put model(x) inside the region"
    )


def _memory(report):
    saved, everything = report.saved_bytes, report.all_bytes
    if everything.ratio <= PAYS:
        return (
            True,
            f"backward keeps {saved.ratio:.2f} times the bytes, which makes all memory {everything.ratio:.2f} times as much",
        )
    share = report.fixed_bytes / everything.without_amp
    if share + HALVED * (1 - share) > PAYS:
        return False, (
            f"parameters dominate the memory: they, their gradients and the optimizer's state are {share:.0%} of it, and "
            f"autocast shrinks only what backward keeps{f' (to {saved.ratio:.2f})' if saved.ratio < 1 else ''}"
        )
    wide = _total(report.activations) - _total(report.activations, _is_half)
    copies = ", and half copies are kept beside float32 values" if saved.ratio > 1 else ""
    return False, (
        f"backward keeps {saved.ratio:.2f} times the bytes: {wide} of {_total(report.activations)} op outputs are not half"
        f"{copies}"
    )


def _time(report):
    step, plain = report.step_time, report.without_amp
    if step.ratio <= PAYS:
        return True, f"a step takes {step.ratio:.2f} times as long"
    reasons = []
    if report.device == "cpu":
        reasons.append(
            "the CPU emulates half arithmetic (it widens to float32, computes and rounds), so time cannot fall"
        )
    if plain.op_calls * report.overhead > BOUND * step.without_amp:
        bound = "dispatch" if report.device == "cpu" else "launch"
        reasons.append(
            f"the model is small, so the step is {bound}-bound (its {plain.op_calls} ops take "
            f"{_seconds(step.without_amp / plain.op_calls)} each, an op on a single number {_seconds(report.overhead)})"
        )
    if not reasons:
        reasons.append(
            f"{report.with_amp.casts} casts cost what {report.with_amp.covered} half matmuls and convolutions win"
        )
    return False, f"a step takes {step.ratio:.2f} times as long: {'; '.join(reasons)}"


def _is_half(dtype):
    return dtype in ("float16", "bfloat16")


def _total(table, which=lambda dtype: True):
    return sum(sum(row.values()) for dtype, row in table.items() if which(dtype))


def _halves(table):
    return " and ".join(filter(_is_half, table))


# --------------------------------------------------------------------------------------------------------------- the table


def table(report):
    """The report as text: one table, then the verdict, as wide as the terminal but at most 100 columns."""
    from rich import box  # here, because it takes as long to import as half of minamp
    from rich.console import Console
    from rich.table import Table

    a, b = report.with_amp, report.without_amp
    rows = [
        ("kept for backward", report.saved_bytes, _bytes),
        ("with parameters, optimizer", report.all_bytes, _bytes),
        ("device memory, peak", report.peak_bytes, _bytes),
        ("forward", report.forward_time, _seconds),
        ("whole step", report.step_time, _seconds),
        ("matmuls, convolutions", Pair(a.products, b.products), _dtypes),
        ("all op outputs", Pair(a.activations, b.activations), _dtypes),
        ("gradients passed back", Pair(a.passed_back, b.passed_back), _dtypes),
        ("casts", Pair(a.casts, b.casts), str),
        ("parameters", Pair(report.parameters, report.parameters), _lengths),
        ("gradients of parameters", Pair(report.gradients, report.gradients), _lengths),
    ]
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    out.add_column("")
    for name in ("with autocast", "without", "ratio"):
        out.add_column(name, justify="right")
    for name, pair, text in rows:
        if pair is not None:
            ratio = f"{pair.ratio:.2f}" if text in (_bytes, _seconds) else ""
            out.add_row(name, text(pair.with_amp), text(pair.without_amp), ratio)
    width = min(100, shutil.get_terminal_size().columns)
    # In Jupyter a console would display what it prints and leave `file` empty, so str() would be empty.
    plain = {"color_system": None, "highlight": False, "markup": False, "force_jupyter": False}
    console = Console(file=io.StringIO(), width=width, **plain)
    console.print(out)
    console.print(report.verdict)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()).strip("\n")


def _bytes(n):
    return _three_digits(n, "B", "kB", "MB", "GB", "TB")


def _seconds(t):
    return _three_digits(1e9 * t, "ns", "us", "ms", "s")


def _three_digits(x, *units):
    for unit in units:
        if x < 999.5 or unit == units[-1]:
            return f"{x:#.3g}".rstrip(".") + f" {unit}"
        x /= 1000


def _dtypes(table):
    return ", ".join(f"{sum(row.values())} {dtype}" for dtype, row in sorted(table.items())) or "none"


def _lengths(table):
    return ", ".join(f"{len(row)} {dtype}" for dtype, row in sorted(table.items())) or "none"
