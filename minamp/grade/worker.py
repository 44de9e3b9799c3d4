"""The student's side, run as a script in the sandbox: it executes the student's cells and answers calls.

One process imports NumPy and is given the cells; for each test group it forks a child that runs them afresh and talks to the
grader over a channel of its own, so that nothing a group does is there for the next. Whatever this process or its children
send may be made up by the student: the grader trusts none of it.

worker.py CONTROL MEMORY CPU SITE: the descriptor to the grader, bytes of address space, seconds of processor time that a child
may use, the folder that holds NumPy.

On CONTROL come the cells, then bytes: `g` with a descriptor starts a group, `w` asks how the last child ended.
On a group's channel come {"skip": ids of cells to leave out}, then calls {"name", "args", "kwargs"}. Back go {"begin": id} before
each of the student's cells, {"failed": {id: text}} after all of them, and to a call one of {"value", "after": the arrays that it
was given, as they are now}, {"raised": text}, {"returned": text about what cannot cross} and {"unknown": name}.
"""

import os
import re
import signal
import socket
import struct
import sys
import time
import types

NOFILE = 64
PYTHON = "{}.{}".format(*sys.version_info)
TEXT = 300  # characters of an exception's message
# The indentation of a line for IPython: %timeit f(x), !ls, f?
NOT_PYTHON = re.compile(r"[ \t]*+(?=%%?[a-z]|!(?!=)|\?|[\w.]+\?\??\s*$)")


def main(control, memory, cpu, site):
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path += [here, site]
    import confine

    confine.limit("AS", memory)
    confine.limit("FSIZE", 0)
    confine.limit("NOFILE", NOFILE)
    confine.limit("CORE", 0)
    import frames
    import numpy
    import numpy.random  # 15 ms for each child that had to import it

    sys.path.remove(here)
    sys.path.remove(site)  # NumPy finds its own parts without, and nothing else that lies there is found
    confine.protect()
    control = socket.socket(fileno=control)
    cells, _ = frames.receive(control)
    confine.silence()
    frames.send(control, "ready")
    child = 0
    while True:
        order, passed, *_ = socket.recv_fds(control, 1, 1)
        if order == b"w":
            control.sendall(struct.pack("<i", ended(child, patience=1.0)))
            child = 0
            continue
        ended(child)
        if not order:
            return
        channel = socket.socket(fileno=passed[0])
        child = os.fork()
        if not child:
            control.close()
            confine.limit("CPU", cpu)
            confine.limit("NPROC", 0)  # no further process or thread: no fork bomb, nothing that stays behind
            group(cells, channel, frames, numpy)
            os._exit(0)
        channel.close()


def ended(child, patience=0.0):
    """How a child ended, as os.waitstatus_to_exitcode has it; one that still runs after `patience` seconds is killed."""
    if not child:
        return 0
    until = time.monotonic() + patience
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= until:
            os.kill(child, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        time.sleep(0.005)


def group(cells, channel, frames, numpy):
    """Run the cells, then answer calls until the grader hangs up."""
    try:
        skip = frames.receive(channel)[0]["skip"]
        namespace, failed = run(cells, skip, lambda cell: frames.send(channel, {"begin": cell}))
        frames.send(channel, {"failed": failed})
        answers = {cell["id"] for cell in cells if cell["part"] == "answer"}
        while True:
            call, arrays = frames.receive(channel)
            channel.sendall(answer(namespace, answers, call, arrays, frames, numpy))
    except (EOFError, OSError):
        return


def run(cells, skip, begin):
    """The namespace that the cells leave, and {id: text} of those that raised: one bad cell does not cost the others."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    answers, failed = {cell["id"] for cell in cells if cell["part"] == "answer"}, {}
    for cell in cells:
        if cell["id"] in skip:
            continue
        if cell["id"] in answers:
            begin(cell["id"])
        try:
            exec(compiled(cell["source"].tobytes().decode(), f"<{cell['id']}>"), module.__dict__)
        except BaseException as error:
            failed[cell["id"]] = described(error, answers)
    return module.__dict__, failed


def compiled(source, name):
    """The code of a cell. A line that is no Python but ran in the student's notebook is passed over."""
    lines = source.split("\n")
    while True:
        try:
            return compile("\n".join(lines), name, "exec", dont_inherit=True)
        except SyntaxError as error:
            number = error.lineno or 0
            start = NOT_PYTHON.match(lines[number - 1]) if 0 < number <= len(lines) else None
            if not start:
                raise
            lines[number - 1] = start[0] + "pass"


def answer(namespace, answers, call, arrays, frames, numpy):
    """The frame that answers one call."""
    try:
        if call["name"] not in namespace:
            return frames.pack({"unknown": call["name"]})[0]
        with numpy.errstate(all="ignore"):
            value = namespace[call["name"]](*call["args"], **call["kwargs"])
    except BaseException as error:
        return frames.pack({"raised": described(error, answers)})[0]
    try:
        return frames.pack({"value": value, "after": arrays})[0]
    except BaseException as error:
        plain = type(error) is frames.NotPlain
        text = str(error) if plain else f"what cannot be read: {described(error, answers)}"
        return frames.pack({"returned": text})[0]


def described(error, answers):
    """Type and message of an exception, the line of the student's cell that it comes from, and what may be behind it."""
    try:
        line = error.lineno if isinstance(error, SyntaxError) else None
        step = error.__traceback__
        while step is not None:
            if step.tb_frame.f_code.co_filename[1:-1] in answers:
                line = step.tb_lineno
            step = step.tb_next
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        text = f"{type(error).__name__}: {message[:TEXT].rstrip('.')}" if message else type(error).__name__
        text = f"{text} (line {line} of your cell)" if line else text
        if isinstance(error, NameError | ImportError | SyntaxError):
            text += f"; only the answer cells are run, by Python {PYTHON} with NumPy alone"
        return text
    except BaseException:
        return "an exception that cannot be shown"


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
