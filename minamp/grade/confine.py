"""What a process gives up for good before it runs a student's code. Standard library only: this runs in the sandbox."""

import ctypes
import errno
import os
import resource
import struct
import sys

PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 4, 22, 38

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # their numbers in linux/audit.h
FORBIDDEN = {  # system call: its number on each machine
    "shmget": (29, 194),  # memory that belongs to no process, so that no limit counts it
    "msgget": (68, 186),
    # 2 MiB of the kernel's own memory a call; and, as the queues, a note for the next test group
    "semget": (64, 190),
    "mq_open": (240, 180),
    "socket": (41, 198),  # some kinds, to the host of a virtual machine for one, know no network namespace
    "add_key": (248, 217),  # keys of the user who grades
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "unshare": (272, 97),  # new namespaces, with capabilities there
    "ptrace": (101, 117),
    "bpf": (321, 280),  # the kernel's own workshops, where most of its faults were found
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "io_uring_setup": (425, 425),
}


def limit(kind, most):
    """Set a resource limit that cannot be raised again; one that is lower already stays."""
    kind = getattr(resource, f"RLIMIT_{kind}")
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def silence():
    """Standard input is empty and what is printed goes nowhere."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)


def protect():
    """On Linux: children may not look into this process or take its descriptors, and some system calls are not to be had.

    They are refused by a program of the kernel's packet filter, as seccomp(2) has it; machines that MACHINES lacks go without.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    machine = os.uname().machine
    if machine not in MACHINES:
        return
    calls = [numbers[list(MACHINES).index(machine)] for numbers in FORBIDDEN.values()]
    load, equal, greater, give, n = 0x20, 0x15, 0x35, 0x06, len(calls)
    steps = [  # what, number, steps to jump over if so, if not
        (load, 4, 0, 0),  # the machine that the call is for
        (equal, MACHINES[machine], 0, n + 3),
        (load, 0, 0, 0),  # the number of the call
        (greater, 1 << 30, n + 1, 0),  # x86 has a second numbering
        *((equal, call, n - k, 0) for k, call in enumerate(calls)),
        (give, 0x7FFF0000, 0, 0),  # allowed
        (give, 0x00050000 | errno.EPERM, 0, 0),
    ]
    program = b"".join(struct.pack("<HBBI", what, yes, no, number) for what, number, yes, no in steps)
    program = ctypes.create_string_buffer(program)
    whole = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(program)))
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(PR_SET_SECCOMP, 2, whole, 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel takes no filter for system calls")
