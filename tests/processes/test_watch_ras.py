"""`ddpdiag watch` beside a stand-in for NCCL's RAS."""

from jobs import Job, processes
from ras_stand_in import Server, answers, communicator, rank, status

RANKS = "for RANK in 0 1; do export RANK LOCAL_RANK=$RANK WORLD_SIZE=2; sleep 60 & done; wait"


def watched(start, port: int) -> Job:
    return start("-m", "ddpdiag", "watch", "--stall", "1", "--", "sh", "-c", RANKS, NCCL_RAS_ADDR=f"localhost:{port}")


def first_report(job: Job) -> str:
    """The first report, once it is whole: notes on stacks that cannot be read are at its end."""
    job.wait_until(lambda: "notes" in job.stderr, 30)
    return " ".join(job.stderr.split())


def test_the_rank_that_launched_fewer_collectives_is_named(start):
    jobs: list[Job] = []

    def answer(question: bytes):
        pids = {each.environ["RANK"]: each.pid for each in processes(jobs[0].mark) if each.name == "sleep"}
        ranks = (rank(number, pid=pids[str(number)], AllReduce=100 - number) for number in range(2))
        return answers(status(communicator(*ranks)))(question)

    with Server(answer) as server:
        jobs.append(watched(start, server.port))
        report = first_report(jobs[0])
    assert "rank 1 launched fewer collectives than the others, which wait" in report
    assert "Rank 1 launched 99 AllReduce; rank 0 launched 100 AllReduce." in report


def test_without_an_answer_the_reason_is_told(start):
    with Server(answers(status(communicator(rank(0, pid=1))))) as server:
        report = first_report(watched(start, server.port))
    assert f"No answer of NCCL's RAS: only another job responds at localhost:{server.port}" in report
