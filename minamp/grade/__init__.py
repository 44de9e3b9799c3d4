"""Grading exercises: answers run in a sandbox, what is expected of them stays here.

In reading order: assignment.py (what a master notebook holds), marking.py (how one test group is marked); then what a student
hands in and how it is run: submission.py over walk.py (reading it), student.py (calling it) over sandbox.py (where it runs),
worker.py (the process there), confine.py (what it gives up) and frames.py (what goes to and fro). one.py puts them together.
"""
