"""Tells on what kind of file system a directory lies."""

from __future__ import annotations

import os
import re
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = frozenset(
    (  # noqa: SIM905 - a list of twenty quoted words reads worse
        "9p afs beegfs ceph cifs gfs2 glusterfs gpfs lustre ncpfs nfs nfs4 ocfs2 orangefs pvfs2 smb3 smbfs virtiofs wekafs"
    ).split()
)


def is_network(path: Path) -> bool:
    """Say whether other machines may see what lies at ``path``, as on NFS; False where the system does not tell (not Linux).

    File systems of user space (``fuse.*``) count: what is behind them is not known.
    """
    try:
        mounts = _MOUNTS.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return False
    # Of those above the path the longest; of two at one point the later hides the other.
    real, kind, longest = Path(os.path.realpath(path)), "", 0  # Path.resolve() raises for links in a circle
    for line in mounts:
        fields, _, source = line.partition(" - ")
        point = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields.split(" ")[4]))
        if len(point.parts) >= longest and real.is_relative_to(point):
            kind, longest = source.split(" ")[0], len(point.parts)
    return kind in _NETWORK or kind.startswith("fuse.")
