"""Runs programs that a model wrote, and reports how they ended.

::

    SandboxPool --socket--> zygote --fork--> monitor --fork--> the program
       pool, grading         inside/zygote    inside/monitor (pid 1 of its namespaces)

runner       the protocol of program runners: zygote_process on this machine
    jobs         jobs and their results
    tiers        names and descriptions of the isolation
    detection    which tier this machine supports: found by trying
    pool         many jobs at a time
    grading      turns ends of processes into a verdict; expected values never leave this side
    comparison   whether two values are equal
"""
