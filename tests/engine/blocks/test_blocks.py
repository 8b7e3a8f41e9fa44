"""Block detection: what is counted in a model, what is recommended, and that wrapping agrees."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import diffusers
import pytest
import torch
import transformers
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from engine.blocks.build import CannotBuildError, build, on_meta
from engine.blocks.detection import report
from engine.parallel import sharding
from jobs.models.parts import Parts
from tests.support.engine.block_table import BLOCKS, NOT_BUILT, PUBLISHED
from tests.support.engine.toy_jobs import toy_spec

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SDXL: dict[str, Any] = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "attention_head_dim": [5, 10, 20],
    "block_out_channels": [320, 640, 1280],
    "cross_attention_dim": 2048,
    "projection_class_embeddings_input_dim": 2816,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "transformer_layers_per_block": [1, 2, 10],
    "use_linear_projection": True,
}


class Feed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.feed = Feed(width)
        self.norm = nn.LayerNorm(width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.feed(self.norm(hidden))


class WideBlock(Block):
    """Wrapped wherever a `Block` is, since it is one."""

    def __init__(self) -> None:
        super().__init__(8)


class Stage(nn.Module):
    """Blocks, and something beside them."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.rest = nn.Linear(2, 2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class Model(nn.Module):
    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([Block(), Block(), WideBlock()])
        self.again = self.blocks[0]  # a module in two places
        self.head = nn.Linear(4, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight  # a parameter in two modules
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("table", torch.zeros(100))


def found_in(model: nn.Module) -> tuple[dict[str, dict[str, Any]], Parts]:
    said = json.loads(json.dumps(report(model)))
    return {one["class_name"]: one for one in said["classes"]}, Parts.from_dict(said["parts"])


def recommended(model: nn.Module) -> set[str]:
    return {name for name, one in found_in(model)[0].items() if one["recommended"]}


def built(name: str, **config: Any) -> nn.Module:
    with on_meta():
        model: nn.Module = getattr(diffusers, name)(**config)
        return model


def test_shared_and_frozen_parameters_count_once_and_buffers_do_not() -> None:
    model = Model()
    classes, parts = found_in(model)
    assert parts.total() == sum(p.numel() for p in model.parameters()) == 20 + 3 + 2 * 72 + 272
    block = classes["Block"]
    assert (block["count"], block["params_each"], block["params_total"]) == (2, 72, 144)
    assert block["sample_paths"] == ["blocks.0", "blocks.1"]
    linear = classes["Linear"]  # six in blocks; the head's weight is the embedding's
    assert (linear["count"], linear["params_total"]) == (7, 2 * 64 + 256 + 20)
    assert linear["params_each"] == 128  # of the largest
    assert len(linear["sample_paths"]) == 3


def test_what_is_recommended_is_outermost_and_listed_first() -> None:
    said = report(Model())
    assert [one["class_name"] for one in said["classes"] if one["recommended"]] == ["Block"]
    assert said["classes"][0]["class_name"] == "Block"
    assert "ModuleList" not in {one["class_name"] for one in said["classes"]}
    assert "ModuleList" in said["parts"]["containers"]


def test_a_model_without_parameters_or_lists_has_nothing_to_wrap() -> None:
    assert recommended(nn.Sequential()) == set()
    assert recommended(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == set()


@pytest.mark.parametrize(("stages", "blocks", "unit"), [(3, 4, "Block"), (20, 2, "Stage")])
def test_what_holds_blocks_is_a_unit_only_while_it_is_small(
    stages: int, blocks: int, unit: str
) -> None:
    model = nn.Module()
    model.stages = nn.ModuleList(Stage(blocks) for _ in range(stages))
    assert recommended(model) == {unit}


def test_two_classes_of_one_name_are_told_apart() -> None:
    """Only the first met can be named: accelerate's policy finds no other."""
    other = type("Block", (nn.Module,), {"__init__": lambda self: nn.Module.__init__(self)})
    model = nn.Module()
    model.blocks = nn.ModuleList([Block(), Block()])
    model.others = nn.ModuleList([other(), other()])
    for one in model.others:
        one.weight = nn.Parameter(torch.zeros(7))
    assert found_in(model)[0]["Block"]["params_total"] == 144
    assert found_in(model)[1].coverage(["Block"]).units == 2


CHOICES = [
    ["Block"],
    ["WideBlock"],
    ["Feed"],
    ["Block", "Feed"],
    ["Linear"],
    ["Block", "Linear"],
    ["WideBlock", "Feed", "LayerNorm"],
    ["Embedding"],
]


def wrapped_by_the_engine(
    model: nn.Module, toy: Path, names: Sequence[str]
) -> tuple[int, int, int]:
    """Units, parameters of the largest, and of the root, of what `shard` would wrap."""
    spec = toy_spec(
        toy, num_processes=2, strategy="fsdp2", fsdp_transformer_layer_cls_to_wrap=names
    )
    plugin = sharding.build_plugin(spec, torch.device("cpu"))
    taken: set[nn.Parameter] = set()
    sizes = []
    units = sharding.modules_to_wrap(model, spec, plugin)
    for module in units:
        own = set(module.parameters()) - taken
        sizes.append(sum(parameter.numel() for parameter in own))
        taken |= own
    total = sum(parameter.numel() for parameter in model.parameters())
    return len(units), max(sizes), total - sum(p.numel() for p in taken)


@pytest.mark.parametrize("names", CHOICES, ids="+".join)
def test_coverage_is_what_sharding_wraps(names: list[str], toy: Path) -> None:
    model = Model(tied=False)
    does = found_in(model)[1].coverage(names)
    assert (does.units, does.largest, does.root) == wrapped_by_the_engine(model, toy, names)
    assert does.unknown == ()


@pytest.mark.parametrize(
    "names",
    [
        ["FluxTransformerBlock", "FluxSingleTransformerBlock"],
        ["FluxTransformerBlock", "FeedForward"],
        ["FluxAttention"],
        ["FluxTransformerBlock", "FluxAttention", "Linear"],
    ],
    ids="+".join,
)
def test_coverage_of_the_toy_is_what_sharding_wraps(names: list[str], toy: Path) -> None:
    config = json.loads((toy / "model/transformer/config.json").read_text())
    model = build(config, toy / "model/transformer")
    does = found_in(model)[1].coverage(names)
    units, largest, root = wrapped_by_the_engine(model, toy, names)
    assert (does.units, does.largest, does.root) == (units, largest, root)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert does.share == pytest.approx(1 - root / total)


@pytest.mark.parametrize("part", ["transformer", "text_encoder", "text_encoder_2", "vae"])
def test_totals_of_the_toy_are_those_of_a_real_one(part: str, toy: Path) -> None:
    directory = toy / "model" / part
    config = json.loads((directory / "config.json").read_text())
    library = diffusers if "_class_name" in config else transformers
    name = config.get("_class_name") or config["architectures"][0]
    real = getattr(library, name).from_pretrained(directory)
    classes, parts = found_in(build(config, directory))
    assert parts.total() == sum(parameter.numel() for parameter in real.parameters())
    for name, one in classes.items():
        kind = next(type(m) for m in real.modules() if type(m).__name__ == name)
        modules = [m for m in real.modules() if type(m) is kind and m is not real]
        assert one["count"] == len(modules), name
        held = {parameter for module in modules for parameter in module.parameters()}
        assert one["params_total"] == sum(parameter.numel() for parameter in held), name


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_the_repeated_blocks_of_every_denoiser_are_recommended(name: str) -> None:
    if not hasattr(diffusers, name):
        pytest.skip(f"this diffusers has no {name}")
    model = built(name)
    classes, parts = found_in(model)
    chosen = [one for one, facts in classes.items() if facts["recommended"]]
    assert set(chosen) == set(BLOCKS[name].split())
    does = parts.coverage(chosen)
    assert does.nested == ()
    assert does.share > 0.9
    assert does.largest < 0.1 * parts.total()
    assert parts.total() == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_the_repeated_blocks_of_published_denoisers_are_recommended(name: str) -> None:
    if not hasattr(diffusers, name):
        pytest.skip(f"this diffusers has no {name}")
    config, blocks = PUBLISHED[name]
    assert recommended(built(name, **config)) == set(blocks.split())


def test_the_table_names_every_denoiser_of_this_diffusers() -> None:
    """Classes that only a newer diffusers has are looked at all the same, by their properties."""
    words = ("Transformer", "UNet", "UVit", "PriorT")
    exported = {
        name
        for name in dir(diffusers)
        if any(word in name for word in words)
        and inspect.isclass(found := getattr(diffusers, name))
        and issubclass(found, ModelMixin)
    }
    for name in exported - BLOCKS.keys() - PUBLISHED.keys() - NOT_BUILT.keys():
        classes, parts = found_in(built(name))
        does = parts.coverage([one for one, facts in classes.items() if facts["recommended"]])
        assert does.share > 0.9, name


@pytest.mark.parametrize("name", sorted(NOT_BUILT))
def test_what_the_table_says_is_not_built_is_not(name: str) -> None:
    if not hasattr(diffusers, name):
        pytest.skip(f"this diffusers has no {name}")
    with pytest.raises((TypeError, ValueError)):
        built(name)


def test_the_stages_of_a_unet_are_too_large_to_be_units() -> None:
    """What SDXL's own `_no_split_modules` names has a unit of 1.2 B parameters."""
    model = built("UNet2DConditionModel", **SDXL)
    classes, parts = found_in(model)
    assert recommended(model) == {"BasicTransformerBlock", "ResnetBlock2D"}
    does = parts.coverage(["BasicTransformerBlock", "ResnetBlock2D"])
    assert does.share > 0.95
    assert does.largest < 0.02 * parts.total()
    assert classes["CrossAttnUpBlock2D"]["params_each"] > 1e9
    assert classes["CrossAttnUpBlock2D"]["in_no_split_modules"]


def test_the_layers_of_text_encoders_are_recommended() -> None:
    configs: dict[str, tuple[Any, set[str]]] = {
        "T5EncoderModel": (transformers.T5Config(num_layers=24), {"T5Block"}),
        "CLIPTextModel": (transformers.CLIPTextConfig(), {"CLIPEncoderLayer"}),
        "LlamaModel": (transformers.LlamaConfig(), {"LlamaDecoderLayer"}),
    }
    for name, (config, blocks) in configs.items():
        with on_meta():
            model = getattr(transformers, name)(config)
        assert recommended(model) == blocks
        total = sum(parameter.numel() for parameter in model.parameters())
        assert found_in(model)[1].total() == total


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"_class_name": "NoSuchModel"}, "has no model class NoSuchModel"),
        ({"_class_name": "FluxPipeline"}, "has no model class FluxPipeline"),
        ({"_class_name": "FluxTransformer2DModel", "num_layers": "many"}, "cannot be built"),
        ({"model_type": "no-such-type"}, "no-such-type cannot be built"),
    ],
)
def test_a_config_that_builds_nothing_is_told(
    config: dict[str, Any], told: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CannotBuildError, match=told):
        build(config, tmp_path)


# -- as a process --------------------------------------------------------------------------


def look(config: dict[str, Any], folder: Path) -> subprocess.CompletedProcess[str]:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return subprocess.run(
        [sys.executable, "-m", "engine.blocks", str(path)],
        env=os.environ | {"PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_a_process_says_what_a_whole_import_finds(toy: Path, tmp_path: Path) -> None:
    config = json.loads((toy / "model/transformer/config.json").read_text())
    done = look(config, tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == report(build(config, tmp_path))
    assert "step 3 3" in done.stderr


@pytest.mark.slow
def test_a_lean_process_imports_no_compiler_and_no_other_library_of_models(toy: Path) -> None:
    """Each of them would take more memory and time than looking at the model does."""
    script = (
        "import runpy, sys\n"
        f"sys.argv = ['engine.blocks', {str(toy / 'model/transformer/config.json')!r}]\n"
        "try: runpy.run_module('engine.blocks', run_name='__main__')\n"
        "except SystemExit: print(*(n for n in sys.modules if sys.modules[n]), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    loaded = set(done.stderr.splitlines()[-1].split())
    assert {"torch", "diffusers.models.modeling_utils"} <= loaded
    assert loaded.isdisjoint(
        {"sympy", "torch._inductor", "torch._dynamo.eval_frame", "transformers", "peft", "torchao"}
    )


@pytest.mark.slow
def test_what_a_lean_process_cannot_build_is_built_by_a_whole_one(tmp_path: Path) -> None:
    """This UNet stands beside a pipeline, which needs transformers."""
    done = look({"_class_name": "AudioLDM2UNet2DConditionModel"}, tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model_class"] == "AudioLDM2UNet2DConditionModel"
    assert done.stderr.count("step 0 3") == 2
    assert "Traceback" not in done.stderr


def test_a_process_complains_in_one_line(tmp_path: Path) -> None:
    done = look({"_class_name": "NoSuchModel"}, tmp_path)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("fsdp-tui: diffusers")
    assert "has no model class NoSuchModel" in last
    assert done.stdout == ""
    assert done.stderr.count("step 0 3") == 1, "nor is it tried again"
