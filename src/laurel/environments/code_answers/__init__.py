"""From what the policy said to programs that can be run, and from results to words.

::

    extraction    the program in a completion
    task_tests    the tests in a task's metadata, as jobs of the sandbox, and their verdict
    sessions      code as a tool: variables that last from turn to turn
    replay        what runs in the sandbox for a session
"""
