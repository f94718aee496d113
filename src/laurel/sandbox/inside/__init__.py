"""Runs in the processes of the sandbox, and imports only the standard library.

::

    zygote        the program that is started once, and forks monitors ahead of the jobs
    jail          creates the namespaces and the root directory of a zygote
    monitor       enforces the time and output limits of one job, from outside of it
    confinement   takes limits, rights, files and layers from the process of the program
    seccomp       filters its system calls, by the numbers of syscall_numbers
    meter         limits the total size of its files, without namespaces
    kinds         runs a job of any kind, as Python would
    calls         runs a program, and calls its functions with plain data
    proxy         runs tests against a program that is in another sandbox
    shell         becomes a shell that may start programs, and reach nothing else
    plain_data    encodes values between processes
    messages      encodes jobs and reports
    boxes         creates working directories, without namespaces
    kernel        makes system calls for which Python has no function
"""
