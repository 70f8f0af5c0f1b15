"""One Ray for all tests of a session that need it, started on first use."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """A Ray of this machine whose workers find the package and the tests' modules."""
    import ray

    from raypipe.plan_process import start_quiet_stats
    from raypipe.residents import environment

    # Metrics come each second, not each ten, for which their tests would wait.
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    with environment({"PYTHONPATH": path, "RAY_metrics_report_interval_ms": "1000"}):
        ray.init(
            address="local",
            num_cpus=8,
            include_dashboard=False,
            namespace="tests",
            logging_level="ERROR",
            log_to_driver=False,
        )
    start_quiet_stats()
    yield
    ray.shutdown()


sys.path.insert(0, str(TESTS))
