"""Scenes of digits."""

import numpy as np
import pytest

from minamp.data import DataLoader, digits
from minamp.scenes import MOST, SIDES, Scenes, _most_overlap, scenes


def test_scenes_are_images_boxes_and_classes():
    made = scenes(40)
    assert isinstance(made, Scenes) and len(made) == 40
    assert made.images.shape == (40, 1, 64, 64) and made.images.dtype == np.float32
    assert made.boxes.shape == (40, MOST, 4) and made.boxes.dtype == np.float32
    assert made.classes.shape == (40, MOST) and made.classes.dtype == np.int64
    used = made.classes >= 0
    assert set(used.sum(1)) == set(range(1, MOST + 1)) and set(made.classes[used]) == set(range(10))
    assert (np.diff(used.astype(int)) <= 0).all()  # used rows come first
    assert (made.boxes[~used] == 0).all()
    sides = made.boxes[used][:, 2:] - made.boxes[used][:, :2]
    assert sides.min() >= 4 and sides.max() <= SIDES[1] and sides.max(1).min() >= SIDES[0]
    assert made.boxes.min() >= 0 and made.boxes.max() <= 64
    x, boxes, classes = next(iter(DataLoader(made, 8)))
    assert x.shape == (8, 1, 64, 64) and boxes.shape == (8, MOST, 4) and classes.shape == (8, MOST)


@pytest.mark.parametrize("size", [64, 128])
def test_boxes_hold_all_the_ink_and_fit_it(size):
    made = scenes(10, size=size, noise=0)
    assert made.images.shape[2:] == (size, size) and (made.images >= 0).all() and (made.images <= 1).all()
    for image, boxes, classes in zip(made.images[:, 0], made.boxes.astype(int), made.classes, strict=True):
        rest = image.copy()
        for x1, y1, x2, y2 in boxes[classes >= 0]:
            part = image[y1:y2, x1:x2]
            assert all(edge.max() > 0.02 for edge in (part[0], part[-1], part[:, 0], part[:, -1]))
            rest[y1:y2, x1:x2] = 0
        assert (rest == 0).all()


def test_boxes_overlap_no_more_than_asked():
    apart, close = scenes(30, overlap=0.0), scenes(30, overlap=0.6)
    most = []
    for made in apart, close:
        pairs = [
            _most_overlap(box, np.delete(boxes[classes >= 0], i, 0))
            for boxes, classes in zip(made.boxes, made.classes, strict=True)
            for i, box in enumerate(boxes[classes >= 0])
        ]
        most.append(max(pairs))
    assert most[0] == 0 and 0.3 < most[1] <= 0.6
    assert _most_overlap(np.array([0, 0, 4, 4.0]), np.array([[2, 2, 12, 12.0]])) == 4 / 16


def test_scenes_are_seeded():
    a, b, other = scenes(5, seed=3), scenes(5, seed=3), scenes(5, seed=4)
    assert all(np.array_equal(x, y) for x, y in zip(a.tensors, b.tensors, strict=True))
    assert not np.array_equal(a.images, other.images)
    assert not np.array_equal(scenes(5, "test", seed=3).images, a.images)


def test_training_and_test_scenes_are_composed_of_their_own_split(monkeypatch):
    """The splits share no digit (test_data.py); here: each kind of scene asks for its own."""
    asked = []
    monkeypatch.setattr(
        "minamp.scenes.digits", lambda split, normalize: asked.append(split) or digits(split, normalize)
    )
    scenes(1, "train"), scenes(1, "test")
    assert asked == ["train", "test"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"n": 0}, "n must be a whole number of at least 1, got 0"),
        ({"n": 2.5}, "n must be a whole number of at least 1, got 2.5"),
        ({"split": "valid"}, "split must be 'train' or 'test', got 'valid'"),
        ({"size": 96}, "size must be 64 or 128 pixels, got 96"),
        ({"noise": -0.1}, "noise must be at least 0, got -0.1"),
        ({"overlap": 1.5}, r"share of a box and must lie in \[0, 1\], got 1.5"),
    ],
)
def test_errors(arguments, words):
    with pytest.raises(ValueError, match=f"scenes: .*{words}"):
        scenes(**{"n": 2} | arguments)
