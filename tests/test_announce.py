import threading

import pytest

from minamp.announce import announced, listen


class Listener(listen):
    def __init__(self):
        self.heard = []

    def begin(self, name, arguments):
        self.heard.append((name, arguments))

    def end(self, result):
        self.heard.append("end")


@pytest.fixture
def listener():
    with Listener() as one:
        yield one


@announced("half")
def half(x, by=2, *, round_up=False):
    """Half of x."""
    return -(-x // by) if round_up else x // by


def test_listeners_are_told_name_and_arguments_in_their_order(listener):
    assert half(7) == 3 and half(by=2, x=7, round_up=True) == 4
    first, _, second, _ = listener.heard
    assert first == ("half", {"x": 7, "by": 2, "round_up": False})
    assert list(second[1]) == ["x", "by", "round_up"] and second[1]["round_up"] is True


def test_the_end_is_told_also_when_it_raises(listener):
    with pytest.raises(ZeroDivisionError):
        half(1, 0)
    assert listener.heard[-1] == "end"


def test_without_listeners_it_is_the_function_it_was():
    assert half(9) == 4 and half.__doc__ == "Half of x." and half.__name__ == "half"


def test_the_calls_of_another_thread_are_not_told(listener):
    other = threading.Thread(target=half, args=(7,))
    other.start()
    other.join()
    assert listener.heard == []
