"""The detector, its boxes, loss and grade; the demo's variants of its training."""

import dataclasses
import functools
import json
from pathlib import Path

import numpy as np
import pytest

import minamp
from minamp import optim
from minamp.autograd import check_grads
from minamp.data import DataLoader
from minamp.demo import detector as story
from minamp.demo import detector_act
from minamp.demo.__main__ import main
from minamp.detector import (
    Detector,
    assign,
    average_precision,
    box_iou,
    class_bce,
    decode,
    detect,
    detection_loss,
    generalized_iou,
    mean_average_precision,
    nms,
)
from minamp.scenes import scenes


def some_boxes(rng, n):
    corner = rng.uniform(0, 30, (n, 2))
    return np.concatenate([corner, corner + rng.uniform(2, 20, (n, 2))], 1)


def plain_iou(a, b):
    """IoU of two boxes by counting, as a schoolbook has it."""
    w = min(a[2], b[2]) - max(a[0], b[0])
    h = min(a[3], b[3]) - max(a[1], b[1])
    both = w * h if w > 0 and h > 0 else 0.0
    return both / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both)


# ------------------------------------------------------------------------------------------------------------- the network


def test_the_grids_and_what_they_say_of_an_image():
    for size in 64, 128:
        fine, coarse = Detector()(minamp.zeros(2, 1, size, size))
        assert fine.shape == (2, 15, size // 4, size // 4) and coarse.shape == (2, 15, size // 8, size // 8)
    with pytest.raises(
        ValueError, match=r"Detector: images must be \(N, 1, H, W\) with H and W multiples of 8"
    ):
        Detector()(minamp.zeros(2, 1, 60, 64))
    with minamp.autocast():
        assert {grid.dtype for grid in Detector()(minamp.zeros(1, 1, 64, 64))} == {minamp.float16}
        floats = Detector(head=story.FloatHead)(minamp.zeros(1, 1, 64, 64))
        assert {grid.dtype for grid in floats} == {minamp.float32}


def grids_with(cell, values):
    """Grids of a 16x16 image; the fine grid's cell (row, column) holds `values`."""
    fine, coarse = np.full((1, 15, 4, 4), -9, np.float32), np.full((1, 15, 2, 2), -9, np.float32)
    fine[0, :, *cell] = values
    return [minamp.tensor(fine), minamp.tensor(coarse)]


def test_decode_by_hand():
    values = [0.5, 0.25, np.log(2), np.log(3), 7.0, *range(10)]
    boxes, objectness, classes = decode(grids_with((1, 2), values))
    assert boxes.shape == (1, 20, 4) and objectness.shape == (1, 20) and classes.shape == (1, 20, 10)
    at = 1 * 4 + 2  # centre (2.5 * 4, 1.25 * 4), width 2 * 4, height 3 * 4
    np.testing.assert_allclose(boxes[0, at].numpy(), [10 - 4, 5 - 6, 10 + 4, 5 + 6], rtol=1e-6)
    assert objectness[0, at].item() == 7 and classes[0, at].tolist() == list(range(10))
    # the last cell of the coarse grid, column 1 and row 1, stride 8: centre ((1 - 9) * 8, ...), width exp(-9) * 8
    np.testing.assert_allclose(
        boxes[0, -1].numpy(), [-64 - np.exp(-9) * 4] * 2 + [-64 + np.exp(-9) * 4] * 2, rtol=1e-6
    )


# ------------------------------------------------------------------------------------------------------------------- boxes


def test_iou_by_hand_and_by_counting():
    a = minamp.tensor([[0, 0, 2, 2.0], [10, 10, 12, 14]])
    b = minamp.tensor([[1, 1, 3, 3.0], [0, 0, 2, 2], [10, 10, 14, 12]])
    np.testing.assert_allclose(box_iou(a, b).numpy(), [[1 / 7, 1, 0], [0, 0, 4 / 12]], rtol=1e-6)
    rng = np.random.default_rng(0)
    a, b = some_boxes(rng, 20), some_boxes(rng, 30)
    expected = [[plain_iou(x, y) for y in b] for x in a]
    np.testing.assert_allclose(box_iou(minamp.tensor(a), minamp.tensor(b)).numpy(), expected, rtol=1e-12)


def test_generalized_iou_by_hand():
    a = minamp.tensor([[0, 0, 2, 2.0], [0, 0, 2, 2], [0, 0, 1, 1]])
    b = minamp.tensor([[0, 0, 2, 2.0], [1, 1, 3, 3], [9, 0, 10, 1]])
    # equal; 1/7 and a hull of 9 of which 2 is empty; apart, and a hull of 10 of which 8 is empty
    np.testing.assert_allclose(generalized_iou(a, b).numpy(), [1, 1 / 7 - 2 / 9, -8 / 10], rtol=1e-5)
    rng = np.random.default_rng(1)
    check_grads(generalized_iou, some_boxes(rng, 5), some_boxes(rng, 5))


def test_nms_by_hand():
    boxes = minamp.tensor([[0, 0, 10, 10.0], [0, 0, 10, 9], [20, 20, 30, 30], [0, 0, 10, 5]])
    scores = minamp.tensor([0.8, 0.9, 0.1, 0.7])
    assert nms(boxes, scores, 0.5).tolist() == [1, 2]  # box 0 and 3 overlap box 1 by 0.9 and 0.56
    assert nms(boxes, scores, 0.6).tolist() == [1, 3, 2]
    assert nms(boxes[:0], scores[:0], 0.5).tolist() == []
    with pytest.raises(
        ValueError, match=r"nms: give boxes \(n, 4\) and scores \(n,\), got \(4, 4\) and \(3,\)"
    ):
        nms(boxes, scores[:3], 0.5)


@pytest.mark.parametrize("seed", range(5))
def test_nms_by_brute_force(seed):
    rng = np.random.default_rng(seed)
    boxes, scores = some_boxes(rng, 40), rng.random(40)
    left, kept = set(range(40)), []
    while left:  # take the best, throw out all that overlap it
        best = max(left, key=lambda i: scores[i])
        kept.append(best)
        left = {i for i in left if i != best and plain_iou(boxes[i], boxes[best]) <= 0.3}
    assert 3 < len(kept) < 40
    assert nms(minamp.tensor(boxes), minamp.tensor(scores), 0.3).tolist() == kept


def test_detect_scores_sorts_and_keeps_classes_apart():
    logit = lambda p: np.log(p / (1 - p))  # noqa: E731
    one = np.array(
        [0, 0, np.log(8), np.log(8), logit(0.8)] + [-20] * 3 + [logit(0.5)] + [-20] * 6, np.float32
    )
    grids = grids_with((1, 1), one)
    grids[0]._data[0, :, 1, 2] = one + np.eye(15)[4] * (logit(0.9) - logit(0.8)) - np.eye(15)[0] * 0.9
    (found,) = detect(grids)
    assert found[2].tolist() == [3]  # almost the same box of the same class: the surer one stays
    assert found[1].item() == pytest.approx(0.9 * 0.5, abs=1e-6)
    grids[0]._data[0, 5:, 1, 2] = np.roll(one[5:], 1)
    (found,) = detect(grids)
    assert found[2].tolist() == [4, 3] and found[0].shape == (2, 4)
    np.testing.assert_allclose(found[0][1].numpy(), [4 - 16, 4 - 16, 4 + 16, 4 + 16], rtol=1e-5)
    assert [len(f) for f in detect([grid * float("nan") for grid in grids])[0]] == [0, 0, 0]


# -------------------------------------------------------------------------------------------------------------------- loss


def test_each_box_is_given_to_the_cells_around_its_centre():
    boxes = minamp.tensor(
        [[[10, 10, 20, 20], [3, 8, 27, 32], [12, 12, 20, 20], [0, 0, 0, 0]]], minamp.float32
    )
    grids = [minamp.zeros(1, 15, 8, 8), minamp.zeros(1, 15, 4, 4)]
    row, positive = assign(grids, boxes, minamp.tensor([[3, 4, 5, -1]]))
    fine, coarse = positive[0, :64].reshape(8, 8).numpy(), positive[0, 64:].reshape(4, 4).numpy()
    owner = row[0, :64].reshape(8, 8).numpy()
    # box 0 has its centre at (15, 15), box 2 at (16, 16): both ask cells with centres at 14 and 18; the smaller gets them
    assert {tuple(map(int, at)) for at in np.argwhere(fine)} == {(3, 3), (3, 4), (4, 3), (4, 4)}
    assert (owner[fine] == 2).all()
    # box 1, of 24 pixels, goes to the coarse grid: its centre (15, 20) lies near columns at 12 and 20, and the row at 20
    assert {tuple(map(int, at)) for at in np.argwhere(coarse)} == {(2, 1), (2, 2)}
    assert (row[0, 64:].reshape(4, 4).numpy()[coarse] == 1).all()


def test_the_loss_by_hand():
    """One box, four cells, all logits 0 and boxes of one stride around the cell's corner."""
    grids = [minamp.zeros(1, 15, 4, 4), minamp.zeros(1, 15, 2, 2)]
    boxes, classes = minamp.tensor([[[4, 4, 12, 12.0]]]), minamp.tensor([[7]])
    giou = []
    for x in 4, 8:  # the cells around (8, 8) say boxes of 4x4 with their upper left corners as centres
        for y in 4, 8:
            both = (min(x + 2, 12) - max(x - 2, 4)) * (min(y + 2, 12) - max(y - 2, 4))
            union, hull = 64 + 16 - both, (12 - min(x - 2, 4)) * (12 - min(y - 2, 4))
            giou.append(both / union - (hull - union) / hull)
    expected = 5 * sum(1 - g for g in giou) / 4 + 20 * np.log(2) / 4 + 10 * np.log(2)
    assert detection_loss(grids, boxes, classes).item() == pytest.approx(expected, rel=1e-6)
    nothing = detection_loss(grids, boxes, minamp.tensor([[-1]])).item()
    assert nothing == pytest.approx(20 * np.log(2), rel=1e-6)
    with pytest.raises(
        ValueError, match=r"boxes must be \(N, K, 4\) and classes \(N, K\), got \(1, 1, 4\) and \(1,\)"
    ):
        detection_loss(grids, boxes, minamp.tensor([7]))


def test_gradients_of_the_loss():
    made = scenes(2, seed=1)
    boxes, classes = minamp.tensor(made.boxes).double(), minamp.tensor(made.classes)
    rng = np.random.default_rng(0)
    fine, coarse = rng.standard_normal((2, 15, 16, 16)), rng.standard_normal((2, 15, 8, 8))
    for loss in class_bce, story.softmax_loss:
        check_grads(
            lambda a, b, loss=loss: detection_loss([a, b], boxes, classes, loss), fine, coarse, order=1
        )


# ------------------------------------------------------------------------------------------------------------------ metric


def test_average_precision_by_hand():
    right = np.array([True, False, True, False, False, True])
    # recalls 1/4, 2/4, 3/4 with best precisions 1, 2/3, 1/2
    assert average_precision(right, 4) == pytest.approx((1 + 2 / 3 + 1 / 2) / 4)
    assert average_precision(np.array([], bool), 3) == 0.0
    assert average_precision(np.array([True, True]), 2) == 1.0


def test_mean_average_precision_by_hand():
    truth = np.array([[[0, 0, 10, 10], [20, 20, 30, 30]], [[0, 0, 10, 10], [0, 0, 0, 0]]], np.float32)
    classes = np.array([[1, 1], [2, -1]])
    perfect = [
        (truth[0], np.array([0.9, 0.8]), np.array([1, 1])),
        (truth[1, :1], np.array([0.7]), np.array([2])),
    ]
    assert mean_average_precision(perfect, truth, classes) == 1.0
    nothing = (np.zeros((0, 4), np.float32), np.zeros(0), np.zeros(0, int))
    assert mean_average_precision([perfect[0], nothing], truth, classes) == 0.5
    assert mean_average_precision([nothing, nothing], truth, classes) == 0.0
    # the same box twice: the second is wrong, and surer than the other right one
    twice = (truth[0][[0, 0, 1]], np.array([0.9, 0.8, 0.7]), np.array([1, 1, 1]))
    assert mean_average_precision([twice, perfect[1]], truth, classes) == pytest.approx(
        ((1 + 2 / 3) / 2 + 1) / 2
    )
    assert np.isnan(mean_average_precision([nothing, nothing], truth, np.full((2, 2), -1)))
    with pytest.raises(ValueError, match="1 images were detected in, the truth has 2"):
        mean_average_precision([nothing], truth, classes)


@pytest.mark.parametrize("seed", range(3))
def test_mean_average_precision_by_brute_force(seed):
    """For every score as a threshold count what is right among what is left; then integrate the best precisions."""
    rng = np.random.default_rng(seed)
    made = scenes(6, seed=seed)
    found = []
    for boxes, classes in zip(made.boxes, made.classes, strict=True):
        true = boxes[classes >= 0]
        shaken = np.concatenate([true, true, true]) + rng.normal(0, 2.5, (3 * len(true), 4))
        labels = np.where(
            rng.random(len(shaken)) < 0.8, np.tile(classes[classes >= 0], 3), rng.integers(0, 10)
        )
        found.append((shaken.astype(np.float32), rng.random(len(shaken)), labels))
    grades = []
    for c in set(made.classes[made.classes >= 0]):
        total = (made.classes == c).sum()
        points = []
        for threshold in sorted({s for _, score, label in found for s in score[label == c]}, reverse=True):
            right = wrong = 0
            for (boxes, score, label), true, classes in zip(found, made.boxes, made.classes, strict=True):
                mine = [
                    (s, b)
                    for b, s, lab in zip(boxes, score, label, strict=True)
                    if lab == c and s >= threshold
                ]
                free = {tuple(b) for b in true[classes == c]}
                taken = set()
                for _, b in sorted(mine, key=lambda pair: -pair[0]):
                    best = max(free, key=lambda t: plain_iou(b, t), default=None)
                    if best is not None and plain_iou(b, best) >= 0.5 and best not in taken:
                        taken.add(best)
                        right += 1
                    else:
                        wrong += 1
            points.append((right / total, right / (right + wrong)))
        recalls = sorted({0.0} | {r for r, _ in points})
        grades.append(
            sum(
                (b - a) * max(p for r, p in points if r >= b)
                for a, b in zip(recalls, recalls[1:], strict=False)
            )
        )
    assert 0.1 < np.mean(grades) < 0.9
    assert mean_average_precision(found, made.boxes, made.classes) == pytest.approx(np.mean(grades), rel=1e-9)


# ---------------------------------------------------------------------------------------------------------------- training


@pytest.fixture(scope="module")
def data():
    train, test, large = scenes(32), scenes(4, "test"), scenes(1, "test", 128)
    return train, test, large


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_a_few_steps_lower_the_loss(name, data):
    variant = story.VARIANTS[name]
    minamp.manual_seed(0)
    model = Detector(widths=(8, 16, 16))
    optimizer = optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True)
    scaler = minamp.GradScaler(enabled=variant.scaler is not None, init_scale=2.0**12)
    batch = next(iter(DataLoader(data[0], 16)))
    losses = [story.training_step(variant, model, optimizer, scaler, *batch)[0] for _ in range(8)]
    assert losses[-1] < 0.8 * losses[0] and np.isfinite(losses).all()


@pytest.fixture(scope="module")
def trained(data):
    """name -> Run of 3 steps, each trained once."""
    return functools.cache(lambda name: story.train(story.VARIANTS[name], data, 3))


def test_a_run_may_end_in_its_first_step():
    run = story.Run("float16", error="OutOfMemoryError at step 1: conv2d: out of memory")
    assert detector_act.row(run)[2:6] == ("OutOfMemoryError at step 1", "-", "-", "-")


@pytest.mark.parametrize("name", story.VARIANTS)
def test_every_variant_has_an_outcome(name, trained):
    run = trained(name)
    row = detector_act.row(run)
    assert len(row) == len(detector_act.COLUMNS) and row[0] == name and run.saved_bytes > 0
    if name == "no_update":
        assert row[2] == "RuntimeError at step 2" and "unscale_() is being called after step()" in run.error
    elif name == "step_before_unscale":
        assert run.broken and row[2] == f"weights are NaN from step {run.nan_step} on" and run.mean_ap is None
    else:
        assert len(run.losses) == 3 and 0 <= run.mean_ap <= 1 and row[2].startswith("loss 1")
        assert (1 in run.skips) == (name in ("init_scale_2_20", "softmax_half"))


def test_what_the_order_of_the_last_lines_does():
    """On a loss 3 w, whose gradient is 3, with learning rate 1 and a scale of 2^16: how far w moves."""
    moves = {}
    for finish in story.recipe, story.clip_first, story.step_first:
        w = minamp.nn.Linear(1, 1, bias=False)
        start, scaler = w.weight.item(), minamp.GradScaler()
        optimizer = optim.SGD(w.parameters(), 1.0)
        scaler.scale(w(minamp.tensor([[3.0]])).sum()).backward()
        assert finish(w, optimizer, scaler)
        moves[finish.__name__] = start - w.weight.item()
    assert moves["recipe"] == pytest.approx(3, rel=1e-5)
    assert moves["clip_first"] == pytest.approx(story.MAX_NORM / 2**16, rel=1e-3)
    assert moves["step_first"] == pytest.approx(3 * 2**16, rel=1e-5)


def test_textbook_softmax_is_right_in_float32_and_breaks_in_half():
    logits, labels = minamp.tensor([[1.0, 2, 3], [0, 0, 12]]), minamp.tensor([0, 2])
    right = minamp.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
    assert story.softmax_loss(logits, labels).item() == pytest.approx(right, rel=1e-6)
    assert not np.isfinite(story.softmax_loss(logits.half(), labels).item())  # exp(12) is inf in float16
    with minamp.autocast():  # inside a region exp is float32
        assert story.softmax_loss(logits.half(), labels).item() == pytest.approx(right, rel=1e-3)


# ------------------------------------------------------------------------------------------------------------ the command


def test_all_variants_by_the_command_line(tmp_path, capsys, monkeypatch, data, trained):
    monkeypatch.setattr(detector_act, "QUICK", 3)
    monkeypatch.setattr(detector_act, "load", lambda quick: data)
    monkeypatch.setattr(detector_act, "train", lambda variant, *_: trained(variant.name))
    file = tmp_path / "out.json"
    assert main(["detector", "--quick", "--figures", str(tmp_path), "--json", str(file)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in ("--quick: 3 steps show what fails at once", "no mAP is judged", "4 of 4 claims held"):
        assert words in out
    found = json.loads(file.read_text())
    assert list(found["acts"]["detector"]) == list(story.VARIANTS)
    assert list(tmp_path.iterdir()) == [file]  # a short run leaves the README's figure and table alone


def test_a_full_run_draws_and_writes_and_says_what_it_missed(tmp_path, capsys, monkeypatch, data, trained):
    monkeypatch.setattr(detector_act, "load", lambda quick: data)
    # 3 steps: learns nothing
    monkeypatch.setattr(detector_act, "train", lambda variant, *_: trained(variant.name))
    assert main(["detector", "--figures", str(tmp_path)]) == 1
    assert "Not as expected: float32: mAP@0.5" in " ".join(capsys.readouterr().out.split())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["detector.md", "detector.png"]
    assert (tmp_path / "detector.png").read_bytes()[1:4] == b"PNG"
    table = (tmp_path / "detector.md").read_text().splitlines()
    assert len(table) == 2 + len(story.VARIANTS) and len({line.count("|") for line in table}) == 1


def test_one_variant_by_the_command_line(tmp_path, capsys):
    assert main(["detector", "--quick", "--variant", "no_update", "--figures", str(tmp_path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "no_update RuntimeError at step 2" in out and "1 of 1 claims held" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options, words",
    [
        (["--variant", "half"], "belongs to the detector"),
        (["detector", "--variant", "quarter"], "invalid choice"),
        (["detector", "--act", "1"], "detector has no acts"),
    ],
)
def test_wrong_options(options, words, capsys):
    with pytest.raises(SystemExit) as exit:
        main(options)
    assert exit.value.code == 2 and words in capsys.readouterr().err


def test_claims_that_do_not_hold_are_said():
    class Silent:
        claims, quick = [], False

        def claim(self, act, sentence, ok):
            self.claims.append((sentence, ok))

    run = story.Run("x", losses=[1.0], scales=[1.0], saved_bytes=10, mean_ap=0.5)
    names = list(story.VARIANTS)
    detector_act._claims(Silent(), {name: dataclasses.replace(run, name=name) for name in names})
    held = [sentence for sentence, ok in Silent.claims if ok]
    assert len(Silent.claims) == 11 and [s.split(":")[0] for s in held] == [
        "float16",
        "bfloat16",
        "head_float",
    ]


def test_the_readme_shows_the_table_that_was_measured():
    root = Path(__file__).parents[1]
    table = (root / "figures" / "detector.md").read_text(encoding="utf-8")
    assert table in (root / "README.md").read_text(encoding="utf-8")
    assert [line.split("`")[1] for line in table.splitlines()[2:]] == list(story.VARIANTS)
