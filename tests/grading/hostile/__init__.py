"""Submissions that break, cheat, spy, flood and loop, each with what it must lose and why.

A theme is a room with a list CASES. From tests/:

python -m grading.hostile FOLDER         writes every submission, a folder each
python -m grading.hostile --grade THEME  grades those of one theme, prints what came out as JSON
python -m grading.hostile --kill         kills a grader at work, prints what is left of it
"""

from grading.hostile import cheats, ends, files, loops, plain, values

THEMES = {
    "files": files.CASES,
    "cheats": cheats.CASES,
    "values": values.CASES,
    "ends": ends.CASES,
    "loops": loops.CASES,
    "plain": plain.CASES,
}
