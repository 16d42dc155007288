"""Rates between hosts: every pair where there are few hosts, the lowest of groups where there are many."""

from hypothesis import given
from hypothesis import strategies as st
from meshes import DROPPED, meshed, slow

from ddpdiag.checks.api import Seen
from ddpdiag.checks.fabric import hosts as fab001
from ddpdiag.checks.matrix import MAX_ROWS, pair_matrix
from ddpdiag.checks.rendezvous import mesh
from ddpdiag.checks.world import World
from ddpdiag.simulate.fleet import Fault, Faults, Fleet, Noise, host_name, simulate


def named(hosts):
    return [f"n{host}" for host in range(hosts)]


def test_few_hosts_have_a_cell_for_each_way():
    matrix = pair_matrix("fab.pairs", "pairs", named(3), {(0, 1): 2.0, (1, 0): 3.0, (2, 0): 0.0})
    assert matrix.rows == matrix.columns == ("n0", "n1", "n2")
    assert matrix.cells == ((None, 2.0, None), (3.0, None, None), (0.0, None, None))
    assert (matrix.title, matrix.unit) == ("pairs", "bytes_per_s")


def test_without_rates_there_is_none():
    assert pair_matrix("fab.pairs", "pairs", named(3), {}) is None


@given(st.integers(2, 5000), st.data())
def test_many_hosts_share_cells_and_the_slowest_is_seen(hosts, data):
    host = st.integers(0, hosts - 1)
    rates = data.draw(st.dictionaries(st.tuples(host, host), st.floats(1, 1e12), min_size=1, max_size=50))
    matrix = pair_matrix("fab.pairs", "pairs", named(hosts), rates)
    cells = [cell for row in matrix.cells for cell in row if cell is not None]
    assert len(matrix.rows) == len(matrix.columns) == len(matrix.cells) <= MAX_ROWS
    assert min(cells) == min(rates.values())
    assert set(cells) <= set(rates.values())
    assert matrix.rows[0].startswith("n0")
    assert matrix.rows[-1].endswith(f"n{hosts - 1}")


def test_a_mesh_has_the_rate_of_each_way_and_what_failed_is_0():
    (matrix,) = mesh.report(meshed(3, {(0, 1): slow(1e6), (2, 1): DROPPED})).matrices
    assert matrix.cells == ((None, 1e6, 1e9), (1e9, None, 1e9), (1e9, 0.0, None))


def test_pairs_of_a_fleet_show_the_slow_host():
    fleet = Fleet(8, Faults(((Fault.SLOW_HOST, 1),)), Noise(sigma=0.001, transients=0.0), seed=3)
    recording = simulate(fleet)
    header = recording.header
    world = World(size=header.world_size, launcher="", options=header.options, arrivals=recording.arrivals)
    (matrix,) = fab001.matrices(Seen(world, fab001.CHECK, recording))
    rows = dict(zip(matrix.rows, matrix.cells, strict=True))
    best = {host: max(filter(None, cells)) for host, cells in rows.items()}
    assert matrix.cells == tuple(zip(*matrix.cells, strict=True))
    assert min(best, key=best.get) in {
        host_name(host) for host in Fleet(8, Faults(((Fault.SLOW_HOST, 1),)), seed=3).failing
    }
