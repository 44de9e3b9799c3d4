"""One line of the speed table, and how its times are taken."""

import time
from dataclasses import dataclass

MISSING = "torch not installed"
PAUSE = 0.02  # seconds before a candidate's turn: BLAS and OpenMP threads spin for a while and would slow the next one


@dataclass
class Row:
    """One line of the table. goal is a number that `value` must not exceed (or, with at_least, not fall short of)."""

    work: str
    value: float | None  # None: not measured, `detail` says why
    unit: str = "x"
    goal: float | None = None
    at_least: bool = False
    detail: str = ""
    why: str = ""  # what stands in the way, printed under the table where the goal is missed

    @property
    def met(self):
        if self.value is None or self.goal is None:
            return None
        return self.value >= self.goal if self.at_least else self.value <= self.goal

    def verdict(self):
        if self.met is None:
            return "-" if self.value is not None else self.detail
        if self.met:
            return "met"
        miss = self.goal / self.value - 1 if self.at_least else self.value / self.goal - 1
        return f"missed by {miss:.0%}"


def fastest(candidates, rounds, calls=3, clock=time.perf_counter):
    """Seconds per call of every candidate (name -> function): in turn, `rounds` times, the fastest call of each.

    The first call of a turn is not timed: it brings caches and threads back. clock: one that waits, for work on a GPU.
    """
    best = dict.fromkeys(candidates, float("inf"))
    for _ in range(rounds):
        for name, function in candidates.items():
            time.sleep(PAUSE)
            function()
            for _ in range(calls):
                start = clock()
                function()
                best[name] = min(best[name], clock() - start)
    return best
