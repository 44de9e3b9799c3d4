"""One log and one progress bar for all ranks: rank 0 shows them, the others are quiet."""

from minamp.distributed.group import get_rank


def log(*values):
    """print() on rank 0."""
    if get_rank() == 0:
        print(*values, flush=True)


def track(iterable, description="training"):
    """`iterable`, with a progress bar on rank 0's terminal."""
    if get_rank():
        return iterable
    from rich.progress import track as bar

    return bar(iterable, description=description, transient=True)
