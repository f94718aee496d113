"""Runs the programs in completions, and scores them by a task's tests.

::

    answers    the program in a completion; code as a tool, with variables that last between turns
    tests      the tests in a task's metadata, as jobs of the sandbox, and their verdict
    sandbox    the sandbox that an environment's settings ask for
    nodes      programs run on every node of a cluster
"""
