"""Runs programs that a model wrote, and says what became of them.

::

    SandboxPool --socket--> zygote --fork--> monitor --fork--> the program
       pool, grading         inside/zygote    inside/monitor (pid 1 of its namespaces)

    runner       what runs programs: zygote_process on this machine
    jobs         what is asked, and what comes back
    tiers        how well it is locked in, in words
    detection    which tier this machine gives: found by trying
    pool         many jobs at a time
    grading      from how processes ended to a verdict; expected values never leave this side
    comparison   whether two values are the same
"""
