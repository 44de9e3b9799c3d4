"""Training steps with one fault each, their repaired twins, and healthy loops: what minamp.doctor is judged by.

One file per code of the doctor, named after it; broken() and repaired() return what doctor() takes. `# the fault` marks
the line a student would have to change, where there is one. healthy.py, variations.py and loops.py hold the counter-examples,
and the same faults in other dress.
"""
