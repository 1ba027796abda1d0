"""A pytest plugin for `regard check`: every property of an attention function, or what the layers of a model see.

    @pytest.mark.regard("package.module:function")
    def test_my_attention_conforms(conformance):
        conformance()

    def test_my_model_sees_what_it_promises(model_conformance):
        model_conformance(build_model(), implementation=["sdpa"])

It is not part of the package `regard`, so that pytest starts without importing torch unless the fixture is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "regard(*targets, only=None): targets of the fixture `conformance`: names, package.module:function or Targets",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "conformance" not in metafunc.fixturenames:
        return
    from regard.check import PROPERTIES, Target, UnknownTarget, target

    mark = metafunc.definition.get_closest_marker("regard")
    if mark is None or not mark.args:
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid}: the fixture `conformance` needs a target: "
            '@pytest.mark.regard("package.module:function")'
        )
    only = mark.kwargs.get("only") or list(PROPERTIES)
    if unknown := sorted(set(only) - set(PROPERTIES)):
        raise pytest.UsageError(f"only must name properties of `regard check --list`, got {', '.join(unknown)}")
    try:
        targets = [each if isinstance(each, Target) else target(each) for each in mark.args]
    except UnknownTarget as error:
        raise pytest.UsageError(str(error)) from None
    pairs = [(each, PROPERTIES[name]) for each in targets for name in only]
    names = [f"{each.name}-{prop.name}" if len(targets) > 1 else prop.name for each, prop in pairs]
    metafunc.parametrize("conformance", pairs, ids=names, indirect=True)


@pytest.fixture
def conformance(request: pytest.FixtureRequest) -> Callable[[], None]:
    """Check one property of one target: fail with the smallest failing input, or skip if it is not applicable."""
    from regard.check import examine

    def run() -> None:
        outcome = examine(*request.param)
        if outcome.status == "not applicable":
            pytest.skip(outcome.reason)
        if outcome.status == "failed":
            prop = request.param[1].statement
            pytest.fail(f"{outcome.property}: {outcome.reason}\n\n{prop}\n\n{outcome.code}", pytrace=False)

    return run


@pytest.fixture
def model_conformance() -> Callable[..., None]:
    """Check a model of Transformers: fail if a layer sees other tokens than promised, skip if nothing was measured.

    The arguments are those of `regard.check.check_model`.
    """
    from regard.check import check_model

    def run(model: Any, **options: Any) -> None:
        if "regard" in options.get("implementation", ()):
            from regard.integrations.transformers import enable

            enable()
        findings = check_model(model, **options)
        failed = [each for each in findings if each.verdict == "failed"]
        if failed:
            parts = [
                f"{each.layer}, {each.implementation}, {each.scenario}: promised {each.promised}; measured "
                f"{each.measured}\n\n{each.code}"
                for each in failed
            ]
            pytest.fail("\n".join(parts), pytrace=False)
        if not any(each.verdict == "passed" for each in findings):
            pytest.skip("; ".join(dict.fromkeys(f"{each.promised}{each.measured}" for each in findings)))

    return run
