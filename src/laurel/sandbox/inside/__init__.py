"""Runs in processes that are locked in, and imports only the standard library.

::

    confinement   limits what a process may use, and with Landlock the files that it may open
    seccomp       filters its system calls, by the numbers of syscall_numbers
    boxes         creates working directories, without namespaces
    kernel        makes system calls for which Python has no function
"""
