"""What this process holds of the machine's memory: how much at most, and giving back what is free.

glibc keeps freed blocks for itself; several phases in one process would each find the blocks of the one before in the
wrong sizes, and the sum grows. `give_back` between phases keeps the peak at that of the largest.
"""

import contextlib
import ctypes
import gc
import os
from pathlib import Path

# PyTorch's CPU library keeps the code of each product that it has compiled, 1,024 of them, one for every shape. Rows of
# training differ in length: 20 steps then keep 400 MB more of code that no later step asks for again. Read at the first
# product, so it is enough to import this file before that.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")


def give_back() -> None:
    """Collects cycles (a trainer holds its model and optimizer in some) and returns free pages to the system."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # not glibc: its allocator returns pages by itself, or cannot
        ctypes.CDLL(None).malloc_trim(0)


def peak_bytes(start_again: bool = False, pid: int | str = "self") -> int | None:
    """Largest resident set of a process since it began, or `start_again`; None where Linux's files are missing."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        if start_again:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # proc(5): resets VmHWM to what is resident now
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), None)
