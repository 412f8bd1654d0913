"""Freed memory of a training loop: kept while it runs, given back when it ends.

glibc returns every freed block above 32 MB to the system at once, and each optimizer step then pays the page faults of
all its activations and logits again (12 % of a step of the embedded student on 2 cores). Kept blocks make the next step
cheaper, but those of one phase do not fit the next: over six phases they grew to 9.4 GB where one needs 3.7.
"""

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # parameters of mallopt, <malloc.h>
KEEP = {MMAP_THRESHOLD: 1 << 30, TRIM_THRESHOLD: (1 << 31) - 1}
GIVE_BACK = {MMAP_THRESHOLD: 32 << 20, TRIM_THRESHOLD: 64 << 20}  # where glibc's own rule ends up with large blocks


def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None


@contextlib.contextmanager
def keep_freed_memory() -> Iterator[None]:
    """Inside, freed blocks stay with the process; at the end they go back. Other C libraries are left as they are."""
    library = _glibc()
    if library is None:
        yield
        return
    for parameter, value in KEEP.items():
        library.mallopt(parameter, value)
    try:
        yield
    finally:
        for parameter, value in GIVE_BACK.items():
            library.mallopt(parameter, value)
        gc.collect()  # models and optimizers hold themselves in cycles
        library.malloc_trim(0)
