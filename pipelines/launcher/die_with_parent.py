"""Run a command that the kernel kills when the process that started it dies, however it dies.

``python -m pipelines.launcher.die_with_parent PARENT_PID COMMAND ...`` asks Linux for a SIGKILL at
the parent's death and then becomes the command. A separate program, because code between fork and
exec in a parent with threads may deadlock. Elsewhere than on Linux it only becomes the command.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    parent, command = int(argv[0]), argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # it died before the request was made
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
