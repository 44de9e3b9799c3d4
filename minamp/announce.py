"""Announced calls: the calls that make up a training loop - backward, scaler.step, zero_grad - are told to whoever listens.

Observers (record.observe) see every op; listeners see what stands around the ops, with the arguments. It is told where the
function is defined, so it does not matter by which name the user's loop holds it.
"""

import functools
import inspect
import threading

listeners = []  # those that are entered, of all threads; usually none


class listen:
    """Context manager for classes with begin(name, arguments) and end(result): told of the calls in its own thread."""

    def __enter__(self):
        self.thread = threading.get_ident()
        listeners.append(self)
        return self

    def __exit__(self, *_):
        listeners.remove(self)


def announced(name, like=None):
    """Decorator: listeners are told before and after each call of the function, under `name`, also when it raises (None then).

    arguments: by parameter name and in their order, defaults included. While nobody listens a call costs 0.1 us more.
    like: the function whose parameters they are told as, for one that a user has written in its place.
    """

    def decorate(function):
        own, _ = _parameters(function)
        names, defaults = _parameters(like or function)
        renamed = dict(zip(own, names, strict=False))

        @functools.wraps(function)
        def announcing(*args, **kwargs):
            if not listeners:
                return function(*args, **kwargs)
            here = threading.get_ident()
            told = [listener for listener in listeners if listener.thread == here]
            named = {renamed.get(k, k): v for k, v in kwargs.items()}
            arguments = {**defaults, **dict(zip(names, args, strict=False)), **named}
            for listener in told:
                listener.begin(name, arguments)
            result = None
            try:
                result = function(*args, **kwargs)
                return result
            finally:
                for listener in reversed(told):
                    listener.end(result)

        announcing.announces = name
        return announcing

    return decorate


def _parameters(function):
    """(names of what a function takes by position, all defaults by name, None where there is none)."""
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return names, {p.name: None if p.default is p.empty else p.default for p in parameters}
