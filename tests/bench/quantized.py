"""`python tests/bench/quantized.py`: what a packed base costs in accuracy.

The first table has the relative error of a forward of each family's toy, and of its adapter's
gradients, against the same toy in fp32: in bf16 without packing, and packed with each scheme. Toys
are drawn as wide-tailed as trained models: Student's t with 5 degrees of freedom, rows of
log-normal size (sd 0.5), and one column in 64 five times as large. With `--steps`, a second
table: the loss of a LoRA on FLUX.1's toy over a run, mean of each tenth, for each scheme.
`scaled` is `base_matmul: scaled`; all others dequantize.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from safetensors.torch import load_file, save_file

from engine.model.adapters import lora
from engine.model.base_matmul import set_scaled
from engine.model.files import weights
from engine.model.precision import compute_dtype, narrow_inputs
from engine.model.quantized_linear import quantize_layers
from engine.ranks.telemetry import Telemetry
from engine.ranks.world import start_world
from engine.run_job import run_job
from jobs.run.eventlog import EventLog
from jobs.run.rundir import RunDir
from jobs.spec.families import FAMILIES
from jobs.spec.file.load import load_spec
from tests.support.engine.families import PROMPT, Case, batch_of, quiet
from tests.support.engine.toy_jobs import toy_values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.spec.job_spec import JobSpec


def scheme(packing: str, modulation: str = "none", matmul: str = "dequantize") -> dict[str, str]:
    return {
        "base_precision": packing,
        "modulation_precision": modulation,
        "base_matmul": matmul,
    }


# What is packed and, after "+", modulation, where it is packed too.
SCHEMES: Final = {
    **{name: scheme(name) for name in ("none", "int8", "fp8_scaled", "fp8", "nf4")},
    "fp8_scaled, scaled": scheme("fp8_scaled", matmul="scaled"),
    "int8 + int8": scheme("int8", "int8"),
    "nf4 + int8": scheme("nf4", "int8"),
    "nf4 + nf4": scheme("nf4", "nf4"),
}
CPU: Final = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), choices=SCHEMES)
    parser.add_argument(
        "--modulation",
        type=float,
        default=1.0,
        help="factor on the weights of modulation, which are weak in toys; 5 makes its shifts and "
        "scales depend on the level as much as on its biases",
    )
    parser.add_argument("--steps", type=int, default=0, help="of the run; 0: none")
    asked = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="bench-quantized-") as scratch:
        print(f"{'family':14}" + "".join(f"{name:>22}" for name in asked.schemes))
        print(f"{'':14}" + f"{'forward':>12}{'gradients':>10}" * len(asked.schemes), flush=True)
        for family in asked.families:
            case = Case(family, Path(scratch))
            redraw(case, asked.modulation)
            print(f"{family:14}" + row(case, asked.schemes), flush=True)
        if asked.steps:
            print(f"\n{'loss of steps':14}" + "".join(f"{name:>12}" for name in asked.schemes))
            case = Case("flux", Path(scratch))
            redraw(case, asked.modulation)
            columns = [losses(case, Path(scratch), one, asked.steps) for one in asked.schemes]
            tenth, worst = max(1, asked.steps // 10), 0.0
            for first in range(0, asked.steps, tenth):
                means = [fmean(column[first : first + tenth]) for column in columns]
                label = f"{first + 1} to {min(first + tenth, asked.steps)}"
                print(f"{label:14}" + "".join(f"{mean:12.5f}" for mean in means))
                worst = max([worst, *(abs(mean / means[0] - 1) for mean in means)])
            print(f"largest difference from bf16: {worst:.2%}")


def row(case: Case, schemes: Sequence[str]) -> str:
    exact = run(case, case.spec(lora_rank=4))
    cells = []
    for name in schemes:
        found = run(case, case.spec(lora_rank=4, mixed_precision="bf16", **SCHEMES[name]))
        errors = (error(mine, true) for mine, true in zip(found, exact, strict=True))
        cells.append("{:12.2%}{:10.2%}".format(*errors))
    return "".join(cells)


def redraw(case: Case, modulation: float = 1.0) -> None:
    """Draw the weights of the toy's linear layers again, as trained ones are spread.

    Args:
        case: The toy; what it was is lost.
        modulation: A factor on weights that modulate.
    """
    (file,) = (case.paths.model / case.family.component).glob("*.safetensors")
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(5)
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and min(tensor.shape) > 4:
            size = tensor.std()
            normal = torch.randn(tensor.shape, generator=generator)
            chi = torch.randn(5, *tensor.shape, generator=generator).square().mean(0)
            drawn = normal / chi.sqrt()
            drawn *= (torch.randn(len(tensor), 1, generator=generator) * 0.5).exp()
            drawn[:, ::64] *= 5
            size *= modulation if re.search(case.family.MODULATION, name) else 1
            tensors[name] = (drawn / drawn.std() * size).contiguous()
    save_file(tensors, file, {"format": "pt"})


def run(case: Case, spec: JobSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """A prediction of two samples, and all gradients of the adapter in a row."""
    denoiser: Any
    directory = case.paths.model / case.family.component
    with quiet():
        denoiser, stored = weights.build_on_meta(case.family.transformer_class(), directory, spec)
    quantize_layers(denoiser, spec, case.family)
    set_scaled(denoiser, scaled=spec.base_matmul == "scaled")
    lora.add_lora(denoiser, spec, case.family.LORA_TARGETS)
    weights.materialise(denoiser, CPU)
    weights.stream(denoiser, stored, names=lora.adapted_name(denoiser).__getitem__)
    lora.initialise(denoiser, spec.seed)
    with torch.no_grad():
        for name, parameter in lora.lora_parameters(denoiser).items():
            if ".lora_B." in name:
                parameter.fill_(0.01)
    dtype = compute_dtype(spec)
    narrow_inputs(denoiser.train(), dtype)
    vae = case.family.load_vae(case.paths.model, torch.float32).eval()
    pixels = torch.zeros(1, 3, case.side, case.side)
    if case.frames > 1:
        pixels = pixels.unsqueeze(2).expand(-1, -1, case.frames, -1, -1)
    shape = case.family.encode_pictures(vae, pixels).shape[1:]
    noisy = torch.randn(2, *shape, generator=torch.Generator().manual_seed(3))
    denoises = case.family.facts.objective == "denoising"
    levels = torch.tensor([300, 800]) if denoises else torch.tensor([0.3, 0.8])
    texts = case.family.arrange(batch_of(case.encoded(PROMPT), case.encoded("a star")))
    texts = {n: t.to(dtype) if t.is_floating_point() else t for n, t in texts.items()}
    said = case.family.predict(denoiser, noisy, levels, texts, 2.0)
    torch.autograd.backward(said.float().square().mean())
    parts = [p.grad.flatten() for p in denoiser.parameters() if p.grad is not None]
    return said.detach().float(), torch.cat(parts).float()


def error(found: torch.Tensor, true: torch.Tensor) -> float:
    return float((found - true).norm() / true.norm())


def losses(case: Case, scratch: Path, scheme: str, steps: int) -> list[float]:
    """Of a run on one rank."""
    run_dir = RunDir(scratch / f"run-{scheme}")
    run_dir.create()
    toy = {"pretrained_model_name_or_path": str(case.paths.model), "dataset": str(case.paths.data)}
    values = toy_values(scratch) | toy
    values |= {
        "mixed_precision": "bf16",
        **SCHEMES[scheme],
        "max_train_steps": steps,
        "train_batch_size": 4,
        "learning_rate": 1e-3,
        "lora_rank": 16,
        "checkpointing_steps": 0,
        "cache_dir": str(scratch / "cache"),
    }
    spec = load_spec(None, values)
    with redirect_stdout(io.StringIO()):
        telemetry = Telemetry(run_dir, 0)
        run_job(spec, run_dir, start_world(spec), telemetry)
        telemetry.close()
    return [step.loss for step in EventLog(run_dir.root / "events.jsonl").read_all().steps]


if __name__ == "__main__":
    main()
