"""Tensors that have to lie on one device: asked before anything is computed."""

from minamp.methods import Methods


def same_device(name, **tensors):
    """RuntimeError if the Tensors among `tensors` lie on different devices."""
    given = {what: t.device for what, t in tensors.items() if isinstance(t, Methods)}
    if len(set(given.values())) > 1:
        found = ", ".join(f"{what} {device}" for what, device in given.items())
        raise RuntimeError(
            f"{name}: tensors on different devices ({found}): move them to one with x.to('cuda') or x.cpu()"
        )
