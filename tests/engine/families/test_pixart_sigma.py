"""What is particular to PixArt-Sigma: its class's older name, LoRAs in peft's own format, masks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from engine.exports.readback import DamagedError
from engine.exports.stock import PEFT_PREFIX, check_lora
from engine.model.adapters import lora
from engine.model.files import weights
from engine.model.meta_device import parameters_on_meta
from engine.toy.components.weights import one_thread
from jobs.errors import SpecError
from jobs.models.model_config import find_target
from jobs.preflight.check_job import check_model
from tests.support.engine.exports import export_alone, recipe_of, trained_model
from tests.support.engine.families import PROMPT, Case, quiet

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from jobs.spec.job_spec import JobSpec

LORA = {"model_type": "lora", "lora_rank": 4, "lora_alpha": 6}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("pixart_sigma", tmp_path_factory.getbasetemp().parent / "families")


def test_a_model_of_the_published_class_name_is_recognised(case: Case) -> None:
    root, family = case.paths.model, case.family
    config = json.loads((root / "transformer" / "config.json").read_text())
    assert config["_class_name"] == "Transformer2DModel", "as published"
    assert check_model(case.spec()) == root
    found = find_target("pixart_sigma", pretrained_model=str(root))
    assert found.config["_class_name"] == "PixArtTransformer2DModel"
    with quiet():
        model, stored = weights.build_on_meta(
            family.transformer_class(), root / "transformer", case.spec()
        )
    assert type(model).__name__ == "PixArtTransformer2DModel"
    assert len(stored) == len(model.state_dict())


def test_another_family_is_told_which_it_is(case: Case) -> None:
    with pytest.raises(SpecError, match="set model_family: pixart_sigma"):
        find_target("flux", pretrained_model=str(case.paths.model))


@torch.no_grad()
def test_what_the_mask_hides_has_no_effect(case: Case) -> None:
    transformer = case.stock().transformer
    noisy = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    text = {name: tensor[None] for name, tensor in case.encoded(PROMPT).items()}
    other = {**text, "prompt_embeds": text["prompt_embeds"].clone()}
    hidden = text["prompt_attention_mask"] == 0
    assert hidden.any()
    other["prompt_embeds"][hidden] = 3.0
    found = [
        case.family.predict(transformer, noisy, torch.tensor([500]), condition, 1.0)
        for condition in (text, other)
    ]
    assert torch.allclose(*found, atol=1e-6)


def forward(transformer: Any, case: Case) -> torch.Tensor:
    noisy = torch.randn(1, 4, 8, 12, generator=torch.Generator().manual_seed(1))
    text = {name: tensor[None] for name, tensor in case.encoded(PROMPT).items()}
    with torch.no_grad():
        return case.family.predict(transformer.eval(), noisy, torch.tensor([500]), text, 1.0)


def job(case: Case, **changes: Any) -> JobSpec:
    return case.spec(**LORA | changes)


@pytest.mark.parametrize("targets", [None, ["to_q", "to_v", "proj"]], ids=["ours", "named"])
def test_a_lora_is_exported_as_peft_loads_it(
    case: Case, targets: list[str] | None, tmp_path: Path
) -> None:
    spec = job(case, lora_target_modules=targets)
    with quiet():
        model = trained_model(spec, case.paths.model)
        exported = export_alone(model, recipe_of(spec, case.paths.model), tmp_path / "export")
    names = {path.name for path in exported.path.iterdir() if not path.name.startswith(".")}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names
    assert "pytorch_lora_weights.safetensors" not in names
    config = json.loads((exported.path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 4, "LORA")
    transformer = case.stock().transformer
    bare = forward(transformer, case)
    PeftModel.from_pretrained(transformer, exported.path)
    # Peft adds the adapter's product after it was rounded, our layer while it is summed up.
    torch.testing.assert_close(forward(transformer, case), forward(model, case))
    assert not torch.allclose(bare, forward(model, case), atol=1e-2)


def test_a_lora_that_peft_would_read_differently_is_refused(case: Case, tmp_path: Path) -> None:
    spec = job(case)
    recipe = recipe_of(spec, case.paths.model)
    with quiet():
        model = trained_model(spec, case.paths.model)
        exported = export_alone(model, recipe, tmp_path / "export").path
    file = exported / "adapter_model.safetensors"
    good = {n.removeprefix(PEFT_PREFIX): t for n, t in load_file(file).items()}
    first = next(iter(good))

    def check() -> None:
        with quiet(), parameters_on_meta():
            bare = case.family.transformer_class().from_config(
                case.family.transformer_class().load_config(case.paths.model / "transformer")
            )
        check_lora(recipe, file, good, lora.scales_of(model), bare)

    check()
    save_file({PEFT_PREFIX + n: t + (n == first) for n, t in good.items()}, file)
    with pytest.raises(DamagedError, match=r"peft reads .* differently"):
        check()
    save_file({PEFT_PREFIX + n: t for n, t in good.items()}, file)
    config = exported / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 4', '"lora_alpha": 7'))
    with pytest.raises(DamagedError, match="peft scales the adapter"):
        check()
    config.unlink()
    with pytest.raises(DamagedError, match="peft does not load"):
        check()
