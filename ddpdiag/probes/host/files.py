"""Small files of the kernel, read without a fuss."""

from pathlib import Path


def read_text(path: Path) -> str | None:
    """The stripped content, or None if the file is missing or not readable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def read_int(path: Path) -> int | None:
    """The content as a number, or None if it is missing or something else (such as "max")."""
    content = read_text(path)
    try:
        return int(content) if content else None
    except ValueError:
        return None


def read_pairs(path: Path, separator: str | None = None) -> dict[str, str]:
    """Lines of "name<separator>value" by name, without those that lack a value; empty if unreadable."""
    rows = (line.split(separator, 1) for line in (read_text(path) or "").splitlines())
    return {row[0].strip(): row[1].strip() for row in rows if len(row) == 2}
