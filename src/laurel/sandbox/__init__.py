"""Runs programs that a model wrote, and reports how they ended.

::

    SandboxPool --socket--> zygote --fork--> monitor --fork--> the program
       pool, grading         inside/zygote    inside/monitor (pid 1 of its namespaces)

    runner       the protocol of program runners; zygote_process implements it on this machine
    jobs         jobs and their results
    tiers        the tiers of isolation, and their descriptions
    detection    tries which tier this machine supports
    pool         runs many jobs concurrently
    grading      grades a program by how its processes ended; expected values never leave this side
    comparison   decides whether two values are equal
"""
