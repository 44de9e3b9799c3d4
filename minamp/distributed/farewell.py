"""Farewell: how a rank that fails, leaves or dies takes the others along, so that nobody waits for it for ever.

A rank whose program ends with an exception prints it, tells every other rank, and ends. The others hear of it while they wait
(group.py) and raise PeerError, which ends them in the same way. A rank that reaches the end of its program says so too: whoever
then still waits for it has been given another number of batches, and is told that. A rank that is killed says nothing: what
started it says it in its place (__main__.py).
"""

import atexit
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import numpy as np

RANKS = "MINAMP_RANKS"  # names the launcher's folder: a file there, named by rank, holds the signal that killed it
PATIENCE = 2.0  # seconds in which what a rank began before it left may still be finished
PULSE = 0.2  # seconds between two looks into that folder


class PeerError(RuntimeError):
    """Another rank has failed or left while this one was waiting for it."""


class Farewell:
    """Messages about the end of ranks, on a communicator of their own."""

    def __init__(self, MPI, rank, size, timeout):
        self.MPI, self.comm, self.rank, self.size, self.timeout = (
            MPI,
            MPI.COMM_WORLD.Dup(),
            rank,
            size,
            timeout,
        )
        self.sent = []  # (request, buffer)
        self.gone = {}  # rank -> when it was heard to have left
        self.over = False
        self.folder, self.looked = os.environ.get(RANKS), 0.0
        sys.excepthook = self._failed
        atexit.register(self._left)

    def look(self, what):
        """Read what other ranks have said. PeerError if one has failed, or left and does not finish what we wait for."""
        for rank, kind, text in self._read():
            if kind == "failed":
                raise PeerError(f"rank {rank} has failed while rank {self.rank} was in {what}: {text}")
            self.gone[rank] = time.monotonic()
        for rank, when in self.gone.items():
            if time.monotonic() - when > PATIENCE:
                raise PeerError(
                    f"rank {rank} has ended its program while rank {self.rank} was in {what}: it was given fewer batches, or "
                    "took another way; give every rank the same number (minamp.distributed.ShardedLoader does)"
                )
        for rank, text in self._killed():
            raise PeerError(
                f"rank {rank} was killed by {text} while rank {self.rank} was in {what}: somebody ended it, or memory ran "
                "out; go on from the last checkpoint"
            )

    def _killed(self):
        """(rank, signal) of the ranks that were killed, looked up every PULSE seconds."""
        if not self.folder or time.monotonic() - self.looked < PULSE:
            return []
        self.looked = time.monotonic()
        files = [f for f in Path(self.folder).iterdir() if f.name != "part"]  # still being written
        return [(int(f.name), signal.Signals(int(f.read_text()) - 128).name) for f in files]

    def _read(self):
        status = self.MPI.Status()
        while self.size > 1 and self.comm.Iprobe(source=self.MPI.ANY_SOURCE, status=status):
            buffer = np.zeros(status.Get_count(self.MPI.BYTE), np.uint8)
            self.comm.Recv(buffer, source=status.Get_source())
            yield status.Get_source(), *json.loads(buffer.tobytes())

    def _tell(self, kind, text=""):
        buffer = np.frombuffer(json.dumps([kind, text]).encode(), np.uint8)
        for rank in range(self.size):
            if rank != self.rank:
                self.sent.append((self.comm.Isend(buffer, dest=rank), buffer))

    def _failed(self, kind, error, trace):
        """The exception hook: say it here, say it to all, wait until they have ended too, end."""
        self.over = True
        lines = "".join(traceback.format_exception(kind, error, trace))
        sys.stdout.flush()
        sys.stderr.write(f"--- rank {self.rank} of {self.size} ends with an error\n{lines}")  # in one piece
        sys.stderr.flush()
        self._tell("failed", f"{kind.__name__}: {error}")
        self._meet()
        self._meet(most=1.0)  # when one is gone mpiexec ends the others: let them say theirs first
        os._exit(1)  # MPI's own end would wait for what the failed operation has left behind

    def _left(self):
        """At the end of the program."""
        if self.over:
            return
        sys.stdout.flush()
        self._tell("left")
        for rank, text in self._meet():
            print(
                f"--- rank {self.rank} of {self.size} had ended its program when rank {rank} failed: {text}",
                file=sys.stderr,
                flush=True,
            )
            self._meet(most=1.0)
            os._exit(1)

    def _meet(self, most=None):
        """Wait until every rank is here, at most `most` (`timeout`) seconds; (rank, text) of those that failed."""
        failed, meeting, start = [], self.comm.Ibarrier(), time.monotonic()
        done, patience = False, most or self.timeout
        while not done and time.monotonic() - start < patience:
            if self._killed():
                patience = min(patience, PATIENCE)
            done = meeting.Test()
            failed += [(rank, text) for rank, kind, text in self._read() if kind == "failed"]
            time.sleep(1e-3)
        return failed
