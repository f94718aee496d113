"""Runs the programs in completions, and scores them by a task's tests.

::

    plugin       the environment `code`, and the forms of its tasks
    settings     `env.code`
    formats      reads rows of HumanEval, MBPP and others with tests
    environment  scores programs, or answers code that a policy runs as a tool
    answers      finds the program in a completion; runs code as a tool, with lasting variables
    tests        turns the tests of a task into jobs of the sandbox, and results into a verdict
    opening      opens the sandbox that an environment's settings require
    nodes        runs programs on every node of a cluster
    sandbox      what a program does, locked in
    command      `laurel sandbox check`: how well this machine locks programs in
"""
