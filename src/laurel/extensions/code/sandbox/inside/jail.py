"""Puts a zygote and its jobs into their own namespaces and root directory."""

from __future__ import annotations

import os

from laurel.sandbox.inside import kernel
from laurel.sandbox.inside.confinement import DEVICES, readable_paths

BOX = "/box"
"""The working directory of a program in the jail."""
_INSIDE_ID = 1000
_PASSWD = f"box:x:{_INSIDE_ID}:{_INSIDE_ID}:box:{BOX}:/usr/sbin/nologin\n"
OF_A_JOB = kernel.CLONE_NEWPID | kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC
"""The namespaces that each job has for itself, within those of its zygote."""
_BOX_FLAGS = kernel.MS_NOSUID | kernel.MS_NODEV
_OWN_NAMESPACES = (
    kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWNS
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWUTS
)


def enter(scratch: str, account: int | None) -> None:
    """Leave the machine's file system, network and other users permanently.

    Args:
        scratch: An empty directory of this process, which stays empty outside of the jail.
        account: The user that root becomes meanwhile; None if this process is not root's.

    Raises:
        OSError: The kernel refused a step. This process is then unusable.
    """
    if account is not None:
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
        _furnish(scratch)  # as root, which can read all of it
        os.chdir(scratch)
        become(account)
        _leave_users()
        kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
        kernel.cover_working_directory()
    else:
        _leave_users()
        kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
        _furnish(scratch)
        os.chdir(scratch)
    kernel.pivot_root(".", ".")
    kernel.unmount(".")
    os.chdir("/")
    kernel.restrict_mounts("/", kernel.MOUNT_ATTR_RDONLY | kernel.MOUNT_ATTR_NOSUID)


def own_box(megabytes: int, inodes: int) -> None:
    """Mount an empty file system of limited size on the box, only in this job's namespace."""
    kernel.mount("box", BOX, "tmpfs", _BOX_FLAGS, _box_options(megabytes, inodes))


def resize_box(megabytes: int, inodes: int) -> None:
    """Change the size of the file system on the box."""
    options = _box_options(megabytes, inodes)
    kernel.mount("box", BOX, "tmpfs", _BOX_FLAGS | kernel.MS_REMOUNT, options)


def _box_options(megabytes: int, inodes: int) -> str:
    return f"size={megabytes}m,nr_inodes={inodes},mode=700"


def become(account: int) -> None:
    """Become another user permanently."""
    os.setgroups([])
    os.setresgid(account, account, account)
    os.setresuid(account, account, account)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # otherwise /proc/self is not ours any more


def _leave_users() -> None:
    user, group = os.geteuid(), os.getegid()
    kernel.unshare(_OWN_NAMESPACES)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{_INSIDE_ID} {user} 1"),
        ("gid_map", f"{_INSIDE_ID} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _furnish(root: str) -> None:
    kernel.mount("root", root, "tmpfs", kernel.MS_NOSUID, "size=1m,mode=755")
    for path in readable_paths():
        target = root + path
        if os.path.islink(path):  # /lib -> usr/lib
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.symlink(os.readlink(path), target)
            continue
        os.makedirs(target, mode=0o755, exist_ok=True)
        kernel.mount(path, target, None, kernel.MS_BIND | kernel.MS_REC)
        kernel.restrict_mounts(target, kernel.MOUNT_ATTR_NODEV)
    for directory in ("/dev", "/etc", BOX):
        os.makedirs(root + directory, mode=0o755, exist_ok=True)
    for path in DEVICES:
        with open(root + path, "w"):
            pass
        kernel.mount(path, root + path, None, kernel.MS_BIND)
    with open(f"{root}/etc/passwd", "w") as file:
        file.write(_PASSWD)
    if not os.path.lexists(f"{root}/tmp"):
        os.symlink(BOX, f"{root}/tmp")
