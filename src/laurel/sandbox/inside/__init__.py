"""The code in the processes of the sandbox. It imports only the standard library.

::

    zygote        the program that is started once, and forks monitors ahead of the jobs
    jail          namespaces and a root of its own, made once
    monitor       enforces the time and output limits of one job, from outside of it
    confinement   limits, rights, files and layers of the process that runs the program
    seccomp       which system calls it may make, by the numbers of syscall_numbers
    kinds         runs a job of any kind, as Python would
    program       the code of a program and the statuses of its exceptions
    calls         calls a function of it with plain data
    proxy         runs tests against a program that is in another sandbox
    plain_data    the encoding of values between processes
    messages      the encoding of jobs and reports
    boxes         working directories, where there are no namespaces
    kernel        the system calls that Python has no function for
"""
