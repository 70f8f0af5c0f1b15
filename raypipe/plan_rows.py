"""Rows of each stage of a plan for Ray's dashboard and Prometheus, without a trace of plans that are over.

Ray Data has one actor export about 300 series for each dataset, and neither it nor the agent that passes them on ever
forgets one. A run makes a dataset an iteration: together they grew by 3 MiB an iteration (examples/bench/memory.py).
Here that actor exports nothing. The process that executes a plan, and ends with it, exports what the dashboard shows of
a stage, its rows, under the name that the dashboard looks for. Progress and states the dashboard asks the actor for, as
ever.
"""

import time
from typing import Any

import ray
from ray.data._internal.execution.execution_callback import ExecutionCallback
from ray.data._internal.stats import STATS_ACTOR_NAME, STATS_ACTOR_NAMESPACE, _StatsActor
from ray.util.metrics import Gauge

EVERY_S = 1.0


def start_quiet_stats() -> None:
    """Starts Ray Data's actor of statistics, on this node, with its metrics off; one that runs already stays as it is.
    Ray Data takes the one that is there."""
    node = ray.get_runtime_context().get_node_id()
    actor: Any = _StatsActor
    actor.options(
        name=STATS_ACTOR_NAME, namespace=STATS_ACTOR_NAMESPACE, get_if_exists=True, lifetime="detached",
        label_selector={"ray.io/node-id": node}, runtime_env={"env_vars": {"RAY_enable_metrics_collection": "0"}},
    ).remote()  # fmt: skip


class PlanRows(ExecutionCallback):
    """Exports the rows that have left each stage of the plan which this process executes."""

    def before_execution_starts(self, executor: Any) -> None:
        self.rows = Gauge("data_output_rows", "rows that have left a stage", tag_keys=("dataset", "operator"))
        self.told = 0.0

    def on_execution_step(self, executor: Any) -> None:
        if time.monotonic() > self.told + EVERY_S:
            self.tell(executor)

    def after_execution_succeeds(self, executor: Any) -> None:
        self.tell(executor)

    def tell(self, executor: Any) -> None:
        self.told = time.monotonic()
        for operator, name in zip(executor._topology, executor._get_operator_tags(), strict=True):
            self.rows.set(operator.metrics.row_outputs_taken, {"dataset": executor._dataset_id, "operator": name})
