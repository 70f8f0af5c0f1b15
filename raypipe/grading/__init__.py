"""Grading that no grader can stop. What happens to a sample here, from the caller down to the grader:

    dispatcher.py   GradeDispatcher: the run's one queue, a resident Ray actor over the hosts of all nodes
    host.py         GraderHost: a Ray actor that owns the grader processes of one node
    pool.py         GradingPool: the same queue over processes of this machine, without Ray
    queue.py        GradeQueue: a sample's graders, groups, counts
    batches.py      BatchQueue: natural micro-batches over slots, and repeats one by one after a failure
    requests.py     RequestQueue: calls of async graders side by side, with the run's limits and retries
    deadlines.py    Pace: how large a call may be and how long it may take, learnt from the calls before it
    results.py      Reply, Grade, and the columns that Grade adds to a sample
    processes.py    GraderProcesses: the grader processes of one machine, and their replacement
    process.py      GraderProcess: the parent's end of one of them
    child.py        the grader process: loads the graders, answers calls
    scores.py       what a grader returned or raised, as bounded JSON
    keeper.py       the process above a grader process: isolates it, bounds it, kills it with all its descendants
    namespaces.py   PID namespaces, where the kernel permits them
    watch.py        what processes hold, read from /proc
    wire.py         length-capped JSON frames between a grader process and its parent

From `child.py` on, files are loaded by every grader process and import the standard library only.
"""
