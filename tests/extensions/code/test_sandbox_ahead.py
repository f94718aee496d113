"""Processes that are made ahead: they wait for one job, and know nothing before it."""

import pytest

from laurel.extensions.code.sandbox.jobs import Limits, SandboxJob, Status
from sandbox_processes import below, is_gone, is_idle, wait_until


def run(pool, code, **fields):
    return pool.run([SandboxJob(code=code, **fields)])[0]


@pytest.mark.slow
def test_what_waits_for_a_job_and_dies_is_replaced_and_no_job_notices(own_pool):
    assert run(own_pool, "print(1)").status is Status.OK
    (zygote,) = own_pool.process_ids()
    for choose in (lambda one: one.ppid() == zygote, lambda one: one.ppid() != zygote):
        wait_until(lambda: is_idle(zygote))
        doomed = [one for one in below(zygote) if choose(one)]
        assert len(doomed) == 2
        for one in doomed:
            one.kill()
        for one in doomed:
            wait_until(lambda one=one: is_gone(one.pid))
        for n in range(3):
            result = run(own_pool, f"print({n})")
            assert (result.stdout, result.attempt) == (f"{n}\n", 1)
    assert own_pool.process_ids() == [zygote]


@pytest.mark.slow
def test_what_is_made_ahead_keeps_to_the_limits_of_the_job(own_pool):
    fill = (
        "import errno, os, resource\n"
        "print(resource.getrlimit(resource.RLIMIT_AS)[1] >> 20)\n"
        "print(resource.getrlimit(resource.RLIMIT_CPU)[0])\n"
        "space = os.statvfs('.')\n"
        "print(space.f_blocks * space.f_frsize >> 20, space.f_files)\n"
    )
    for mem_mb, cpu_s, disk_mb, inodes in ((512, 5, 32, 2048), (300, 2, 8, 100), (900, 9, 64, 9)):
        limits = Limits(mem_mb=mem_mb, cpu_s=cpu_s, disk_mb=disk_mb, inodes=inodes)
        said = run(own_pool, fill, limits=limits).stdout.splitlines()
        assert said[:2] == [str(mem_mb), str(cpu_s)]
        if "namespaces" in own_pool.tier.layers:
            assert said[2] == f"{disk_mb} {inodes}"


@pytest.mark.slow
def test_jobs_that_were_made_ahead_share_nothing(own_pool):
    """Not even chance: each has been seeded by itself."""
    code = "import os, random\nprint(random.random(), os.listdir('.'))\nopen('left', 'w').close()"
    said = [run(own_pool, code).stdout for _ in range(6)]
    assert len(set(said)) == 6
    assert all(one.endswith(" []\n") for one in said)
