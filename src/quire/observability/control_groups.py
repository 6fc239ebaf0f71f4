"""Finds the folders of this process's control groups. The files in them have the groups' limits.

Supported are versions 1 and 2 of control groups, also side by side, and any mount point. `root` is
the folder with the kernel's file systems; tests replace it. Used by `machine_memory` and
`machine_processors`.
"""

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path("/")

_ESCAPE = re.compile(r"\\([0-7]{3})")


class ControlGroup(NamedTuple):
    """A control group whose limits apply to this process."""

    #: The group's folder, which may be missing.
    folder: Path
    #: 1 or 2. The versions have different file names.
    version: int


class _Mount(NamedTuple):
    """A mounted hierarchy of control groups."""

    #: The mount point.
    point: Path
    #: The group at the mount point, as /proc/self/cgroup names it. In a container this is often the
    #: container's own group.
    top: PurePosixPath


def control_groups(controller: str, root: Path = ROOT) -> Iterator[ControlGroup]:
    """Yield this process's group for a controller ("cpu", "memory"), and its visible parents.

    The parents matter because a group's limit applies to all groups below it.
    """
    memberships = root / "proc/self/cgroup"
    if not memberships.is_file():
        return
    for line in _lines(memberships):
        hierarchy, controllers, group = line.split(":", 2)
        if hierarchy != "0" and controller not in controllers.split(","):
            continue
        version = 2 if hierarchy == "0" else 1
        for mount in _mounts(version, controller, root):
            for parent in _seen_parents(PurePosixPath(group), mount.top):
                yield ControlGroup(mount.point / parent, version)


def _lines(path: Path) -> list[str]:
    """The lines of a kernel file. They may name folders whose names are not UTF-8."""
    return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()


def _seen_parents(group: PurePosixPath, top: PurePosixPath) -> tuple[PurePosixPath, ...]:
    """The group and its parents up to `top`, as paths relative to `top`.

    If the group is not below `top` (a process may be moved out of its namespace's root), only `top`
    is visible.
    """
    if ".." in group.parts or not group.is_relative_to(top):
        return (PurePosixPath(),)
    path = group.relative_to(top)
    return path, *path.parents


def _mounts(version: int, controller: str, root: Path) -> list[_Mount]:
    """All mounts of a hierarchy; only the usual mount point if the system lists no mounts."""
    found = []
    table = root / "proc/self/mountinfo"
    for line in _lines(table) if table.is_file() else ():
        # 36 35 0:30 /top /sys/fs/cgroup/cpu rw,relatime shared:4 - cgroup cgroup rw,cpu
        mount, _, kind = line.partition(" - ")
        kind_name, _, options = (*kind.split(), "", "", "")[:3]
        if version == 2:
            is_it = kind_name == "cgroup2"
        else:
            is_it = kind_name == "cgroup" and controller in options.split(",")
        if is_it:
            top, point = (_ESCAPE.sub(_unescape, word) for word in mount.split()[3:5])
            found.append(_Mount(root / point.lstrip("/"), PurePosixPath(top)))
    usual = root / "sys/fs/cgroup"
    usual_mount = _Mount(usual if version == 2 else usual / controller, PurePosixPath("/"))
    return found or [usual_mount]


def _unescape(match: re.Match[str]) -> str:
    return chr(int(match[1], 8))
