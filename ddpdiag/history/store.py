"""The index of many reports: an SQLite database with the rows of each run.

Reading is incremental: a file whose size and time of change are known is not read again. A run counts once, by its run
id, whatever its files are called; a file that changed replaces its run. Runs stay in the index if their files are
deleted. SQLite is in Python's standard library; docs/history.md compares it with DuckDB.
"""

import os
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from glob import glob, has_magic
from pathlib import Path
from typing import NamedTuple

from msgspec.json import Decoder, encode

from ddpdiag.codec import readable
from ddpdiag.errors import UsageError
from ddpdiag.history.rows import DAY_SECONDS, LARGEST_INTEGER, Blame, Figure, HostRow, Reading, Run, State, row_of
from ddpdiag.judgement.reading import read_report

# In the file's header, so that no other program's database is changed. Any number that no other program uses.
_APPLICATION_ID = 0x64647068
# A higher number for each change of the tables. An index is made again from the reports, so no old one is converted.
_VERSION = 2
_MEMORY = ":memory:"
_LOCK_SECONDS = 30.0
# A signal or a full disk loses at most so many seconds' work, and another process waits so long.
_COMMIT_SECONDS = 1.0
_SUFFIXES = (".json", ".jsonl")
# The recordings that the ranks of one run leave in a folder (--shared-dir).
_PART = re.compile(r"(run|rank-\d+)\.jsonl")

# Texts that many rows share are stored once, in `names`.
_TABLES = """
CREATE TABLE names (id INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE);
CREATE TABLE files (path TEXT PRIMARY KEY, size INTEGER, changed_ns INTEGER, run_id TEXT, problem TEXT) WITHOUT ROWID;
CREATE TABLE runs (
    id INTEGER PRIMARY KEY, run_id TEXT NOT NULL UNIQUE, begin_seconds REAL NOT NULL, verdict INTEGER, sentence TEXT,
    ranks INTEGER, codes INTEGER, path TEXT
);
CREATE INDEX runs_by_time ON runs (begin_seconds);
CREATE TABLE hosts (
    run INTEGER, host INTEGER, state INTEGER, gpus INTEGER, facts INTEGER, PRIMARY KEY (run, host)
) WITHOUT ROWID;
CREATE TABLE blames (
    run INTEGER, number INTEGER, code INTEGER, title INTEGER, hosts INTEGER, gpus INTEGER, is_error INTEGER,
    PRIMARY KEY (run, number)
) WITHOUT ROWID;
CREATE TABLE figures (
    run INTEGER, subject INTEGER, name INTEGER, value REAL, PRIMARY KEY (run, subject, name)
) WITHOUT ROWID;
CREATE TABLE counters (
    day INTEGER, host INTEGER, part INTEGER, begin_seconds REAL, totals TEXT, PRIMARY KEY (day, host, part)
) WITHOUT ROWID;
"""
_SEPARATOR = "\n"
_TOTALS = Decoder(dict[str, int])


class ReadSummary(NamedTuple):
    """The result of reading: numbers of files, and the files that hold no run, each with the reason.

    `unread` files are new, but the index can only be read.
    """

    files: int
    read: int
    unread: int
    duplicates: int
    problems: tuple[tuple[str, str], ...]


class Source(NamedTuple):
    """A file, or a folder with the parts of one recording. `size` and `changed_ns` show whether it changed."""

    path: str
    size: int
    changed_ns: int


class Store:
    """An index in the file `path`, or in memory if it is None. UsageError if the file is no index."""

    def __init__(self, path: str | None = None) -> None:
        self._path = path
        if path is not None and os.path.exists(path) and not os.path.isfile(path):
            raise UsageError(f"--index {readable(path)}: expected a file")
        try:
            self._database = sqlite3.connect(path or _MEMORY, timeout=_LOCK_SECONDS, isolation_level=None)
            self._open()
            self._ids: dict[str, int] = dict(self._database.execute("SELECT text, id FROM names"))
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    def _open(self) -> None:
        if not self._is_index():
            self._database.execute("BEGIN IMMEDIATE")
            if not self._is_index():  # else another process has made the tables meanwhile
                self._database.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                self._database.execute(f"PRAGMA user_version = {_VERSION}")
                for statement in filter(str.strip, _TABLES.split(";")):
                    self._database.execute(statement)
            self._database.execute("COMMIT")

    def _is_index(self) -> bool:
        """Whether the tables are there. UsageError if the file has other tables. A new file is empty."""
        (tables,) = self._database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        (application,) = self._database.execute("PRAGMA application_id").fetchone()
        (version,) = self._database.execute("PRAGMA user_version").fetchone()
        if (tables or application) and (application, version) != (_APPLICATION_ID, _VERSION):
            raise UsageError(
                f"--index {readable(str(self._path))}: another program or version made it; give a new file, or delete "
                "an old index, and all reports are read again"
            )
        return bool(tables)

    def _unusable(self, error: sqlite3.Error) -> UsageError:
        return UsageError(f"--index {readable(self._path or _MEMORY)}: cannot be used: {error}")

    def close(self) -> None:
        self._database.close()

    # Reading ---------------------------------------------------------------------------------------------------------

    def read(self, sources: Sequence[Source], announce: Callable[[str], None] = lambda _text: None) -> ReadSummary:
        """Read the sources that are new or changed; none of them if the index can only be read."""
        known: dict[str, tuple[int, int, str | None, str | None]] = {
            path: (size, changed, run_id, problem)
            for path, size, changed, run_id, problem in self._database.execute("SELECT * FROM files")
        }
        states = [known.get(readable(source.path), (None, None, None, None)) for source in sources]
        found = {
            source.path: state[2:]
            for source, state in zip(sources, states, strict=True)
            if state[:2] == (source.size, source.changed_ns)
        }
        new = [source for source in sources if source.path not in found]
        try:
            if new:
                self._read_new(new, found, announce)
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_READONLY:
                raise self._unusable(error) from error
            self._database.execute("ROLLBACK")
            found = {path: state for path, state in found.items() if readable(path) in known}
        problems = tuple((path, problem) for path, (_, problem) in found.items() if problem is not None)
        numbers = Counter(str(run_id) for run_id, problem in found.values() if problem is None)
        unread = len(sources) - len(found)
        return ReadSummary(len(sources), len(new) - unread, unread, numbers.total() - len(numbers), problems)

    def _read_new(
        self,
        sources: Sequence[Source],
        found: dict[str, tuple[str | None, str | None]],
        announce: Callable[[str], None],
    ) -> None:
        """Read the sources into the index, and their run ids and problems into `found`."""
        self._database.execute("BEGIN IMMEDIATE")
        commit_at = time.monotonic() + _COMMIT_SECONDS
        for number, source in enumerate(sources, 1):
            found[source.path] = self._read_source(source)
            if time.monotonic() > commit_at:
                self._database.execute("COMMIT")
                self._database.execute("BEGIN IMMEDIATE")
                commit_at = time.monotonic() + _COMMIT_SECONDS
            announce(f"reading reports: {number:,} of {len(sources):,} ...")
        self._database.execute("COMMIT")

    def _read_source(self, source: Source) -> tuple[str | None, str | None]:
        """Read a source into the index. Returns its run id, or the reason for which it holds no run."""
        run_id = problem = None
        try:
            run = row_of(read_report(source.path))
            self._insert(run, readable(source.path))
            run_id = readable(run.run_id)
        except UsageError as error:
            problem, path = str(error), readable(source.path)
            problem = problem if path in problem else f"{path}: {problem}"
            if isinstance(error.__cause__, OSError):
                return None, problem  # not kept: the next call may be able to read the file
        self._database.execute(
            "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?)", (readable(source.path), *source[1:], run_id, problem)
        )
        return run_id, problem

    def _insert(self, run: Run, path: str) -> None:
        """Insert a run. Of several files of one run, that with the most ranks counts, or the newer state of a file."""
        execute = self._database.execute
        old = execute("SELECT id, ranks, path FROM runs WHERE run_id = ?", (readable(run.run_id),)).fetchone()
        if old is not None:
            if old[2] != path and old[1] >= run.ranks:
                return
            execute("DELETE FROM runs WHERE id = ?", old[:1])
            for table in ("hosts", "blames", "figures"):
                execute(f"DELETE FROM {table} WHERE run = ?", old[:1])
        text_id, joined_id = self._id, self._joined_id
        number = execute(
            "INSERT INTO runs VALUES (NULL, ?, ?, ?, ?, ?, ?, ?)",
            (
                readable(run.run_id),
                run.begin_seconds,
                text_id(run.verdict),
                readable(run.sentence),
                min(run.ranks, LARGEST_INTEGER),
                joined_id(sorted(run.codes)),
                path,
            ),
        ).lastrowid
        many = self._database.executemany
        many(
            "INSERT INTO hosts VALUES (?, ?, ?, ?, ?)",
            [(number, text_id(row.host), row.state, joined_id(row.gpus), joined_id(row.facts)) for row in run.hosts],
        )
        many(
            "INSERT INTO blames VALUES (?, ?, ?, ?, ?, ?, ?)",
            [
                (number, index, text_id(b.code), text_id(b.title), joined_id(b.hosts), joined_id(b.gpus), b.is_error)
                for index, b in enumerate(run.blames)
            ],
        )
        many(
            "INSERT INTO figures VALUES (?, ?, ?, ?)",
            [(number, text_id(figure.subject), text_id(figure.name), figure.value) for figure in run.figures],
        )
        # Of each day the last reading counts, which has the counts of all readings before.
        many(
            "INSERT INTO counters VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET begin_seconds = "
            "excluded.begin_seconds, totals = excluded.totals WHERE excluded.begin_seconds >= begin_seconds",
            [
                (
                    run.begin_seconds // DAY_SECONDS,
                    text_id(row.host),
                    text_id(row.part),
                    row.seconds,
                    encode({readable(name): total for name, total in row.totals.items()}).decode(),
                )
                for row in run.readings
            ],
        )

    def _id(self, text: str) -> int:
        text = readable(text)  # SQLite stores UTF-8, without lone surrogates
        if text not in self._ids:
            # Another process may have added it meanwhile.
            self._database.execute("INSERT OR IGNORE INTO names (text) VALUES (?)", (text,))
            (self._ids[text],) = self._database.execute("SELECT id FROM names WHERE text = ?", (text,)).fetchone()
        return self._ids[text]

    def _joined_id(self, words: Iterable[str]) -> int:
        return self._id(_SEPARATOR.join(word.replace(_SEPARATOR, " ") for word in words))

    # Answers ---------------------------------------------------------------------------------------------------------

    def runs(self, since_seconds: float, until_seconds: float) -> Iterator[Run]:
        """Yield the runs that began in the window, in order of time."""
        # One transaction: another process may add runs and names meanwhile.
        self._database.execute("BEGIN")
        texts: dict[int, str] = dict(self._database.execute("SELECT id, text FROM names"))
        words = {number: tuple(text.split(_SEPARATOR)) if text else () for number, text in texts.items()}
        sets: dict[int, frozenset[str]] = {}
        window = (since_seconds, until_seconds)
        hosts = self._rows("hosts", window)
        blames = self._rows("blames", window)
        figures = self._rows("figures", window)
        for number, run_id, begin, verdict, sentence, ranks, codes, _path in self._database.execute(
            "SELECT * FROM runs WHERE begin_seconds >= ? AND begin_seconds < ? ORDER BY begin_seconds, id", window
        ):
            yield Run(
                run_id=run_id,
                begin_seconds=begin,
                verdict=texts[verdict],
                sentence=sentence,
                ranks=ranks,
                # One set for all runs with the same checks: they are counted by set.
                codes=sets.setdefault(codes, frozenset(words[codes])),
                hosts=tuple(HostRow(texts[h], State(s), words[g], words[f]) for _, h, s, g, f in hosts.of(number)),
                blames=tuple(
                    Blame(texts[code], texts[title], words[h], words[g], bool(is_error))
                    for _, _, code, title, h, g, is_error in blames.of(number)
                ),
                figures=tuple(Figure(texts[h], texts[name], value) for _, h, name, value in figures.of(number)),
            )
        self._database.execute("COMMIT")

    def readings(self, since_seconds: float, until_seconds: float) -> list[Reading]:
        """The last reading of each part on each day of the window, in order of time."""
        # One transaction, as for runs.
        self._database.execute("BEGIN")
        texts: dict[int, str] = dict(self._database.execute("SELECT id, text FROM names"))
        query = (
            "SELECT host, part, begin_seconds, totals FROM counters WHERE day BETWEEN ? AND ? "
            "AND begin_seconds >= ? AND begin_seconds < ? ORDER BY begin_seconds"
        )
        days = (since_seconds // DAY_SECONDS, until_seconds // DAY_SECONDS)
        rows = self._database.execute(query, (*days, since_seconds, until_seconds))
        # Most parts have no errors; they share texts and the empty dictionary.
        none: dict[str, int] = {}
        readings = [
            Reading(texts[host], texts[part], seconds, none if totals == "{}" else _TOTALS.decode(totals))
            for host, part, seconds, totals in rows
        ]
        self._database.execute("COMMIT")
        return readings

    def _rows(self, table: str, window: tuple[float, float]) -> "_RowsByRun":
        query = (
            f"SELECT t.* FROM runs CROSS JOIN {table} t ON t.run = runs.id WHERE begin_seconds >= ? "
            "AND begin_seconds < ? ORDER BY begin_seconds, runs.id"
        )
        return _RowsByRun(self._database.execute(query, window))

    def bounds(self, after_seconds: float) -> tuple[int, float | None, list[tuple[str, str, float]]]:
        """The number of runs, the begin of the last before `after_seconds`, and (path, run id, begin) of later ones."""
        (number,) = self._database.execute("SELECT count(*) FROM runs").fetchone()
        query = "SELECT max(begin_seconds) FROM runs WHERE begin_seconds < ?"
        (last,) = self._database.execute(query, (after_seconds,)).fetchone()
        later = "SELECT path, run_id, begin_seconds FROM runs WHERE begin_seconds >= ? ORDER BY begin_seconds"
        return number, last, list(self._database.execute(later, (after_seconds,)))


class _RowsByRun:
    """The rows of a query that is ordered by run, given out run by run, so that memory holds one run's rows."""

    def __init__(self, rows: Iterator[tuple[int, ...]]) -> None:
        self._rows = rows
        self._next = next(rows, None)

    def of(self, run: int) -> Iterator[tuple[int, ...]]:
        while self._next is not None and self._next[0] == run:
            yield self._next
            self._next = next(self._rows, None)


def find_sources(words: Sequence[str]) -> list[Source]:
    """Find the reports and recordings that the arguments name: files, folders (searched in depth) and patterns.

    In a folder, files that end with .json or .jsonl are taken. Parts that the ranks of a run wrote are one source.
    UsageError if an argument names no file.
    """
    sources: dict[str, Source] = {}
    for word in words:
        paths = [word] if os.path.exists(word) or not has_magic(word) else sorted(glob(word, recursive=True))
        if not paths or not os.path.exists(paths[0]):
            raise UsageError(f"{readable(word)}: no such file or folder; expected a folder of reports, or a pattern")
        for path in paths:
            found = _sources_below(path) if os.path.isdir(path) else (_source([path], path),)
            sources |= {source.path: source for source in found if source is not None}
    return list(sources.values())


def _sources_below(folder: str) -> Iterator[Source | None]:
    for where, folders, names in os.walk(folder):
        folders.sort()
        parts = [name for name in sorted(names) if _PART.fullmatch(name)]
        is_recording = any(name.startswith("rank-") for name in parts)
        if is_recording:
            yield _source([os.path.join(where, name) for name in parts], where)
        for name in sorted(names):
            if name.endswith(_SUFFIXES) and not (is_recording and name in parts):
                path = os.path.join(where, name)
                yield _source([path], path)


def _source(paths: Sequence[str], path: str) -> Source | None:
    """The source at `path`, which consists of the files `paths`. None if it was deleted meanwhile."""
    try:
        states = [os.stat(each) for each in paths]
    except OSError:
        return None
    size, changed_ns = sum(state.st_size for state in states), max(state.st_mtime_ns for state in states)
    return Source(str(Path(path).absolute()), size, changed_ns)
