from tests.tasks.conftest import _one_thread, start  # noqa: F401
