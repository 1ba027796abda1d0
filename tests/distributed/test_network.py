"""A training step over slow network links (namespaces): correct results, and the predicted bytes."""

from __future__ import annotations

import json

import pytest

from tests.distributed import network


def test_bytes_on_the_links_equal_the_prediction() -> None:
    if reason := network.why_not():
        pytest.skip(reason)
    printed, sent = network.run(3, "200mbit", ["-m", "tests.distributed.network_step"], seconds=120)
    for text, on_the_link in zip(printed, sent, strict=True):
        report = json.loads(text.strip().splitlines()[-1])
        assert report["error"] < 1e-5
        assert report["sent"] == report["predicted"] > 1e6
        assert (
            report["predicted"] <= on_the_link <= 1.1 * report["predicted"] + 100_000
        )  # plus headers and the rendezvous
