"""A link that is cut in the middle of a check: is it named with both ends, and no innocent host?

    python tests/benchmarks/cut_links.py [--hosts 3] [--moments 0.5,1,2,...] [--faults drop,reset,loss]     (root)

The hosts are network namespaces with one rank each. At each moment (seconds after the start of the check) h2 begins to
drop TCP that arrives from h1, to answer it with a reset, or 5 % of what it sends are lost. A row shows the verdict, the
hosts and links that errors blame, and their codes. The bars: no host but h1 and h2 is ever blamed, and no run is FIT in
which data were cut before the last check began (the last moments may be after it: then the run took less time).
"""

import argparse
import sys
import tempfile
import threading
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS / name) for name in ("hosts", "processes", "tools", "inject")]

from launch import Bed, Launcher, launch, report_of  # noqa: E402
from network import Network  # noqa: E402

MOMENTS = "0.5,1,2,3,4,5,6,7,8,9,10,12"
CHECK = ("-m", "ddpdiag", "check", "--budget", "90", "--json", "{json}")


def break_link(fault: str, network: Network) -> None:
    """Let the fault begin."""
    h1, h2 = network[1], network[2]
    if fault == "loss":
        for host in network.hosts:
            if host is not h2:
                host.lose(0.05, source=h2)
    else:
        h2.block(source=h1, reject=fault == "reset")


def run(count: int, fault: str, moment: float) -> tuple[str, ...]:
    """One check; a row of the table."""
    with tempfile.TemporaryDirectory() as folder, Network(count, Path(folder) / "network") as network:
        started = launch(network, Bed(ranks=(1,) * count, launcher=Launcher.HAND), CHECK, Path(folder) / "run")
        timer = threading.Timer(moment, break_link, (fault, network))
        timer.start()
        begin = time.monotonic()
        report = report_of(started)
        took = time.monotonic() - begin
        timer.cancel()
    errors = [finding for finding in report["findings"] if finding["severity"] in ("error", "warning")]
    blamed = sorted({host for finding in errors for host in finding["hosts"]})
    links = sorted({link for finding in errors for link in finding["links"]})
    codes = dict.fromkeys(finding["code"] for finding in errors)
    wrong = sorted({*blamed} - {"h1", "h2"})
    told = f"INNOCENT {', '.join(wrong)}" if wrong else "FIT" if report["exit_code"] == 0 and moment < took else ""
    return (
        fault,
        f"{moment:g}",
        report["verdict"],
        f"{took:.0f}",
        ", ".join(blamed),
        "; ".join(links),
        ", ".join(codes),
        told,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--moments", default=MOMENTS)
    parser.add_argument("--faults", default="drop,reset")
    asked = parser.parse_args()
    print("fault | moment (s) | verdict | took (s) | blamed hosts | links | codes | wrong")
    for fault in asked.faults.split(","):
        for moment in map(float, asked.moments.split(",")):
            print(" | ".join(run(asked.hosts, fault, moment)), flush=True)


if __name__ == "__main__":
    main()
