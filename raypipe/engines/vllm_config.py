"""What raypipe's config means to vLLM: environment, engine arguments, sampling parameters, way of the weights.

In: the run's config and one request. Out: vLLM's own settings. vLLM is imported only where its types are made, after
`set_environment`, since it reads its environment on import.
"""

import os
from typing import TYPE_CHECKING, Any

import torch

from raypipe.config import Config, RolloutConfig, heldout_response_length
from raypipe.engines.lifetime import ENGINE_PID

if TYPE_CHECKING:
    from vllm import SamplingParams


def weight_transfer(config: Config, gpus: bool) -> str:
    """How weights travel: by NCCL where learner ranks and engines have whole GPUs, else through the object store.

    NCCL refuses two members on one GPU, so it cannot serve an engine that shares the learner's.
    """
    if config.engine.weight_transfer != "auto":
        return config.engine.weight_transfer
    whole = all(share < 0 or share >= 1 for share in (config.engine.num_gpus, config.train.gpus_per_rank))
    return "nccl" if gpus and whole and not config.pipeline.colocate else "object_store"


def set_environment(config: Config) -> None:
    """Environment of vLLM's processes, which inherit it; to be called before vllm is imported."""
    os.environ[ENGINE_PID] = str(os.getpid())
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its warnings on a normal start would fill the screen
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")
    if torch.cuda.is_available():
        return
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would override engine.kv_cache_gib
    # The model runs in the EngineCore itself, not in a process below: one vLLM start and one hop per step fewer.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # Eager vLLM still compiles its sampler, for 20 s, to save nothing at these sizes.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    # Engines, graders and learner share the cores: no binding to cores, and no spinning, which where threads outnumber
    # free cores costs a factor of 10.
    os.environ["OMP_NUM_THREADS"] = str(max(1, int(config.engine.num_cpus)))
    os.environ["OMP_WAIT_POLICY"] = "passive"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"


# Prompt tokens that an engine on CPU reads in one step.
CPU_BATCHED_TOKENS = 4096
# Tokens of a block of an engine's cache on CPU. vLLM's 128 are longer than many prompts, of which only whole blocks are
# computed once for all samples; it wants a multiple of 32.
CPU_BLOCK_TOKENS = 32


def engine_args(config: Config, object_store: bool) -> dict[str, Any]:
    """vLLM's arguments for this run."""
    engine, gpu = config.engine, torch.cuda.is_available()
    dtype = next((d for d in (engine.dtype, config.model.dtype) if d != "auto"), "bfloat16" if gpu else "float32")
    response = max(config.rollout.max_response_length, heldout_response_length(config))
    longest = config.data.max_prompt_length + response
    device: dict[str, Any] = {
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "enable_sleep_mode": config.pipeline.colocate,
    }
    if not gpu:
        device = {
            "kv_cache_memory_bytes": int(engine.kv_cache_gib * 2**30),
            # vLLM 0.32 rewinds the generator of a seeded request whose prompt is read in parts, which the CPU's
            # generator cannot do: the engine would die. Whole prompts, then.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(longest, CPU_BATCHED_TOKENS),
            "block_size": CPU_BLOCK_TOKENS,
        }
    return device | {
        "model": config.model.path,
        "dtype": dtype,
        "max_model_len": longest,
        "max_num_seqs": engine.max_num_seqs,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "distributed_executor_backend": "mp" if engine.tensor_parallel_size > 1 else "uni",
        "enforce_eager": engine.enforce_eager or not gpu,
        "enable_prefix_caching": True,
        # Log-probs of the distribution that was sampled from: after temperature, and renormalised over what top_p left.
        "logprobs_mode": "processed_logprobs",
        "trust_remote_code": False,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "weight_transfer_config": {"backend": "object_store" if object_store else "nccl"},
        "worker_extension_cls": "raypipe.engines.weight_receiver.Worker",
    }


def sampling_params(request: dict[str, Any], rollout: RolloutConfig) -> "SamplingParams":
    """One sample with the log-prob of each of its tokens; what the request leaves out is taken from `rollout`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    stop = list(request.get("stop", rollout.stop))
    return SamplingParams(
        temperature=request.get("temperature", rollout.temperature),
        top_p=request.get("top_p", rollout.top_p),
        max_tokens=request.get("max_tokens", rollout.max_response_length),
        seed=request["seed"],
        stop=stop,
        include_stop_str_in_output=True,
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        # Stop strings need the text after every token, a fifth of the time at small models; else it is made at the end.
        detokenize=bool(stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
