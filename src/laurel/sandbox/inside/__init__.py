"""Runs in processes that are locked in, and imports only the standard library.

::

    jail          creates the namespaces and the root directory of a process
    confinement   takes limits, rights, files and layers from a process
    seccomp       filters its system calls, by the numbers of syscall_numbers
    meter         limits the total size of its files, without namespaces
    boxes         creates working directories, without namespaces
    kernel        makes system calls for which Python has no function
"""
