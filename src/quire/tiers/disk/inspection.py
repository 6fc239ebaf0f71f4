"""What lies in a cache folder, and whether it is sound; how it is emptied.

An engine needs none of this. The folder is locked meanwhile, as for an engine.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quire.tiers.disk.files import Files, read_whole
from quire.tiers.disk.folder import CacheFolder, segment_files
from quire.tiers.disk.record import Record, payload_digest
from quire.tiers.disk.segment import Contents, read_segment


@dataclass(frozen=True, slots=True)
class SegmentReport:
    """One file. contents: None where no record of it can be found, since it is damaged or belongs
    elsewhere; error: what the system said, if it could not be read. num_damaged: records whose
    payload is not what it was, or can't be read; None where that was not looked at."""

    path: Path
    num_bytes: int
    contents: Contents | None
    error: OSError | None = None
    num_damaged: int | None = None

    @property
    def num_records(self) -> int:
        return len(self.contents.records) if self.contents else 0


@dataclass(frozen=True, slots=True)
class NamespaceReport:
    """What is kept for one model and all else that determines its blocks' bytes."""

    fingerprint: bytes
    segments: tuple[SegmentReport, ...]

    @property
    def num_bytes(self) -> int:
        return sum(segment.num_bytes for segment in self.segments)

    @property
    def num_contents(self) -> int:
        """Different ones that can be found."""
        return len(
            {
                (record.group, record.name)
                for segment in self.segments
                if segment.contents
                for record in segment.contents.records
            }
        )

    @property
    def is_sound(self) -> bool:
        """Whether nothing was found to be damaged; unsealed is not damaged."""
        return all(segment.contents and not segment.num_damaged for segment in self.segments)


def inspect(folder: CacheFolder, *, reads_payloads: bool) -> Iterator[NamespaceReport]:
    """The namespaces one after the other. reads_payloads: check every payload, which reads all.

    Raises OSError where a folder can't be listed.
    """
    for fingerprint in folder.fingerprints():
        namespace = folder.namespace(fingerprint)
        reports = [
            _inspect_segment(folder.files, file.path, number, fingerprint, reads_payloads)
            for number, file in segment_files(folder.files, namespace).items()
        ]
        yield NamespaceReport(fingerprint, tuple(reports))


def empty(folder: CacheFolder) -> int:
    """Remove all segments of all namespaces; the secret stays. Returns how many bytes they had.

    Raises OSError.
    """
    num_bytes = 0
    for fingerprint in folder.fingerprints():
        namespace = folder.namespace(fingerprint)
        for file in segment_files(folder.files, namespace).values():
            num_bytes += file.num_bytes
            folder.files.unlink(file.path)
        if not folder.files.names(namespace):
            folder.files.remove_folder(namespace)
    return num_bytes


def _inspect_segment(
    files: Files, path: Path, number: int, fingerprint: bytes, reads_payloads: bool
) -> SegmentReport:
    num_bytes = files.status(path).st_size
    try:
        contents = read_segment(files, path, number, fingerprint)
        if contents is None or not reads_payloads:
            return SegmentReport(path, num_bytes, contents)
        descriptor = files.open_to_read(path)
    except OSError as error:
        return SegmentReport(path, num_bytes, None, error)
    try:
        damaged = [each for each in contents.records if not _is_sound(files, descriptor, each)]
    finally:
        files.close(descriptor)
    return SegmentReport(path, num_bytes, contents, num_damaged=len(damaged))


def _is_sound(files: Files, descriptor: int, record: Record) -> bool:
    try:
        payload = read_whole(files, descriptor, record.num_bytes, record.offset)
    except OSError:  # one that can't be read is damaged
        return False
    return len(payload) == record.num_bytes and payload_digest(payload) == record.digest
