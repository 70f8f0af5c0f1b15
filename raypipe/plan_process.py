"""What goes on in the process that executes a plan, so that plans which are over leave no trace in Ray.

Ray Data has one actor export about 300 series for each dataset, and neither it nor the agent that passes them on ever
forgets one. A run makes a dataset an iteration: together they grew by 3 MiB an iteration (examples/bench/memory.py).
Here that actor exports nothing. The process that executes a plan, and ends with it, exports what the dashboard shows of
a stage, its rows, under the name that the dashboard looks for. Progress and states the dashboard asks the actor for, as
ever.

Each stage of each plan also has a class of its own, of which Ray's GCS keeps the 13 KB that its actors were made of for
as long as the job lasts. It is told to forget them when the plan ends.
"""

import contextlib
import time
from typing import Any

import ray
from ray._private.function_manager import make_function_table_key
from ray._private.ray_constants import KV_NAMESPACE_FUNCTION_TABLE
from ray._private.worker import global_worker
from ray.actor import ActorHandle
from ray.data._internal.execution.execution_callback import ExecutionCallback
from ray.data._internal.stats import STATS_ACTOR_NAME, STATS_ACTOR_NAMESPACE, _StatsActor
from ray.util.metrics import Gauge

EVERY_S = 1.0
# Seconds that the end of a plan waits for GCS to forget its classes.
FORGET_S = 1.0

# The classes of the stage actors of the plan that this process executes.
stage_classes: list[Any] = []


def end_execution(executor: ActorHandle) -> None:
    """Kills the actor that executes a plan, its classes forgotten. It is not left to go out of scope: of a killed one
    Ray (2.60) closes all connections, at least where something of the plan is still held (see `Feed`)."""
    with contextlib.suppress(ray.exceptions.RayError):  # it is gone, or busy with a plan that is abandoned
        ray.get(executor.__ray_call__.remote(_forget_classes), timeout=FORGET_S)
    ray.kill(executor)


def _forget_classes(_: Any) -> None:
    worker: Any = global_worker
    for each in stage_classes:
        class_id = each.__ray_metadata__.actor_creation_function_descriptor.function_id.binary()
        key = make_function_table_key(b"ActorClass", worker.current_job_id, class_id)
        worker.gcs_client.internal_kv_del(key, False, KV_NAMESPACE_FUNCTION_TABLE)


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
        stage_classes[:] = [each._actor_cls for each in executor._topology if getattr(each, "_actor_cls", None)]
        for operator, name in zip(executor._topology, executor._get_operator_tags(), strict=True):
            self.rows.set(operator.metrics.row_outputs_taken, {"dataset": executor._dataset_id, "operator": name})
