"""Finding and Report: what the doctor says, as text and as data."""

import math
from dataclasses import dataclass, field

ERROR, WARNING = "error", "warning"  # training is wrong or stops; training is worse than it could be


@dataclass(frozen=True)
class Finding:
    """One fault: its stable name, how bad it is, what it is, where, the numbers that show it, and the line that repairs it."""

    code: str
    severity: str  # 'error' or 'warning'
    what: str
    where: str  # a parameter, an op, or the user's line as 'file:line in function: code'
    repair: str
    evidence: dict = field(default_factory=dict)
    at: int | None = None  # the number of the event that it begins with, where that matters

    def __str__(self):
        numbers = ", ".join(f"{name} = {_number(value)}" for name, value in self.evidence.items())
        lines = [f"{self.severity}: {self.code}", f"  {self.what}"]
        lines += [f"  where:    {self.where}"] if self.where else []
        lines += [f"  evidence: {numbers}"] if numbers else []
        return "\n".join([*lines, f"  repair:   {self.repair}"])


@dataclass(frozen=True)
class Advice:
    """What a float32 run of the step says about mixed precision here: sentences, and the numbers they rest on."""

    text: str
    numbers: dict = field(default_factory=dict)

    def __str__(self):
        return self.text


class Report(list):
    """A list of Findings, errors first, the cause before its consequences; empty for a healthy step.

    advice: what one step in float32 says. steps: how often the step was run. error: the message of the exception with which
    it ended, or None.
    """

    def __init__(self, findings, advice, steps, error=None):
        super().__init__(findings)
        self.advice, self.steps, self.error = advice, steps, error

    def __str__(self):
        count = f"{len(self)} finding{'s' if len(self) > 1 else ''}" if self else "nothing wrong"
        parts = [f"minamp.doctor: {count} in {self.steps} runs of the step"]
        if self.error:
            parts.append(f"The step ended with {self.error}")
        parts += [f"{i}. {finding}" for i, finding in enumerate(self, 1)]
        if self.advice.text:
            parts.append("advice:\n" + "\n".join(f"  {line}" for line in self.advice.text.splitlines()))
        return "\n\n".join(parts)

    __repr__ = __str__

    def to_json(self):
        """The report as dicts, lists, strings and numbers that json.dumps takes; inf and nan as strings."""
        return {
            "findings": [
                {
                    "code": f.code,
                    "severity": f.severity,
                    "what": f.what,
                    "where": f.where,
                    "evidence": _plain(f.evidence),
                    "repair": f.repair,
                }
                for f in self
            ],
            "advice": {"text": self.advice.text, "numbers": _plain(self.advice.numbers)},
            "steps": self.steps,
            "error": self.error,
        }


def _plain(x):
    if isinstance(x, dict):
        return {str(k): _plain(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_plain(v) for v in x]
    if isinstance(x, float) and not math.isfinite(x):
        return str(x)
    return x


def _number(x):
    if isinstance(x, list | tuple):
        return "[" + ", ".join(map(_number, x)) + "]"
    if isinstance(x, float) and math.isfinite(x) and abs(x) >= 2 and math.log2(abs(x)).is_integer():
        return f"{x:g} (2^{int(math.log2(abs(x)))})"
    return f"{x:.4g}" if isinstance(x, float) else str(x)
