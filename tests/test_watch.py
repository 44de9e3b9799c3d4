"""watch: the numbers it reports are exact, the op it blames is the right one, and watching changes nothing."""

import threading
import tracemalloc

import numpy as np
import pytest

import minamp
import minamp.nn.functional as F
from minamp import nn, watch
from minamp.record import observers

FLUSH = 2.0**-25  # float16 rounds this to 0, and the next float32 above it to 2^-24


def mlp(dtype=None):
    minamp.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return model if dtype is None else model.to(dtype)


# ------------------------------------------------------------------------------------------------------- tensor_stats


def test_stats_of_a_cast_to_half():
    x = np.array(
        [0.0, FLUSH, np.nextafter(np.float32(FLUSH), 1), 2.0**-15, 1.0, 65519.0, 65520.0, np.nan], np.float32
    )
    s = watch.tensor_stats(minamp.tensor(x), minamp.float16)
    assert (s.size, s.dtype) == (8, minamp.float16)
    assert (s.zeros, s.flushed, s.subnormal, s.inf, s.nan) == (1 / 8, 1 / 8, 2 / 8, 1 / 8, 1 / 8)
    assert (s.max_abs, s.min_abs) == (65520.0, FLUSH)
    assert s.flushed_of_nonzero == pytest.approx(1 / 7)


def test_stats_by_its_own_dtype():
    s = watch.tensor_stats(minamp.tensor(np.array([2.0**-24, np.inf, 0.0, -3.0]), dtype=minamp.float16))
    assert (s.zeros, s.flushed, s.subnormal, s.inf, s.nan) == (0.25, 0.0, 0.25, 0.25, 0.0)
    assert (s.max_abs, s.min_abs) == (3.0, 2.0**-24)
    assert watch.tensor_stats(np.array([FLUSH], np.float32)).flushed == 0.0


def test_stats_of_bfloat16_and_of_nothing():
    s = watch.tensor_stats(np.array([1e-30, 1e38]), minamp.bfloat16)
    assert (s.flushed, s.inf) == (0.0, 0.0)
    empty = watch.tensor_stats(np.zeros((0, 3), np.float32), minamp.float16)
    assert (empty.size, empty.zeros, empty.max_abs, empty.flushed_of_nonzero) == (0, 0.0, 0.0, 0.0)


def test_stats_refuse_integers():
    with pytest.raises(TypeError, match="unsupported dtype int64"):
        watch.tensor_stats(np.arange(3))


# -------------------------------------------------------------------------------------------------- exponent_histogram


def test_histogram_bins_are_powers_of_two():
    below_one = np.nextafter(np.float32(1), np.float32(0))
    x = np.array([0, 1, -1.5, below_one, 2, 0.25, np.inf, np.nan, 2.0**-50, 2.0**16, 2.0**-40], np.float32)
    h = watch.exponent_histogram(x)
    counts = dict(zip(h.exponents.tolist(), h.counts.tolist(), strict=True))
    assert {e: n for e, n in counts.items() if n} == {0: 2, -1: 1, 1: 1, -2: 1, -40: 1}
    assert (h.zeros, h.nonfinite, h.below, h.above, h.total) == (1, 2, 1, 1, 11)


def test_histogram_of_half_subnormals_and_sums():
    x = minamp.tensor(np.array([2.0**-24, 65504.0]), dtype=minamp.float16)
    h = watch.exponent_histogram(x) + watch.exponent_histogram(x)
    assert h.counts[h.exponents == -24] == 2 and h.counts[h.exponents == 15] == 2 and h.total == 4
    with pytest.raises(ValueError, match="different ranges"):
        h + watch.exponent_histogram(x, low=-30)


def test_histogram_agrees_with_log2():
    x = np.random.default_rng(0).lognormal(0, 8, 5000)
    h = watch.exponent_histogram(x, low=-60, high=60)
    e, n = np.unique(np.floor(np.log2(x)).astype(int), return_counts=True)
    assert dict(zip(e.tolist(), n.tolist(), strict=True)) == {
        int(k): int(c) for k, c in zip(h.exponents, h.counts, strict=True) if c
    }


# -------------------------------------------------------------------------------------------------------- first_bad_op


@pytest.mark.parametrize(
    "dtype, limit", [("float16", 11.0859375), ("bfloat16", 88.5), ("float32", 88.72283172607422)]
)
def test_exp_limit(dtype, limit):
    assert watch.exp_limit(dtype) == limit
    with np.errstate(over="ignore"):
        inside, outside = (
            minamp.tensor(v, dtype=getattr(minamp, dtype)).exp() for v in (limit, limit * 1.01)
        )
    assert minamp.isfinite(inside) and not minamp.isfinite(outside)


def test_finds_exp_in_a_textbook_softmax():
    logits = minamp.tensor(
        np.array([[1.0, 11.25, 2.0], [12.5, 0.0, 1.0]]), dtype=minamp.float16, requires_grad=True
    )
    with watch.first_bad_op() as bad:
        e = logits.exp()
        (e / e.sum(1, keepdim=True)).sum().backward()
    found = bad.found
    assert (found.op, found.phase, found.dtype, found.shape) == ("exp", "forward", minamp.float16, (2, 3))
    assert (found.result, found.count, found.value) == ("inf", 2, 12.5)
    assert found.limit == "exp overflows float16 above 11.0859375"
    assert str(bad) == (
        "exp (forward): 2 of 6 values of its float16 result are inf, from finite inputs x = 12.5 (shape (2, 3)); "
        "exp overflows float16 above 11.0859375"
    )


def test_naive_softmax_is_one_op_with_the_same_limit():
    x = minamp.tensor(np.array([[1.0, 12.0]]), dtype=minamp.float16)
    with watch.first_bad_op() as bad:
        minamp.naive_half_softmax(x)
    assert (bad.found.op, bad.found.value, bad.found.result) == ("naive_half_softmax", 12.0, "nan")
    assert "exp overflows float16 above 11.0859375" in str(bad)


def test_both_factors_at_the_bad_place():
    a = minamp.tensor(np.array([[1.0, 300.0], [2.0, 400.0]]), dtype=minamp.float16)
    b = minamp.tensor(np.array([500.0, 250.0]), dtype=minamp.float16)
    with watch.first_bad_op() as bad:
        a * b
    assert [(n, v) for n, _, v in bad.found.inputs] == [("a", 400.0), ("b", 250.0)]
    assert "float16 ends at 65504, and results from 65520 on become inf" in str(bad)


@pytest.mark.parametrize(
    "compute, words",
    [
        (lambda x: x / 0.0, "it divides by 0"),
        (lambda x: (x * 0.0).log(), "log is -inf at 0"),
        (lambda x: (-x).sqrt(), "sqrt is nan below 0"),
        (lambda x: (x * 1e5).half(), "results from 65520 on become inf"),
        (lambda x: minamp.where(x > 0, x * 1e30 * 1e10, x), "float32 ends at 3.40282e"),
    ],
)
def test_limits_in_words(compute, words):
    with watch.first_bad_op() as bad:
        compute(minamp.tensor([1.0, 2.0]))
    assert words in bad.found.limit


def test_matmul_names_the_largest_of_each_input():
    a = minamp.tensor(np.array([[100.0, -300.0]]), dtype=minamp.float16)
    b = minamp.tensor(np.array([[1.0], [400.0]]), dtype=minamp.float16)
    with watch.first_bad_op() as bad:
        a @ b
    assert [v for _, _, v in bad.found.inputs] == [-300.0, 400.0]


def test_backward_is_watched_too():
    x = minamp.tensor(np.array([3e-3, 1.0]), dtype=minamp.float16, requires_grad=True)
    with watch.first_bad_op() as bad:
        (x.log() * 300.0).sum().backward()
    found = bad.found
    assert (found.op, found.phase, found.argument, found.dtype) == ("log", "backward", "x", minamp.float16)
    assert found.inputs[0][0] == "incoming gradient" and found.value == 300.0
    assert found.inputs[1][2] == pytest.approx(3e-3, rel=1e-3)
    assert "log (backward): 1 of 2 values of its float16 gradient for x are inf" in str(bad)


def test_integers_given_to_a_floating_op():
    with watch.first_bad_op() as bad:
        minamp.tensor([2, 0]).log()
    assert str(bad) == (
        "log (forward): 1 of 2 values of its float32 result are inf, from finite inputs x = 0 (shape (2,)); "
        "log is -inf at 0 and nan below"
    )


def test_only_the_first_is_kept_and_handed_down_infinities_are_not_blamed():
    x = minamp.tensor([1.0, float("inf")])
    with watch.first_bad_op() as bad:
        x + 1.0
    assert bad.found is None
    assert "add (forward) was given a non-finite a: it was so before, look at the data or the weights" in str(
        bad
    )
    with watch.first_bad_op() as bad:
        minamp.tensor([100.0]).exp().log().exp()
    assert bad.found.value == 100.0


def test_nothing_found():
    with watch.first_bad_op() as bad:
        minamp.tensor([1.0]).exp()
    assert bad.found is None and str(bad) == "every op gave finite results"


# --------------------------------------------------------------------------------------------------------- saved_bytes


def test_saved_bytes_by_hand():
    model, x = mlp(), minamp.randn(32, 8)
    with watch.saved_bytes() as kept:
        h = model(x)
    # linear keeps x, relu its output, which the second linear keeps too and which counts once; weights are not counted
    assert kept.by_op == {"linear": 32 * 8 * 4, "relu": 32 * 16 * 4}
    assert kept.total == 32 * 8 * 4 + 32 * 16 * 4
    h.sum().backward()


def test_saved_bytes_count_half_copies_of_weights():
    model, x = mlp(), minamp.randn(32, 8)
    with watch.saved_bytes() as kept, minamp.autocast():
        model(x)
    # the half weight of the first layer is kept by nobody: x needs no gradient
    assert kept.by_op == {"linear": 32 * 8 * 2 + 16 * 4 * 2, "relu": 32 * 16 * 2}


def test_saved_bytes_of_views_masks_and_no_grad():
    x = minamp.randn(4, 6, requires_grad=True)
    with watch.saved_bytes() as kept:
        y = x.exp()
        y.reshape(-1).square()  # the same memory as y, which exp keeps
        minamp.dropout(y, 0.5)  # keeps a mask of one byte a value
    assert kept.by_op == {"exp": 96, "masked_scale": 24}
    with watch.saved_bytes() as kept, minamp.no_grad():
        x.exp()
    assert kept.total == 0


def test_saved_bytes_across_steps():
    x = minamp.randn(16, 16, requires_grad=True)
    with watch.saved_bytes() as kept:
        for _ in range(3):
            x.exp().sum().backward()
    assert kept.total == 3 * 16 * 16 * 4


# ------------------------------------------------------------------------------------------------- gradient_histograms


@pytest.mark.parametrize("amp", [False, True])
def test_every_gradient_is_counted_once(amp):
    model, x, y = mlp(), minamp.randn(32, 8), minamp.randint(4, (32,))
    with minamp.autocast(enabled=amp):
        loss = F.cross_entropy(model(x), y)
    with watch.gradient_histograms() as seen:
        loss.backward()
    weights = sum(
        (watch.exponent_histogram(p.grad) for p in model.parameters()), watch.exponent_histogram(np.zeros(0))
    )
    assert seen.weights.total == 8 * 16 + 16 + 16 * 4 + 4
    assert np.array_equal(seen.weights.counts, weights.counts) and seen.weights.zeros == weights.zeros
    assert seen.activations.total >= 32 * (16 + 16 + 4)


# ------------------------------------------------------------------------------------------------------------ all of them


def test_watching_changes_nothing_and_leaves_nothing_behind():
    x, y = minamp.randn(32, 8), minamp.randint(4, (32,))

    def step():
        model = mlp()
        with minamp.autocast():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.item(), [p.grad.numpy() for p in model.parameters()]

    loss, gradients = step()
    with watch.first_bad_op(), watch.saved_bytes(), watch.gradient_histograms():
        watched, seen = step()
    assert watched == loss and all(np.array_equal(a, b) for a, b in zip(seen, gradients, strict=True))
    assert observers == []
    with pytest.raises(ZeroDivisionError), watch.first_bad_op():
        1 / 0  # noqa: B018
    assert observers == []


def test_ops_of_another_thread_are_not_seen():
    x = minamp.tensor([200.0], requires_grad=True)
    with watch.first_bad_op() as bad, watch.saved_bytes() as kept:
        other = threading.Thread(target=lambda: x.exp().sum().backward())
        other.start()
        other.join()
    assert bad.found is None and kept.total == 0 and observers == []


# ----------------------------------------------------------------------------------------------------------- peak_memory


def test_a_users_tracemalloc_goes_on_and_its_earlier_peak_does_not_count():
    def peak():
        with watch.peak_memory() as block:
            np.ones(1 << 17)
        return block.bytes

    tracemalloc.start()
    try:
        held = np.ones(1 << 18)
        np.ones(1 << 20)
        assert 1 << 20 <= peak() < 1.2 * (1 << 20) and tracemalloc.is_tracing()
        assert held.nbytes == 1 << 21
    finally:
        tracemalloc.stop()
    assert 1 << 20 <= peak() and not tracemalloc.is_tracing()
