import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Models this small are all waiting for one another on two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
