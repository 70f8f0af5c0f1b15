"""Grading that no grader can stop. What happens to a sample here, from the caller down to the grader:

dispatcher.py   GradeDispatcher: the run's one queue, a resident Ray actor over the hosts of all nodes
host.py         GraderHost: a Ray actor that owns the grader processes of one node
pool.py         GradingPool: the same queue over local processes, without Ray
queue.py        GradeQueue: natural micro-batches, deadlines, one-by-one repeats, groups, limits of async graders
deadlines.py    how large a call may be and how long it may take, learnt from the calls before it
results.py      replies of grader processes, and the columns that Grade adds to a sample
processes.py    the parent's end of a grader process: start, call, kill, replace
child.py        the grader process: loads the graders, answers calls (standard library only)
keeper.py       the process above it: isolates it, bounds it, kills it with all its descendants
wire.py         length-capped JSON frames between the two
"""
