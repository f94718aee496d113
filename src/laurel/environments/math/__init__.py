"""Checks whether a written answer equals the known one.

::

    answers    the answer in a response, and comparisons that need no parser
    checker    processes that can be killed, in which math-verify decides the rest
"""
