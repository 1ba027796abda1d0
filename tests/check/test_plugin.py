"""The pytest plugin in another project."""

from __future__ import annotations

import pytest

pytest_plugins = "pytester"

THEIRS = """
import torch.nn.functional as F

def attention(q, k, v, attn_mask=None, is_causal=False, dropout_p=0.0, scale=None):
    return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale)
"""
TEST = """
import pytest

@pytest.mark.regard("theirs:attention", only=["row-sums", "nan-leaks", "grouped-heads"])
def test_attention_conforms(conformance):
    conformance()
"""


@pytest.fixture
def theirs(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(theirs=THEIRS)
    pytester.syspathinsert()
    return pytester


def test_every_property_is_a_test_that_passes_fails_or_is_skipped(theirs: pytest.Pytester) -> None:
    theirs.makepyfile(TEST)
    result = theirs.runpytest("-p", "pytest_regard", "-rs", "-v")
    result.assert_outcomes(passed=1, failed=1, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "*::test_attention_conforms[[]row-sums[]] PASSED*",
            "*::test_attention_conforms[[]nan-leaks[]] FAILED*",
            "*::test_attention_conforms[[]grouped-heads[]] SKIPPED*",
            "nan-leaks: nan in a masked key gives nan",
            "*nan_leaks(attend, q, k, v, mask)*",
            "SKIPPED*the function has no parameter enable_gqa",
        ]
    )


def test_without_only_all_properties_are_collected(theirs: pytest.Pytester) -> None:
    theirs.makepyfile(TEST.replace(', only=["row-sums", "nan-leaks", "grouped-heads"]', ""))
    result = theirs.runpytest("-p", "pytest_regard", "--collect-only", "-q")
    result.stdout.fnmatch_lines(["*[[]definition[]]", "*[[]memory[]]"])


@pytest.mark.parametrize(
    ("was", "now", "message"),
    [
        (
            '@pytest.mark.regard("theirs:attention", only=["row-sums", "nan-leaks", "grouped-heads"])',
            "",
            "*needs a target*",
        ),
        ("theirs:attention", "theirs:nothing", "*theirs:nothing cannot be imported*"),
        ('"row-sums"', '"beauty"', "*only must name properties*beauty*"),
    ],
)
def test_usage_errors(theirs: pytest.Pytester, was: str, now: str, message: str) -> None:
    theirs.makepyfile(TEST.replace(was, now))
    result = theirs.runpytest("-p", "pytest_regard")
    assert result.ret != 0
    (result.stdout if "theirs" in message or "only" in message or "needs" in message else result.stderr).fnmatch_lines(
        [message]
    )
