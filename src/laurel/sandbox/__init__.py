"""What a machine has, and what locks a process in.

::

    limits           cores, memory and GPUs that this process may use
    scratch          temporary directories that a killed process does not leave behind
    inside_process   starts a module of a folder `inside` alone in a process
    inside           takes rights from a process
"""
