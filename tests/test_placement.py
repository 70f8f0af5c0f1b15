"""Actors on the nodes that the config names: selectors, what preflight says of them, and a cluster of three nodes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import save_model, tiny_model

from raypipe.config import Config, EngineConfig, GradeConfig, GraderConfig, ModelConfig, TrainConfig
from raypipe.config_checks import check
from raypipe.placement import Node, check_labels, for_ray, satisfies
from raypipe.resources import Machine, demands, missing

TESTS = Path(__file__).parent
GPU_NODES = tuple(Node(32, 4, {"pool": "gpu", "ray.io/node-id": str(i)}) for i in range(2))
CPU_NODE = Node(64, 0, {"pool": "cpu"})
CLUSTER = Machine((*GPU_NODES, CPU_NODE), local=False)


@pytest.mark.parametrize(
    ("selector", "expected"),
    [("H100", "h"), ("in(A100, H100)", "ah"), ("!H100", "a-"), ("!in(A100, H100)", "-"), ("B200", "")],
)
def test_selectors_are_read_as_ray_reads_them(selector, expected):
    from ray._raylet import node_labels_match_selector

    nodes = {"a": {"gpu": "A100"}, "h": {"gpu": "H100"}, "-": {"other": "H100"}}
    wanted = {"gpu": selector}
    assert {name for name, labels in nodes.items() if satisfies(labels, wanted)} == set(expected)
    assert {name for name, labels in nodes.items() if node_labels_match_selector(labels, for_ray(wanted))} == set(
        expected
    )


def test_ray_takes_the_selectors_that_are_accepted_and_no_others():
    from ray._private.label_utils import validate_label_selector

    selectors = [
        "H100",
        "!a",
        "in(a, b)",
        "in(a,b)",
        "!in(a)",
        "-a",
        "a-",
        "in()",
        "in(a b)",
        "!!a",
        "not a",
        "",
        "(a)",
    ]
    labels = ["pool", "ray.io/accelerator-type", "a/b/c", "a b", "-a", "", "x" * 64]
    for label, selector in [("pool", selector) for selector in selectors] + [(label, "a") for label in labels]:
        try:
            check_labels("engine.node_labels", {label: selector})
        except ValueError:
            continue
        assert not validate_label_selector({label: selector}), (label, selector)
    check_labels("engine.node_labels", {"ray.io/accelerator-type": "!in(A100, H100)", "pool": "a.b_c-1"})


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"pool": "a b"}, r"engine.node_labels: pool='a b' is not a selector.*in\(A100, H100\)"),
        ({"": "a"}, "engine.node_labels: '' is not a label"),
    ],
)
def test_a_wrong_selector_is_named(labels, message):
    with pytest.raises(ValueError, match=message):
        check(Config(engine=EngineConfig(node_labels=labels), model=ModelConfig(path="m")))


def lacks(machine: Machine = CLUSTER, engine: EngineConfig | None = None, **others) -> list[str]:
    config = Config(
        model=ModelConfig(path="m"), engine=engine or EngineConfig(),
        grade=others.pop("grade", GradeConfig(graders=[GraderConfig(path="m:G")])), **others,
    )  # fmt: skip
    return missing(demands(config, machine), machine)


def test_a_run_that_fits_its_nodes_lacks_nothing():
    assert not lacks(engine=EngineConfig(count=2, tensor_parallel_size=2, node_labels={"pool": "gpu"}))
    assert not lacks(grade=GradeConfig(graders=[], workers="8", processes=8, node_labels={"pool": "!gpu"}))
    assert not lacks(Machine((Node(2, 0),), local=True))


def test_labels_that_no_node_has_are_named():
    [sentence] = lacks(engine=EngineConfig(node_labels={"pool": "H100"}))
    assert "engine.node_labels={'pool': 'H100'}: no node of the cluster has these labels" in sentence
    assert "it has pool=cpu, pool=gpu;" in sentence and "ray start --labels" in sentence


def test_what_labelled_nodes_have_no_room_for_is_said():
    [sentence] = lacks(train=TrainConfig(ranks=2, node_labels={"pool": "cpu"}))
    assert "learner rank: 2 are asked for, each with 1 CPUs and 1 GPUs of one node" in sentence
    assert "with {'pool': 'cpu'} have room for 0" in sentence and "train.node_labels" in sentence


def test_an_engine_is_never_spread_over_nodes():
    """Eight GPUs are there, four on each node; the two that Ray would have to take from another node do not help."""
    [sentence] = lacks(engine=EngineConfig(tensor_parallel_size=6), train=TrainConfig(ranks=1))
    assert "engine: 1 are asked for, each with 1 CPUs and 6 GPUs of one node" in sentence and "room for 0" in sentence


def test_labels_are_for_a_cluster():
    [sentence] = lacks(Machine((Node(8, 2),), local=True), grade=GradeConfig(graders=[], node_labels={"pool": "cpu"}))
    assert "grade.node_labels" in sentence and "RAY_ADDRESS" in sentence


def test_actors_land_where_the_config_says(tmp_path):
    """On three nodes: engines of two GPUs each, learner ranks, a scorer and graders, each kind on nodes of its own."""
    model = save_model(tiny_model(), tmp_path / "model")
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a", "answer": "b"}) + "\n")
    config = {
        "run": {"name": "placed", "dir": str(tmp_path)},
        "model": {"path": str(model)},
        "data": {"train_files": ["p.jsonl"]},
        "engine": {
            "count": 2,
            "tensor_parallel_size": 2,
            "weight_transfer": "object_store",
            "node_labels": {"pool": "engines"},
        },
        "algorithm": {"kl_coef": 0.01},
        "scorer": {"num_gpus": 0, "node_labels": {"pool": "in(learners, others)"}},
        "train": {"ranks": 2, "gpus_per_rank": 0, "node_labels": {"pool": "learners"}},
        "grade": {
            "graders": [{"path": f"{TESTS / 'toy_graders.py'}:LetterGrader"}],
            "workers": "2",
            "processes": 1,
            "node_labels": {"pool": "!in(engines, learners)"},
        },
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    command = [sys.executable, TESTS / "placement_cluster.py", tmp_path / "config.yaml", tmp_path / "train"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {
        "lacks": [],
        "placed": {
            "VLLMEngine": ["engines"] * 2,
            "Scorer": ["learners"],
            "GraderHost": ["cpu"] * 2,
            "RayTrainWorker": ["learners"] * 2,
            "WeightStore": [found["driver"]],
        },
        "driver": found["driver"],
    }
