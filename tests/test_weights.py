"""Packing, loading, and the gather from FSDP shards, without Ray: real processes over gloo."""

import json
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tiny_models import perturbed, tiny_model
from torch.distributed.fsdp import fully_shard

from raypipe import weights
from raypipe.config import Config, EngineConfig, TrainConfig
from raypipe.engines.vllm_config import weight_transfer
from raypipe.weights import ALIGNMENT, WeightPublisher, iterate_full_parameters, load_bucket, pack, unpack


def test_pack_and_unpack_give_back_every_tensor():
    tensors = {
        "matrix": torch.randn(5, 7),
        "transposed": torch.randn(6, 3).T,
        "scalar": torch.tensor(2.5),
        "half": torch.randn(9).bfloat16(),
        "int": torch.arange(11),
    }
    for bucket_bytes in (1, 100, 10_000):
        got = dict(item for bucket in pack(tensors.items(), torch.float32, bucket_bytes) for item in unpack(bucket))
        assert list(got) == list(tensors)
        for name, tensor in tensors.items():
            want = tensor.float() if tensor.is_floating_point() else tensor
            assert got[name].dtype == want.dtype and torch.equal(got[name], want), name


def test_buckets_are_full_but_not_over_and_a_larger_tensor_travels_alone():
    # 100 float32 = 400 bytes, placed at multiples of 64: offsets 0 and 448, end 848; a third would end at 1296.
    tensors = [(f"t{i}", torch.full((100,), float(i))) for i in range(4)] + [("big", torch.zeros(1000))]
    buckets = list(pack(tensors, torch.float32, bucket_bytes=1000))
    assert [[entry[0] for entry in json.loads(bucket.metadata)] for bucket in buckets] == [
        ["t0", "t1"],
        ["t2", "t3"],
        ["big"],
    ]
    assert [bucket.data.nbytes for bucket in buckets] == [848, 848, 4000]
    offsets = [entry[3] for bucket in buckets for entry in json.loads(bucket.metadata)]
    assert offsets == [0, 448, 0, 448, 0] and all(offset % ALIGNMENT == 0 for offset in offsets)


def test_floating_point_is_cast_to_the_wire_dtype():
    (bucket,) = pack([("w", torch.tensor([1.0, 1 / 3]))], torch.bfloat16)
    assert json.loads(bucket.metadata) == [["w", "bfloat16", [2], 0]] and bucket.data.nbytes == 4
    assert torch.equal(dict(unpack(bucket))["w"], torch.tensor([1.0, 1 / 3]).bfloat16())


def test_load_bucket_makes_a_model_equal():
    source, target = tiny_model(seed=1), tiny_model(seed=2)
    for bucket in pack(iterate_full_parameters(source), torch.float32, 20_000):
        # Read-only, as Ray's object store hands it out.
        bucket.data.setflags(write=False)
        load_bucket(target, bucket)
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))


@pytest.mark.parametrize(
    "name, tensor, message",
    [
        ("no.such", torch.zeros(2), "holds no.such, which LlamaForCausalLM does not have"),
        ("model.norm.weight", torch.zeros(3), r"model.norm.weight with shape \[3\], but .* has it with \[64\]"),
    ],
)
def test_load_bucket_refuses_what_does_not_fit(name, tensor, message):
    (bucket,) = pack([(name, tensor)], torch.float32)
    with pytest.raises(ValueError, match=message):
        load_bucket(tiny_model(), bucket)


def test_nccl_needs_whole_gpus_at_both_ends():
    def chosen(gpus: bool, engine: float, learner: float, asked: str = "auto") -> str:
        config = Config(
            engine=EngineConfig(weight_transfer=asked, num_gpus=engine), train=TrainConfig(gpus_per_rank=learner)
        )
        return weight_transfer(config, gpus)

    assert chosen(False, -1, -1) == "object_store"
    assert chosen(True, -1, -1) == chosen(True, 2, 1) == "nccl"
    assert chosen(True, 0.5, 0.5) == chosen(True, -1, 0) == "object_store"
    assert chosen(True, -1, -1, "object_store") == "object_store" and chosen(True, 0.5, 0.5, "nccl") == "nccl"


# -- FSDP --------------------------------------------------------------------------------------------------------------


# A collective that a rank never joins fails the test instead of hanging it.
MINUTE = timedelta(minutes=1)


def spawn(function, world: int, folder) -> list:
    """Runs function(rank) on `world` gloo ranks; returns what each returned."""
    mp.start_processes(_rank, args=(function, world, str(folder)), nprocs=world, start_method="fork")
    return [torch.load(folder / f"out{rank}.pt") for rank in range(world)]


def _rank(rank: int, function, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world, timeout=MINUTE
    )
    torch.save(function(rank), f"{folder}/out{rank}.pt")
    dist.destroy_process_group()


def sharded(tied: bool):
    model = perturbed(tiny_model("qwen2", tied=tied))
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def gather_tied(rank: int) -> dict:
    return dict(iterate_full_parameters(sharded(tied=True)))


def gather_untied(rank: int) -> dict:
    return dict(iterate_full_parameters(sharded(tied=False)))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_fsdp_gather_gives_the_full_parameters_on_every_rank(tmp_path, world, tied):
    whole = perturbed(tiny_model("qwen2", tied=tied))
    for got in spawn(gather_tied if tied else gather_untied, world, tmp_path):
        assert ("lm_head.weight" in got) is not tied
        want = dict(whole.named_parameters())
        assert list(got) == list(want)
        assert all(torch.equal(got[name], want[name]) for name in want)


def publish_and_fail(rank: int) -> str:
    """Rank 0's send fails after one parameter, in the middle of the others' gathers."""

    def send(self, model, parameters, version, engines, in_flight):
        next(parameters)
        raise RuntimeError("engine-1: out of memory")

    weights.Engines = lambda handles: None
    WeightPublisher._send = send
    try:
        WeightPublisher().publish(sharded(tied=True), 7, [])
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_failed_send_raises_on_all_ranks_and_hangs_none(tmp_path):
    assert spawn(publish_and_fail, 2, tmp_path) == ["weight update 7 failed: engine-1: out of memory"] * 2
