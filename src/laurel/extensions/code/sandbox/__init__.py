"""Runs programs that a model wrote, and reports how they ended.

::

    SandboxPool --socket--> zygote --fork--> monitor --fork--> the program
       pool, grading         inside/zygote    inside/monitor (pid 1 of its namespaces)

    zygote_process   controls a zygote, in which programs run
    jobs             jobs and their results
    tiers            the tiers of isolation, and their descriptions
    control_group    limits memory and processes of a worker's programs together
    detection        tries which tier this machine supports
    pool             runs many jobs concurrently
    grading          grades a program by how its processes ended; expected values never leave this
                     side
    comparison       decides whether two values are equal
"""
