"""Runs the programs in completions, and scores them by a task's tests.

::

    answers    finds the program in a completion; runs code as a tool, with lasting variables
    tests      turns the tests of a task into jobs of the sandbox, and results into a verdict
    sandbox    opens the sandbox that an environment's settings require
    nodes      runs programs on every node of a cluster
"""
