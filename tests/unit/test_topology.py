"""Which leaf switch each host hangs on: from a file, or from Slurm."""

import pytest
from msgspec import structs
from seen import arrival_of

from ddpdiag.checks.world import World
from ddpdiag.cli.check import _run_options
from ddpdiag.cli.options import CheckArgs
from ddpdiag.cli.outputs import Outputs
from ddpdiag.errors import UsageError
from ddpdiag.judgement.hosts import leaves_of
from ddpdiag.model import Place, RunOptions
from ddpdiag.model.launch import LaunchArgs
from ddpdiag.runtime.launchers.launch import Launch
from ddpdiag.runtime.launchers.slurm import leaf_switch, read_topology


@pytest.mark.parametrize(
    ("text", "leaves"),
    [
        (
            "# made by hand\nn0 leaf0\n\n  n1\tleaf0  # moved in May\nn[2-3] leaf1\n",
            {"n0": "leaf0", "n1": "leaf0", "n2": "leaf1", "n3": "leaf1"},
        ),
        (
            "SwitchName=s0 Nodes=n[0-1,07] LinkSpeed=100\nswitchname=s1 nodes=n2,gpu-[1-2] # a comment\n"
            "SwitchName=top \\\n  Switches=s[0-1]\n",
            {"n0": "s0", "n1": "s0", "n07": "s0", "n2": "s1", "gpu-1": "s1", "gpu-2": "s1"},
        ),
        ("BlockName=b1 Nodes=a[1-2]\nBlockSizes=2,4\n", {"a1": "b1", "a2": "b1"}),
        ("SwitchName=s0 Nodes=n0\nSwitchName=s1 Nodes=n[0-1]\n", {"n0": "s0", "n1": "s1"}),
        ("n0 leaf0\n\\\nn1 \\\n  leaf1\nn2 leaf2\\", {"n0": "leaf0", "n1": "leaf1", "n2": "leaf2"}),
    ],
    ids=["by hand", "Slurm's own file", "blocks", "the first of several switches", "a last line that goes on"],
)
def test_a_file_says_on_which_leaf_a_host_is(tmp_path, text, leaves):
    (tmp_path / "leaves").write_text(text)
    assert read_topology(str(tmp_path / "leaves")) == leaves


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"n0 leaf0\nn1\n", id="a host without a leaf"),
        pytest.param(b"n0 leaf0 rack1\n", id="a third word"),
        pytest.param(b"n0 leaf0\n# a\nn0 leaf1\n", id="a host on two leaves"),
        pytest.param(b"SwitchName=s0 Nodes=n[0-\n", id="a bracket that is not closed"),
        pytest.param(b"SwitchName=s0 Nodes=n[a-b]\n", id="a range of letters"),
        pytest.param(b"SwitchName=s0 Nodes=n[0-999999999]\n", id="a range that is too large"),
        pytest.param(b"SwitchName=s0 Nodes=@all\n", id="a group"),
        pytest.param(b"SwitchName=s0 Node=n0\n", id="an unknown name"),
        pytest.param(b"SwitchName=s0 Nodes= n0\n", id="no value"),
        pytest.param(b"Nodes=n0\n", id="hosts without a switch"),
        pytest.param(b"# nothing\n", id="nothing"),
        pytest.param(b"SwitchName=top Switches=s0\n", id="no host"),
        pytest.param(b"\xff\xfe", id="no text"),
        pytest.param(None, id="no file"),
    ],
)
def test_what_is_wrong_with_the_file_is_told_in_one_sentence(golden, tmp_path, content):
    file = tmp_path / "leaves"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read_topology(str(file))
    golden(str(caught.value).replace(str(tmp_path), "TMP"))


def test_only_rank_0_needs_the_file(tmp_path):
    place = Place(rank=1, world_size=2, host="n1", launcher="hand")
    launch = Launch(place=place, master_addr="n0", port=1, run_id="r")
    missing = CheckArgs(topology=str(tmp_path / "none"))
    assert _run_options(launch, LaunchArgs(), missing, Outputs()).topology == {}
    with pytest.raises(UsageError, match="--topology"):
        _run_options(structs.replace(launch, place=structs.replace(place, rank=0)), LaunchArgs(), missing, Outputs())


def test_a_long_topology_does_not_travel_to_every_rank():
    assert RunOptions(topology={"n0": "leaf0"}, strict=True).for_ranks == RunOptions(strict=True)


@pytest.mark.parametrize(
    ("given", "host", "leaf"),
    [
        ({"n0": "a"}, "n0", "a"),
        ({"n0": "a"}, "n0.cluster.org", "a"),
        # Slurm's name of a host that calls itself as the file does.
        ({"n0.cluster.org": "a", "n1.cluster.org": "b"}, "n0", "a"),
        ({"n0.x.org": "a", "n0.y.org": "a"}, "n0", "a"),
        ({"n0.x.org": "a", "n0.y.org": "b"}, "n0.y.org", "b"),
        ({"n1": "a"}, "n0", None),
    ],
)
def test_names_in_the_file_may_have_a_domain_or_none(given, host, leaf):
    arrival = arrival_of(0, 1)
    arrival = structs.replace(arrival, place=structs.replace(arrival.place, host=host))
    world = World(size=1, launcher="hand", options=RunOptions(topology=given), arrivals={0: arrival})
    assert world.leaf_by_host == ({host: leaf} if leaf else {})
    assert leaves_of(world) == ({leaf: (host,)} if leaf else {})


@pytest.mark.parametrize(
    ("address", "pattern", "host", "leaf"),
    [
        ("root.leaf3.node7", "switch.switch.node", "node7", "leaf3"),
        ("s[0-1].leaf3.node7", "switch.switch.node", "node7", "leaf3"),
        ("block2.node7", "block.node", "node7", "block2"),
        ("root.leaf3.node7.cluster.org", "switch.switch.node", "node7", "leaf3"),
        ("root.leaf3.node7", "switch.switch.node", "node7.cluster.org", "leaf3"),
        ("root.leaf3.node1", "switch.switch.node", "node7", ""),
        ("node7", "host", "node7", ""),
        ("root.leaf3.node7", "", "node7", ""),
        ("leaf3.node7", "switch.switch.node", "node7", ""),
        ("leaf3.switch7", "node.switch", "switch7", ""),
    ],
)
def test_slurms_variables_say_on_which_leaf_a_host_is(address, pattern, host, leaf):
    variables = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    assert leaf_switch(variables, host) == leaf
    assert leaf_switch({}, host) == ""
