"""Verifies a stopped store byte by byte, and takes out what is bad."""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvd import disk_format as form
from kvd.disk_format import UNIT_BYTES, FormatError, RecordHead, SegmentName, StoreFormat, Table

FINDINGS_MAX = 100
"""So many are described; the others are only counted."""


class CheckError(Exception):
    """The folder cannot be checked; the text says why and what helps."""


@dataclass
class Report:
    """What a check found. `bad` counts records and segments by what is wrong with them."""

    path: str
    segments: int = 0
    segments_unused: int = 0
    records: int = 0
    void_records: int = 0
    object_bytes: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    dropped: int = 0

    def note(self, kind: str, text: str) -> None:
        """Count something bad, and describe it while there is room."""
        self.bad[kind] += 1
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(text)

    @property
    def is_clean(self) -> bool:
        """Whether nothing bad is left."""
        return sum(self.bad.values()) == self.dropped


def check(path: Path, *, drop: bool, progress: Callable[[int, int], None] = lambda done, total: None) -> Report:
    """Read a whole folder and verify every record in it; with `drop`, take the bad ones out.

    `progress` is called with the segments done and their number.

    Raises:
        CheckError: when it is no store, of another version, or in use.
        OSError: when it cannot be read, or with `drop` not written.
    """
    lock = _lock(path)
    try:
        try:
            store = StoreFormat.read((path / "format").read_bytes())
        except FormatError as error:
            raise CheckError(f"{path}: {error}; such a store is not served, remove the folder to begin anew") from error
        report = Report(str(path))
        _check_marks(path, store, report, drop=drop)
        numbers = form.segment_names(os.listdir(path))
        for done, number in enumerate(numbers):
            progress(done, len(numbers))
            _SegmentCheck(path / f"{number:08}.segment", store, number, report, drop=drop).run()
        return report
    finally:
        os.close(lock)


def _lock(path: Path) -> int:
    if not (path / "format").exists():
        raise CheckError(f"{path} is no disk store of infera-kvd: it has no file `format`")
    descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise CheckError(f"an infera-kvd is using {path}; stop it first") from None
    return descriptor


def _check_marks(path: Path, store: StoreFormat, report: Report, *, drop: bool) -> None:
    marks = path / "marks"
    try:
        form.drop_rows(store, marks.read_bytes())
    except FileNotFoundError:
        pass  # a store that was never opened again
    except FormatError as error:
        report.note("marks", f"marks: {error}; dropped namespaces come back")
        if drop:
            marks.unlink()
            report.dropped += 1


class _SegmentCheck:
    """One segment file."""

    def __init__(self, path: Path, store: StoreFormat, number: int, report: Report, *, drop: bool) -> None:
        self.path, self.store, self.number, self.report, self.drop = path, store, number, report, drop
        self._bad_heads: list[RecordHead] = []
        self._bad_units: set[int] = set()

    def run(self) -> None:
        self.report.segments += 1
        descriptor = os.open(self.path, (os.O_RDWR if self.drop else os.O_RDONLY) | os.O_CLOEXEC)
        try:
            self._check(descriptor)
        finally:
            os.close(descriptor)

    def _check(self, descriptor: int) -> None:
        size_bytes = os.fstat(descriptor).st_size
        if size_bytes != self.store.segment_bytes:
            self._bad_segment(f"has {size_bytes} bytes, not {self.store.segment_bytes}")
            return
        try:
            name = form.read_segment_header(self.store, self.number, os.pread(descriptor, UNIT_BYTES, 0))
        except FormatError as error:
            self._bad_segment(str(error))
            return
        if name is None:
            self.report.segments_unused += 1
            return
        table = self._table(descriptor, name)
        if table is None:
            self._walk(descriptor, name)
        else:
            self._follow(descriptor, name, table)
        if self.drop and self._bad_units:
            self._take_out(descriptor, table)

    def _bad_segment(self, text: str) -> None:
        self.report.note("segment", f"{self.path.name}: {text}")
        if self.drop:
            self.path.unlink()
            self.report.dropped += 1

    def _table(self, descriptor: int, name: SegmentName) -> Table | None:
        trailer_offset = self.store.segment_bytes - UNIT_BYTES
        try:
            found = form.read_trailer(name, os.pread(descriptor, UNIT_BYTES, trailer_offset))
            if found is None:
                return None
            fields, offset, size = found
            return form.read_table(fields, offset, os.pread(descriptor, size, offset))
        except FormatError as error:
            self.report.note("table", f"{self.path.name}: {error}; its records are found by walking")
            if self.drop:  # without a trailer it is walked, and gets a new table
                os.pwrite(descriptor, bytes(UNIT_BYTES), trailer_offset)
                os.fdatasync(descriptor)
                self.report.dropped += 1
            return None

    def _follow(self, descriptor: int, name: SegmentName, table: Table) -> None:
        """Records as the table names them."""
        for start_unit, _, row in table.rows:
            try:
                head = form.read_record(name, start_unit, os.pread(descriptor, UNIT_BYTES, start_unit * UNIT_BYTES))
            except FormatError as error:
                self._bad_record(start_unit, None, str(error))
                continue
            if not form.row_matches(table, row, head) or head.kind != form.KIND_OBJECT:
                self._bad_record(start_unit, head, "head says something else than the table")
            else:
                self._check_bytes(descriptor, head)

    def _walk(self, descriptor: int, name: SegmentName) -> None:
        """Records one behind the other, as long as heads are right and grow newer."""
        at, last_sequence = 1, name.generation
        while at < self.store.segment_bytes // UNIT_BYTES:
            try:
                head = form.read_record(name, at, os.pread(descriptor, UNIT_BYTES, at * UNIT_BYTES))
            except FormatError:
                return  # the end, of which nothing says where it should be
            if head.sequence <= last_sequence:
                return
            last_sequence = head.sequence
            if head.kind == form.KIND_OBJECT:
                self._check_bytes(descriptor, head)
            else:
                self.report.void_records += 1
            at += head.units

    def _check_bytes(self, descriptor: int, head: RecordHead) -> None:
        data = os.pread(descriptor, head.length_bytes, head.offset_bytes)
        if len(data) != head.length_bytes or form.checksum(data) != head.sum:
            self._bad_record(head.start_unit, head, "bytes do not match their checksum")
            return
        self.report.records += 1
        self.report.object_bytes += head.length_bytes

    def _bad_record(self, start_unit: int, head: RecordHead | None, text: str) -> None:
        what = f" (key {head.key.hex()} shard {head.shard})" if head else ""
        self.report.note("record", f"{self.path.name}: unit {start_unit}{what}: {text}")
        self._bad_units.add(start_unit)
        if head:
            self._bad_heads.append(head)

    def _take_out(self, descriptor: int, table: Table | None) -> None:
        """Heads become void, so that a walk steps over them; then the table is written without them."""
        for head in self._bad_heads:
            os.pwrite(descriptor, head.as_void(), head.start_unit * UNIT_BYTES)
        os.fdatasync(descriptor)
        if table is not None:
            rows, trailer = table.without(self._bad_units)
            os.pwrite(descriptor, rows, table.offset_bytes)
            os.pwrite(descriptor, trailer, self.store.segment_bytes - UNIT_BYTES)
            os.fdatasync(descriptor)
        self.report.dropped += len(self._bad_units)
