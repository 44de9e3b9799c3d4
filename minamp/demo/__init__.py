"""python -m minamp.demo: three networks fail in half precision, and each gets its cure.

experiment.py holds the networks, the runs and the training loop; acts.py tells what they showed, and every number it prints was
measured a moment before. detector.py and detector_act.py are the same for another story, ranks.py and data_parallel.py for a
third; figures.py draws; __main__.py is the command.
"""
