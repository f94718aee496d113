"""What runs in the processes of the sandbox. Nothing but the standard library is imported here.

::

    zygote        the program that is started once, and forks monitors ahead of the jobs
    jail          namespaces and a root of its own, made once
    monitor       keeps the clock and the caps of one job, from outside of it
    confinement   limits, rights, files and layers of the process that runs the program
    seccomp       which system calls it may make, by the numbers of syscall_numbers
    kinds         runs a job of any kind, as Python would
    program       the code of a program and what its exceptions stand for
    calls         calls a function of it with plain data
    proxy         runs tests against a program that is in another sandbox
    plain_data    how values travel
    messages      how jobs and reports do
    boxes         directories to work in, where there are no namespaces
    kernel        the system calls that Python has no function for
"""
