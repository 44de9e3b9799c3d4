"""Grading exercises: answers run in a sandbox, what is expected of them stays here.

In reading order: assignment.py (what a master notebook holds), marking.py (how one test group is marked), then how an answer
is called without running it here. `python -m minamp.grade` is the command.
"""
