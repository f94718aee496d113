"""`env.math`: whether a written answer equals the known one.

::

    environment   scores completions
    answers       finds the answer in a response, and compares answers without a parser
    checker       checks other answers in processes that can be killed
    comparison    calls math-verify in these processes
"""
