"""Whether a written answer is the known one.

::

    reading          a response -> the answer in it, in characters that parsers know
    shortcuts        what can be told without a parser: equal texts, plain numbers, absurd towers
    multiple_choice  the letter after the last "Answer:", in many languages
    checker          the order of all that, with a memory of what was checked before
    pool             processes that can be killed, for everything else
    zygote           the program those processes run
    comparison       the call of math-verify in them
"""
