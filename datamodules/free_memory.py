"""Memory that is available to the process."""

import os
from pathlib import Path


def available_bytes() -> int:
    """Memory that this process may still take, in bytes: what the machine has free, or the container's limit leaves."""
    known = []
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        known.append(int(fields["MemAvailable"].split()[0]) * 1024)
    elif hasattr(os, "sysconf"):
        # Only Linux reports the free memory; elsewhere the installed memory is an upper bound.
        known.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for folder, limit, used, cached in (
        ("/sys/fs/cgroup", "memory.max", "memory.current", "file"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
    ):
        group = Path(folder)
        if (group / limit).is_file() and (text := (group / limit).read_text().strip()) != "max":
            statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            # Cached files count as used, but the system frees them when needed.
            known.append(int(text) - int((group / used).read_text()) + int(statistics[cached]))
    return min(known, default=2**63)
