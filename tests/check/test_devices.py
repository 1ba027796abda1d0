"""`regard check --device` moves tensors to a device and compares results on the CPU."""

from __future__ import annotations

import pytest
import torch

from regard.check.targets import NotSupported
from regard.check.targets.devices import available_device
from regard.check.targets.engines import installed_engines
from tests.conftest import Command


def test_engines_of_a_gpu_are_checked_by_default() -> None:
    names = [each.name for each in installed_engines("cuda")]
    assert "triton" in names
    assert "native" not in names


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_one_line(regard: Command) -> None:
    with pytest.raises(NotSupported, match="device 'cuda' is not available"):
        available_device("cuda")
    done = regard("check", "--device", "cuda")
    assert done.code == 2
    assert "device 'cuda' is not available" in done.out + done.err
