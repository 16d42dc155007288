"""Pages for tests: from recordings, from a simulated fleet, and from a report full of hostile strings."""

from html.parser import HTMLParser
from pathlib import Path

from msgspec import structs
from reports import SLOW, rank_row, unfit

from ddpdiag.checks.registry import all_checks
from ddpdiag.codec import read_recording
from ddpdiag.judgement import judge
from ddpdiag.model import Matrix, Report, WorldSummary
from ddpdiag.model.options import Snapshot
from ddpdiag.simulate.fleet import Fault, Faults, Fleet, simulate

RECORDINGS = Path(__file__).parent.parent / "recordings"
RECORDED = tuple(sorted(path.stem for path in RECORDINGS.glob("*.jsonl")))

SCRIPT = "<script>document.title='owned'</script>"
IMAGE = "\"'><img src=x onerror=\"document.title='owned'\">"
CLOSE = "</code></pre></style></svg></title>{{ 7 * 7 }}{% raw %}" + SCRIPT
ODD = 'font: 10px style="x id="y url(#z #010201 a\x00b\x1b[31mred\u202egnp.exe $x_1$ \U0001f4a5 \\n'


def recorded(name: str) -> Report:
    """The report of a recording in tests/recordings."""
    return judge(read_recording([RECORDINGS / f"{name}.jsonl"]), all_checks())


def fleet(hosts: int, *, ranks_per_host: int = 8) -> Report:
    """A simulated fleet, of which one host in a hundred is slow."""
    faults = Faults(((Fault.SLOW_HOST, max(1, hosts // 100)),))
    return judge(simulate(Fleet(hosts, faults, seed=7), ranks_per_host=ranks_per_host), all_checks())


def hostile() -> Report:
    """Whatever a stranger can write into a report: markup, templates, quotes, what is not seen."""
    words = (SCRIPT, IMAGE, CLOSE, ODD)
    finding = structs.replace(
        SLOW,
        code=f"COL001.{SCRIPT}",
        title=IMAGE,
        message=CLOSE,
        hosts=words,
        gpus=words,
        links=words,
        evidence={SCRIPT: CLOSE, "source": IMAGE, "stack": [f"{word}: {word}" for word in words]},
        fix=CLOSE,
        env={IMAGE: CLOSE, "NAME": None},
    )
    cells = ((None, 1e9, 0.0, 2e9),) * 4
    report = unfit(
        sentence=CLOSE,
        ranks=tuple(
            rank_row(rank, **{SCRIPT: IMAGE, "gpu_uuid": word, "host": word}) for rank, word in enumerate(words)
        ),
        findings=(finding,),
        recording_problems=words,
        world=WorldSummary(size=4, hosts=words, launcher=SCRIPT, backend=IMAGE, hosts_by_leaf_switch={CLOSE: words}),
        measurements={SCRIPT: IMAGE, IMAGE: 1.0},
        matrices=(
            Matrix(name=f"p2p.copy.{CLOSE}", title=CLOSE, rows=words, columns=words, cells=cells, unit="bytes_per_s"),
            Matrix(name=f"p2p.topology.{IMAGE}", title=IMAGE, rows=words, columns=words, cells=(words,) * 4),
        ),
        snapshot=Snapshot(created=SCRIPT, shape={}, facts={SCRIPT: {IMAGE: CLOSE}}, figures=()),
        created=SCRIPT,
        version=IMAGE,
    )
    stages = tuple(structs.replace(stage, status=SCRIPT) for stage in report.stages)
    checks = tuple(structs.replace(check, name=IMAGE, skipped_because=CLOSE) for check in report.checks)
    return structs.replace(report, stages=stages, checks=checks, run_id=CLOSE, workarounds={"A": CLOSE, IMAGE: None})


ALONE = {"meta", "link", "img", "input", "br", "hr"}


class Reader(HTMLParser):
    """Elements, their attributes and texts; fails where one is not closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open, self.elements, self.texts = [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in ALONE:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.texts.append(data)

    def of(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())
