"""Whether a written answer is the known one.

::

    answers    the answer in a response, and all that can be told without a parser
    pool       processes that can be killed, in which math-verify decides the rest
"""
