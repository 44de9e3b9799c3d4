"""Telemetry: what half precision does to the numbers of a training step.

`tensor_stats` and `exponent_histogram` look at one array. The three context managers look over the engine's shoulder: every op
that runs inside them, forward and backward, is shown to them (record.observers). They change no number.

    with watch.first_bad_op() as bad:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
    print(bad)      # exp (forward): 2 of 640 values of its float16 result are inf, from finite inputs x = 14.1484
                    # (shape (64, 10)); exp overflows float16 above 11.0859375
"""

from minamp.watch.bad_op import BadOp, exp_limit, first_bad_op  # noqa: F401
from minamp.watch.memory import peak_memory, saved_bytes  # noqa: F401
from minamp.watch.numbers import (  # noqa: F401
    Histogram,
    TensorStats,
    exponent_histogram,
    gradient_histograms,
    tensor_stats,
)
