"""Runs in the processes of programs; imports the standard library and `laurel.sandbox.inside`.

::

    zygote        the program that is started once, and forks monitors ahead of the jobs
    jail          creates the namespaces and the root directory of a zygote
    rights        takes limits, rights, files and layers from the process of the program
    meter         limits the total size of its files, without namespaces
    monitor       enforces the time and output limits of one job, from outside of it
    kinds         runs a job of any kind, as Python would
    calls         runs a program, and calls its functions with plain data
    proxy         runs tests against a program that is in another sandbox
    plain_data    encodes values between processes
    messages      encodes jobs and reports
"""
