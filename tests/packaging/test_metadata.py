"""What package indexes and pip read."""

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet


def test_the_licence_covers_code_and_digits(built):
    assert built.metadata["License-Expression"] == "Apache-2.0 AND CC-BY-SA-3.0"
    files = built.metadata.get_all("License-File")
    assert sorted(files) == ["LICENSE", "ddpdiag/data/mnist/LICENSE", "ddpdiag/data/mnist/NOTICE"]


def test_the_command_is_ddpdiag(built):
    words = built.in_wheel(".dist-info/entry_points.txt").split()
    assert words == ["[console_scripts]", "ddpdiag", "=", "ddpdiag.cli:main"]


def test_python_3_11_and_all_later_ones_will_do(built):
    allowed = SpecifierSet(built.metadata["Requires-Python"])
    assert not allowed.contains("3.10.14")
    assert all(allowed.contains(version) for version in ("3.11.0", "3.14.0", "3.99"))


def test_torch_has_no_upper_cap(built):
    requirements = map(Requirement, built.metadata.get_all("Requires-Dist"))
    (torch,) = [requirement for requirement in requirements if requirement.name == "torch"]
    assert {part.operator for part in torch.specifier} == {">="}
    for version in ("2.6.0a0+git123", "2.7.1+vendor.1", "2.13.0", "3.0.0.dev20270101+cu140", "99.0"):
        assert torch.specifier.contains(version), version
