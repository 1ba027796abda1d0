"""Memory grows with Q + K, not with Q · K. Each measurement runs in a separate process."""

from __future__ import annotations

import subprocess
import sys
import textwrap

MEASURE = """
import threading, time
import torch
import regard as rg

class Peak:
    def rss(self):
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096 / 1e6
    def __enter__(self):
        self.base = self.most = self.rss()
        self.going = True
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self
    def watch(self):
        while self.going:
            self.most = max(self.most, self.rss())
            time.sleep(0.001)
    def __exit__(self, *_):
        self.going = False
        self.thread.join()
        print(self.most - self.base)
"""


def megabytes(code: str) -> float:
    program = MEASURE + textwrap.dedent(code)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return float(result.stdout.split()[-1])


def test_additive_attention_trains_on_4096_tokens_in_under_200_megabytes() -> None:
    used = megabytes(
        """
        q, k, v = (torch.randn(1, 1, 4096, 16, requires_grad=True) for _ in range(3))
        weight = torch.randn(16, requires_grad=True)
        attend = rg.Attention(score=rg.Additive(weight))
        attend(q[:, :, :8], k[:, :, :8], v[:, :, :8], engine="tiled").sum().backward()
        with Peak():
            attend(q, k, v, engine="tiled").sum().backward()
        """
    )
    assert used < 200


def test_a_map_of_65536_tokens_takes_under_300_megabytes() -> None:
    used = megabytes(
        """
        q, k = torch.randn(2, 1, 1, 65536, 16)
        attend = rg.Attention(mask=rg.causal() & rg.window(8191, 0))
        attend.map(q[:, :, :64], k[:, :, :64], size=(8, 8))
        with Peak():
            rows = attend.map(q, k, size=(256, 256)).sum(-1) * 65536 / 256
        assert torch.allclose(rows, torch.ones(256), atol=1e-4)
        """
    )
    assert used < 300


def test_a_large_map_of_16384_tokens_takes_under_50_megabytes() -> None:
    used = megabytes(
        """
        q, k = torch.randn(2, 1, 1, 16384, 16)
        attend = rg.Attention()
        attend.map(q[:, :, :64], k[:, :, :64], size=(8, 8))
        with Peak():
            attend.map(q, k, size=(1000, 1000))
        """
    )
    assert used < 50


def test_a_window_among_65536_tokens_takes_under_50_megabytes() -> None:
    used = megabytes(
        """
        q, k = torch.randn(2, 1, 2, 65536, 16)
        attend = rg.Attention(mask=rg.causal() & rg.where(lambda b, h, p, j: (p + j) % 2 == 0))
        attend.weights(q[:, :, :64], k[:, :, :64], rows=slice(0, 8))
        with Peak():
            attend.weights(q, k, rows=slice(40000, 40064), columns=slice(30000, 30064), heads=1)
        """
    )
    assert used < 50


def test_statistics_of_16384_tokens_take_under_100_megabytes() -> None:
    used = megabytes(
        """
        q, k = torch.randn(2, 1, 1, 16384, 16)
        attend = rg.Attention(mask=rg.causal())
        attend.statistics(q[:, :, :64], k[:, :, :64])
        with Peak():
            attend.statistics(q, k)
        """
    )
    assert used < 100
