"""Text encoders: sharded they compute the same, each rank reads its rows, and nothing is left."""

from __future__ import annotations

import json
import shutil
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.families import load
from engine.model import text_encoders
from engine.model.packing import Packing
from engine.model.release import STILL_HELD, Watch
from engine.model.text_encoders import (
    agree_on_sharding,
    encoder_bytes,
    encoder_names,
    load_whole,
    shards_encoders,
)
from engine.ranks.team import FileBarrier
from engine.ranks.world import World
from jobs.errors import UserError
from jobs.run.rundir import RunDir
from tests.support.engine.ranks.text_encoder import DEFAULT_TIMEOUT, SLEEP, WIDE, on_rank
from tests.support.engine.toy_jobs import start_ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CPU = torch.device("cpu")
FILE = "model.safetensors"
# Of any language model here.
SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}
T5: dict[str, Any] = {"vocab_size": 99, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 3}
VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48}


def tiny_encoders() -> dict[str, torch.nn.Module]:
    """By case: small random models of the classes that pipelines have for text encoders."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    qwen_vl = transformers.Qwen2_5_VLConfig(
        text_config={**GROUPED, "rope_parameters": rope, "rope_scaling": rope},
        vision_config={**VISION, "depth": 2, "num_heads": 2, "out_hidden_size": 64},
    )
    mistral = transformers.Mistral3Config(
        text_config={**GROUPED, "model_type": "mistral"},
        vision_config={
            **VISION,
            "model_type": "pixtral",
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "head_dim": 16,
            "image_size": 56,
        },
    )
    tied = transformers.Qwen3Config(**GROUPED, tie_word_embeddings=True)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    clip = {"max_position_embeddings": 20, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    torch.manual_seed(0)
    return {
        "clip": transformers.CLIPTextModelWithProjection(
            transformers.CLIPTextConfig(**SIZES, **clip, projection_dim=32)
        ),
        "experts": transformers.Qwen3MoeModel(transformers.Qwen3MoeConfig(**GROUPED, **experts)),
        "gemma2": transformers.Gemma2Model(transformers.Gemma2Config(**GROUPED)),
        "llama": transformers.LlamaModel(transformers.LlamaConfig(**GROUPED)),
        "mistral3": transformers.Mistral3ForConditionalGeneration(mistral),
        "qwen2_5_vl": transformers.Qwen2_5_VLForConditionalGeneration(qwen_vl),
        "qwen3": transformers.Qwen3ForCausalLM(tied),
        "t5_twice": transformers.T5EncoderModel(transformers.T5Config(**T5, num_heads=4)),
        "umt5": transformers.UMT5EncoderModel(transformers.UMT5Config(**T5, num_heads=4)),
    }


def write_cases(root: Path) -> None:
    for case, encoder in tiny_encoders().items():
        encoder.save_pretrained(root / case / "text_encoder")
        index = {"text_encoder": ["transformers", type(encoder).__name__]}
        (root / case / "model_index.json").write_text(json.dumps(index))
    # Names of before transformers 5, as published files have them.
    assert "visual.blocks.0.norm1.weight" in load_file(root / "qwen2_5_vl/text_encoder" / FILE)
    assert "lm_head.weight" not in load_file(root / "qwen3/text_encoder" / FILE)
    # What the config ties is there twice, and differs.
    file = root / "t5_twice/text_encoder" / FILE
    tensors = load_file(file)
    tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"] + 1
    save_file(tensors, file, {"format": "pt"})


def write_wide(toy: Path, root: Path) -> int:
    """The toy with a T5 of some 150 MB; returns the bytes of all encoders."""
    shutil.copytree(toy / "model", root)
    shutil.rmtree(root / "text_encoder_2")
    config = transformers.T5EncoderModel.config_class.from_pretrained(toy / "model/text_encoder_2")
    config.d_ff, config.d_model = WIDE
    config.d_kv, config.num_heads, config.num_layers = 64, 8, 9
    transformers.T5EncoderModel(config).save_pretrained(root / "text_encoder_2")
    return encoder_bytes(root, torch.float32)


def launch(ranks: int, toy: Path, shared: Path) -> list[dict[str, Any]]:
    start_ranks(on_rank, ranks, toy, shared).join()
    return [json.loads((shared / f"found{ranks}-{r}.json").read_text()) for r in range(ranks)]


@pytest.mark.slow
def test_sharded_encoders_are_those_of_from_pretrained_and_leave_nothing(
    toy: Path, tmp_path: Path
) -> None:
    write_cases(tmp_path / "cases")
    size = write_wide(toy, tmp_path / "wide")
    assert size > 145e6
    both = launch(2, toy, tmp_path)
    for found in both:
        for case in tiny_encoders():
            handed_out = any("rank 0 loads all of it" in line for line in found[case]["lines"])
            assert handed_out == (case == "experts"), case
        wide = found["wide"]
        assert wide["progress"]
        assert 0.49 < wide["here"] / wide["whole"] < 0.51
        assert 0.49 < wide["read"] / size < 0.51
        for way, held in (("sharded", size / 2), ("alone", size)):
            memory = wide[way]
            assert memory["measure"] == "rss"
            assert 0.95 < memory["held"] / held < 1.05
            grown = memory["loaded"] - memory["before"]  # by buffers of gatherings too
            assert grown > 0.8 * held
            assert memory["loaded"] - memory["after"] > 0.8 * grown
        assert "text_encoder_2.encoder.block.1" in found["kept"]
    # The default group, in which rank 0 waited too, had the timeout of which it was a matter.
    assert both[0]["late"]["waited"] >= SLEEP > DEFAULT_TIMEOUT
    assert "imed out" in both[0]["late"]["default group"]


@pytest.mark.slow
def test_four_ranks_encode_what_one_does(toy: Path, tmp_path: Path) -> None:
    launch(4, toy, tmp_path)


def test_whole_encoders_are_read_straight_onto_the_device(toy: Path, tmp_path: Path) -> None:
    """Their weights are those of `from_pretrained`, whatever their files call the tensors."""
    write_cases(tmp_path)
    for case, encoder in tiny_encoders().items():
        root = tmp_path / case
        moved: list[int] = []
        for dtype in (torch.float32, torch.bfloat16):
            ours = load_whole(root, dtype, CPU, progress=moved.append)
            assert bool(ours) is (case != "experts"), "whose tensors are stored otherwise"
            if not ours:
                continue
            stock = type(encoder).from_pretrained(root / "text_encoder", dtype=dtype)
            tensors, expected = ours["text_encoder"].state_dict(), stock.state_dict()
            assert tensors.keys() == expected.keys()
            for name, tensor in tensors.items():
                assert torch.equal(tensor, expected[name]), (case, name)
            assert not ours["text_encoder"].training
            tokens = torch.tensor([[5, 7, 11, 2]])
            with torch.no_grad():
                # Where numbers lie in memory decides how a product is summed up.
                torch.testing.assert_close(ours["text_encoder"](tokens)[0], stock(tokens)[0])
            assert ours["text_encoder"].config._attn_implementation == (
                stock.config._attn_implementation
            )
            assert moved
            packed = load_whole(root, dtype, CPU, packing=Packing("int8"))["text_encoder"]
            parameters = list(packed.parameters())
            held = sum(p.numel() * p.element_size() for p in parameters)
            assert held == encoder_bytes(root, dtype, Packing("int8")), case
            assert torch.uint8 in {p.dtype for p in parameters}, case
            with torch.no_grad():
                found, wanted = packed(tokens)[0].float(), stock(tokens)[0].float()
            assert (found - wanted).norm() < 0.05 * wanted.norm(), case


def test_ranks_on_gpus_load_encoders_past_the_host(
    toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stock pipeline is handed what was streamed, and reads no weights of its own."""
    root, flux = toy / "model", load("flux")
    streamed: list[torch.device] = []
    whole = text_encoders.load_whole

    def on_host(root: Path, dtype: torch.dtype, device: torch.device, **more: Any) -> Any:
        streamed.append(device)
        return whole(root, dtype, CPU, **more)

    monkeypatch.setattr(text_encoders, "load_whole", on_host)
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, *where, **more: module)
    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", None)
    gpu = World(0, 1, torch.device("cuda", 0), "single", "t")
    pipeline = text_encoders._load(
        flux, root, torch.float32, gpu, None, None, lambda line: None, lambda done: None
    )
    assert streamed == [gpu.device]
    assert {"text_encoder", "text_encoder_2"} <= pipeline.components.keys()
    expected = load_file(root / "text_encoder" / FILE)
    tensors = pipeline.text_encoder.state_dict()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


def test_the_encoders_of_a_model_and_their_size(toy: Path, tmp_path: Path) -> None:
    assert encoder_names(toy / "model") == ["text_encoder", "text_encoder_2"]
    files = [toy / "model" / name / FILE for name in encoder_names(toy / "model")]
    elements = sum(tensor.numel() for file in files for tensor in load_file(file).values())
    assert encoder_bytes(toy / "model", torch.float32) == 4 * elements
    assert encoder_bytes(toy / "model", torch.bfloat16) == 2 * elements
    index = {
        "_class_name": "X",
        "text_encoder": ["transformers", "CLIPTextModel"],
        "text_encoder_2": [None, None],
        "text_encoder_3": None,
        "text_encoder_4": ["transformers", "LlamaForCausalLM"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
    }
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    assert encoder_names(tmp_path) == ["text_encoder", "text_encoder_4"]
    (tmp_path / "model_index.json").write_text("[")
    with pytest.raises(UserError, match="cannot be read"):
        encoder_names(tmp_path)


def test_an_encoder_that_a_person_put_there_counts(tmp_path: Path) -> None:
    """The index of a published model may not name it, or say that there is none."""
    index = {"text_encoder": ["transformers", "CLIPTextModel"], "text_encoder_2": [None, None]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    for name in ("text_encoder_2", "text_encoder_4"):
        (tmp_path / name).mkdir()
        config = {"architectures": ["LlamaForCausalLM"]}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    assert encoder_names(tmp_path) == ["text_encoder", "text_encoder_4"]


def test_sharding_is_chosen_where_encoders_would_crowd_a_gpu(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, dtype = toy / "model", torch.float32
    size = encoder_bytes(root, dtype)
    gpu = World(0, 2, torch.device("cuda", 0), "ddp", "t")

    def chosen(free: float, world: World = gpu, wish: bool | None = None) -> bool:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free), 2**40))
        sharded, reason = shards_encoders(wish, root, dtype, world)
        assert reason
        return sharded

    assert chosen(size / 0.61)
    assert not chosen(size / 0.59)
    assert not chosen(size, wish=False)
    assert chosen(2**40, wish=True)
    module = "engine.model.text_encoders"
    monkeypatch.setattr(f"{module}.available_memory", lambda: int(2 * size / 0.59))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert not chosen(size, World(0, 2, CPU, "ddp", "t"))
    assert chosen(size, World(0, 3, CPU, "ddp", "t")), "they share the host's memory"
    assert chosen(size, World(0, 2, CPU, "ddp", "t"), wish=True)
    assert not chosen(size, World(0, 1, gpu.device, "single", "t"), wish=True)
    shutil.copytree(root, tmp_path / "quantised")
    root = tmp_path / "quantised"
    config = root / "text_encoder_2/config.json"
    config.write_text(
        json.dumps({**json.loads(config.read_text()), "quantization_config": {"bits": 4}})
    )
    assert not chosen(size)
    config.write_text("{")
    assert chosen(size)
    (root / "text_encoder" / FILE).unlink()
    assert not chosen(size)


def test_every_rank_does_what_rank_0_decided(toy: Path, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    decided: dict[int, tuple[bool, str]] = {}

    def rank(number: int) -> None:
        world = World(number, 2, CPU, "ddp", "t")
        wish = number == 0  # as if rank 1 saw something else
        decided[number] = agree_on_sharding(
            wish, toy / "model", torch.float32, world, run_dir, FileBarrier(run_dir, "t", number, 2)
        )

    ranks = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    assert decided[0] == decided[1] == (True, "set in job")


def test_the_watch_finds_what_is_left() -> None:
    def left_by(keep: Callable[[torch.nn.Sequential], Any]) -> str:
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        watch = Watch({"encoder": model})
        assert watch.held == sum(tensor.nbytes for tensor in model.state_dict().values())
        kept = keep(model)
        del model
        left = watch.still_held()
        assert kept is not None
        assert left.startswith(f"{STILL_HELD}: ")
        return left

    all_of_it = left_by(lambda model: model)
    assert "3 modules (encoder, encoder.0, encoder.1), 7 tensors (encoder.0.weight, " in all_of_it
    one_layer = left_by(lambda model: model[1])
    assert "needed: 1 modules (encoder.1), 5 tensors (encoder.1.weight, " in one_layer
    one_tensor = left_by(lambda model: model[1].bias)
    assert "needed: 1 tensors (encoder.1.bias), 1 blocks" in one_tensor
    # A view of the numbers, where the tensor itself is gone.
    text = left_by(lambda model: model[0].weight.detach()[1:])
    assert "needed: 1 blocks of tensor memory (encoder.0.weight)" in text


def test_the_watch_is_content_when_all_is_gone() -> None:
    model = torch.nn.Linear(3, 4)
    model.itself = model  # type: ignore[assignment]
    watch = Watch({"encoder": model})
    del model
    assert watch.still_held() == ""
