"""The core imports no feature, and features do not import each other."""

import pkgutil

import grimp
import pytest

import ddpdiag

# Packages that a reader of the core need not know. Each is looked at from the day on which it exists.
FEATURES = {"bench", "compare", "history", "integrations", "lint", "simulate", "strategies", "ticket", "watch"}
PRESENT = sorted(FEATURES & {module.name for module in pkgutil.iter_modules(ddpdiag.__path__) if module.ispkg})
# Modules of cli that offer a feature's command, its manual pages, or its sections of a report.


@pytest.fixture(scope="module")
def imports() -> list[tuple[str, str]]:
    """Who imports whom, also inside functions."""
    graph = grimp.build_graph("ddpdiag", cache_dir=None)
    return [(module, other) for module in graph.modules for other in graph.find_modules_directly_imported_by(module)]


def part(module: str) -> str:
    """The package of a module: "lint" for ddpdiag.lint.rules.data, and "" for ddpdiag itself."""
    return module.partition(".")[2].partition(".")[0]


def test_features_are_found():
    assert {"compare", "lint", "simulate"} <= set(PRESENT)


@pytest.mark.parametrize("feature", PRESENT)
def test_the_core_does_not_import_it(imports, feature):
    offering = {f"ddpdiag.cli.{name}" for name in {"app", "manual", "outputs"}}
    core = [pair for pair in imports if part(pair[0]) not in FEATURES and pair[0] not in offering]
    assert [pair for pair in core if part(pair[1]) == feature] == []


@pytest.mark.parametrize("feature", PRESENT)
def test_it_imports_no_other_feature(imports, feature):
    others = FEATURES - {feature}
    assert [pair for pair in imports if part(pair[0]) == feature and part(pair[1]) in others] == []
