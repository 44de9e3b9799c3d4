"""Every exercise: 100 points, right answers get all of them, each wrong answer loses what it should."""

import numpy as np
import pytest

pytest.importorskip("jupytext", reason="jupytext reads the exercises' sources: make setup installs it")

from grading import local

EXERCISES = {name: local.master(name) for name in local.names()}
RIGHT = [
    (name, task, k)
    for name in EXERCISES
    for task, sources in local.solutions(name).RIGHT.items()
    for k in range(len(sources))
]
WRONG = [
    pytest.param(name, task, wrong, id=f"{name}-{task}-{wrong.story.replace(' ', '_')}")
    for name in EXERCISES
    for task, wrongs in local.solutions(name).WRONG.items()
    for wrong in wrongs
]


@pytest.mark.parametrize("name", EXERCISES)
def test_an_exercise_has_100_points_a_written_question_and_enough_answers_to_try(name):
    exercise, known = EXERCISES[name], local.solutions(name)
    tasks = [cell.id for cell in exercise.of("answer")]
    assert exercise.points == 100
    assert len(exercise.of("written")) == 1
    assert set(known.RIGHT) == set(known.WRONG) == set(tasks)
    assert all(len(known.RIGHT[task]) >= 3 and len(known.WRONG[task]) >= 10 for task in tasks)


@pytest.mark.parametrize("name", EXERCISES)
def test_the_reference_solution_gets_every_point(name):
    for seed in range(3):
        assert [mark.text for mark in local.marks(EXERCISES[name], seed=seed) if mark.points < mark.of] == []


@pytest.mark.parametrize("name, task, k", RIGHT)
def test_a_right_answer_written_differently_gets_every_point(name, task, k):
    marks = local.marks(EXERCISES[name], {task: local.solutions(name).RIGHT[task][k]}, seed=k)
    assert [mark.text for mark in marks if mark.points < mark.of] == []


@pytest.mark.parametrize("name, task, wrong", WRONG)
def test_a_wrong_answer_loses_what_it_should(name, task, wrong):
    reference = next(cell.source for cell in EXERCISES[name].of("answer") if cell.id == task)
    marks = local.marks(EXERCISES[name], {task: wrong.of(reference)})
    assert wrong.loses and {mark.id for mark in marks if mark.points < mark.of} == set(wrong.loses)


def test_marking_leaves_numpys_settings_as_they_were():
    before = np.geterr()
    local.marks(EXERCISES["ex6_mend"])
    assert np.geterr() == before
