"""Over machines of a network with slow links (namespaces of this one): the same results, and the bytes as told."""

from __future__ import annotations

import json

import pytest

from tests.distributed import network


def test_what_the_links_carry_is_what_was_predicted() -> None:
    if reason := network.why_not():
        pytest.skip(reason)
    printed, sent = network.run(3, "200mbit", ["-m", "tests.distributed.network_step"], seconds=120)
    for text, on_the_link in zip(printed, sent, strict=True):
        found = json.loads(text.strip().splitlines()[-1])
        assert found["error"] < 1e-5
        assert found["sent"] == found["told"] > 1e6
        assert found["told"] <= on_the_link <= 1.1 * found["told"] + 100_000  # headers, and how the ranks meet
