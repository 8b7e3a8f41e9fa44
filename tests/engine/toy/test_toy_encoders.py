"""Stock pipelines read prompts with the toys' tokenizers and text encoders as with real ones."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import diffusers
import pytest
import torch
from diffusers import (
    DiffusionPipeline,
    Flux2Pipeline,
    HunyuanVideoPipeline,
    Lumina2Pipeline,
    QwenImagePipeline,
)
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from PIL import Image
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.toy.components.clip_and_t5 import (
    build_clip,
    build_clip_with_projection,
    build_t5,
    build_umt5,
)
from engine.toy.components.language_models import (
    build_gemma2,
    build_gemma3,
    build_llama,
    build_llama_lm,
    build_mistral3,
    build_qwen2_5_vl,
    build_qwen3,
    build_qwen3_lm,
    save_pixtral_processor,
)
from engine.toy.components.tokenizers import (
    LUMINA_TEMPLATE,
    QWEN_IMAGE_TEMPLATE,
    build_clip_tokenizer,
    build_gemma_tokenizer,
    build_llama3_tokenizer,
    build_llama_tokenizer,
    build_mistral_tokenizer,
    build_other_clip_tokenizer,
    build_qwen_tokenizer,
    build_t5_tokenizer,
)
from engine.toy.components.weights import one_thread
from engine.toy.images import toy_captions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CAPTIONS = toy_captions(512, seed=0)
DIM = 32
RED_CIRCLE = "a red circle on a blue background"  # 7 words
GREEN_STAR = "a green star on a blue background"
LAST_WORD = "a red circle on a blue gradient"


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


# Tokenizers

TOKENIZERS: dict[str, Callable[..., PreTrainedTokenizerFast]] = {
    "clip-g": build_other_clip_tokenizer,
    "gemma": build_gemma_tokenizer,
    "llama": build_llama_tokenizer,
    "llama3": build_llama3_tokenizer,
    "mistral": build_mistral_tokenizer,
    "qwen": build_qwen_tokenizer,
}
BY_NAME = [pytest.param(build, id=name) for name, build in TOKENIZERS.items()]
TEXTS = [
    "A Red circle, x+y=Ω! 🙂 'tis Grüße, 你好\n\ta  quick\nbrown fox \x00",
    "<|im_start|>user<think></s>[INST]<pad><|eot_id|><start_of_turn>!<eos>{}",
    "",
    *CAPTIONS[:3],
]


@pytest.mark.parametrize("build", BY_NAME)
def test_every_word_of_a_caption_is_one_token(
    build: Callable[..., PreTrainedTokenizerFast],
) -> None:
    tokenizer = build(CAPTIONS)
    for caption in toy_captions(200, seed=9):
        for text in (caption, caption.split(maxsplit=1)[1]):
            tokens = tokenizer(text, add_special_tokens=False).input_ids
            assert len(tokens) == len(text.split()), tokenizer.convert_ids_to_tokens(tokens)


@pytest.mark.parametrize("build", BY_NAME)
def test_tokenizer_is_the_same_every_time_and_when_read_back(
    build: Callable[..., PreTrainedTokenizerFast], tmp_path: Path
) -> None:
    tokenizer = build(CAPTIONS)
    tokenizer.save_pretrained(tmp_path)
    for other in (
        build(list(CAPTIONS)),
        type(tokenizer).from_pretrained(tmp_path),
        AutoTokenizer.from_pretrained(tmp_path),
    ):
        assert other.get_vocab() == tokenizer.get_vocab()
        assert [other(text).input_ids for text in TEXTS] == [
            tokenizer(text).input_ids for text in TEXTS
        ]
        for name in ("padding_side", "pad_token_id", "eos_token_id", "bos_token_id"):
            assert getattr(other, name) == getattr(tokenizer, name), name
        for name in ("model_max_length", "chat_template"):
            assert getattr(other, name) == getattr(tokenizer, name), name
    assert max(tokenizer.get_vocab().values()) == len(tokenizer) - 1  # An embedding for each.


@pytest.mark.parametrize("name", ["gemma", "llama3", "mistral", "qwen"])
def test_any_text_is_read_back(name: str) -> None:
    tokenizer = TOKENIZERS[name](CAPTIONS)
    text = TEXTS[0]
    tokens = tokenizer(text).input_ids
    assert tokenizer.decode(tokens, skip_special_tokens=True) == text
    assert tokenizer.unk_token_id not in tokens or name == "qwen"


def test_special_tokens_are_where_the_published_have_them() -> None:
    qwen, gemma, llama = (TOKENIZERS[name](CAPTIONS) for name in ("qwen", "gemma", "llama"))
    llama3, mistral, clip = (TOKENIZERS[name](CAPTIONS) for name in ("llama3", "mistral", "clip-g"))
    assert (qwen.pad_token, qwen.eos_token, qwen.bos_token) == (
        "<|endoftext|>",
        "<|im_end|>",
        None,
    )
    assert gemma("a red").tokens() == ["<bos>", "a", "▁red"]
    assert (gemma.pad_token_id, gemma.eos_token_id, gemma.bos_token_id) == (0, 1, 2)
    assert llama("a red").tokens() == ["▁a", "▁red", "</s>"]
    assert llama3("a red").tokens() == ["<|begin_of_text|>", "a", "Ġred"]
    assert (llama3.padding_side, mistral.padding_side) == ("right", "left")
    assert mistral.convert_tokens_to_ids(["<s>", "</s>", "[IMG]", "<pad>"]) == [1, 2, 10, 11]
    assert (clip.pad_token, clip.model_max_length) == ("!", 77)
    assert build_other_clip_tokenizer(CAPTIONS, length=248).model_max_length == 248


def test_qwen_chats_with_and_without_thinking() -> None:
    tokenizer = build_qwen_tokenizer(CAPTIONS)
    messages = [{"role": "user", "content": RED_CIRCLE}]
    asked = f"<|im_start|>user\n{RED_CIRCLE}<|im_end|>\n"

    def chat(**options: bool) -> Any:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)

    assert chat() == asked
    asked += "<|im_start|>assistant\n"
    assert chat(add_generation_prompt=True, enable_thinking=True) == asked
    thought = asked + "<think>\n\n</think>\n\n"
    assert chat(add_generation_prompt=True, enable_thinking=False) == thought
    assert tokenizer(thought).tokens().count("<think>") == 1


def test_mistral_chats_in_text_and_in_blocks() -> None:
    tokenizer = build_mistral_tokenizer(CAPTIONS)
    blocks = [{"type": "image"}, {"type": "text", "text": RED_CIRCLE}]
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": blocks},
        {"role": "assistant", "content": "yes"},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        f"<s>[SYSTEM_PROMPT]be brief[/SYSTEM_PROMPT][INST][IMG]{RED_CIRCLE}[/INST]yes</s>"
    )


# Templates


def test_templates_are_those_of_the_pipelines() -> None:
    nothing = {"scheduler": None, "vae": None, "text_encoder": None, "transformer": None}
    assert QwenImagePipeline(**nothing, tokenizer=None).prompt_template_encode == (
        QWEN_IMAGE_TEMPLATE
    )
    system = Lumina2Pipeline(**nothing, tokenizer=None).system_prompt
    assert f"{system} <Prompt Start> {{}}" == LUMINA_TEMPLATE


def test_what_pipelines_cut_off_is_the_template_to_the_token() -> None:
    llama3, qwen = build_llama3_tokenizer(CAPTIONS), build_qwen_tokenizer(CAPTIONS)
    cut = QwenImagePipeline(None, None, None, None, None).prompt_template_encode_start_idx
    tokens = qwen(QWEN_IMAGE_TEMPLATE.format(RED_CIRCLE)).tokens()
    assert "".join(tokens[cut : cut + 7]).replace("Ġ", " ") == RED_CIRCLE
    assert tokens[cut + 7] == "<|im_end|>"
    tokens = llama3(DEFAULT_PROMPT_TEMPLATE["template"].format(RED_CIRCLE)).tokens()
    cut = DEFAULT_PROMPT_TEMPLATE["crop_start"]
    assert "".join(tokens[cut:-1]).replace("Ġ", " ") == RED_CIRCLE
    assert tokens[-1] == "<|eot_id|>"


# Stock pipelines

Parts = dict[str, Any]


def two_clips(*, projected: bool = True, length: int = 77) -> Parts:
    """CLIP-L and CLIP-G as SDXL, SD3 and HiDream have them, each `DIM` wide.

    Args:
        projected: Whether the first has a projection too.
        length: Most tokens of a text; the longer ones of HiDream pad both alike.
    """
    pad_token = "!" if length == 77 else "<|endoftext|>"
    second = build_other_clip_tokenizer(CAPTIONS, pad_token=pad_token, length=length)
    first = build_clip_tokenizer(CAPTIONS) if length == 77 else second
    build_first = build_clip_with_projection if projected else build_clip
    return {
        "tokenizer": first,
        "text_encoder": build_first(first, DIM, seed=0),
        "tokenizer_2": second,
        "text_encoder_2": build_clip_with_projection(second, DIM, seed=1, hidden_act="gelu"),
    }


def with_tokenizer(
    tokenizer: PreTrainedTokenizerFast,
    build: Callable[..., torch.nn.Module],
    number: str = "",
    dim: int = DIM,
) -> Parts:
    return {
        f"tokenizer{number}": tokenizer,
        f"text_encoder{number}": build(tokenizer, dim, seed=2),
    }


def t5(number: str = "", dim: int = DIM) -> Parts:
    return with_tokenizer(build_t5_tokenizer(CAPTIONS), build_t5, number, dim)


def qwen(build: Callable[..., torch.nn.Module]) -> Parts:
    return with_tokenizer(build_qwen_tokenizer(CAPTIONS), build)


def hunyuan_video() -> Parts:
    clip = build_clip_tokenizer(CAPTIONS)
    return with_tokenizer(build_llama3_tokenizer(CAPTIONS), build_llama) | {
        "tokenizer_2": clip,
        "text_encoder_2": build_clip(clip, 64, seed=0),
    }


def hidream() -> Parts:
    llama = with_tokenizer(build_llama3_tokenizer(CAPTIONS), build_llama_lm, "_4")
    return two_clips(length=248) | t5("_3") | llama


@dataclass(frozen=True)
class Case:
    """One stock pipeline.

    Attributes:
        pipeline: Name of its class.
        parts: Makes its text parts.
        shapes: Of the embeddings of `RED_CIRCLE`, by their place in what `encode_prompt` gives.
        arguments: Of `encode_prompt`, beside the prompts.
    """

    pipeline: str
    parts: Callable[[], Parts]
    shapes: dict[int, tuple[int, ...]]
    arguments: dict[str, Any] = field(default_factory=dict)


UNGUIDED = {"do_classifier_free_guidance": False}
CASES = [
    # 7 words, the end, a line, the start, "assistant", a line.
    Case("QwenImagePipeline", lambda: qwen(build_qwen2_5_vl), {0: (12, DIM)}),
    Case(
        "Flux2Pipeline",
        lambda: with_tokenizer(build_mistral_tokenizer(CAPTIONS), build_mistral3),
        {0: (128, 3 * DIM)},
        {"max_sequence_length": 128},
    ),
    Case(
        "Flux2KleinPipeline",
        lambda: qwen(build_qwen3_lm),
        {0: (64, 3 * DIM)},
        {"max_sequence_length": 64},
    ),
    # The same 12, and the start, "user" and a line before them.
    Case("ZImagePipeline", lambda: qwen(build_qwen3), {0: (15, DIM)}, UNGUIDED),
    Case(
        "Lumina2Pipeline",
        lambda: with_tokenizer(build_gemma_tokenizer(CAPTIONS), build_gemma2),
        {0: (64, DIM)},
        {**UNGUIDED, "max_sequence_length": 64},
    ),
    Case(
        "SanaPipeline",
        lambda: with_tokenizer(build_gemma_tokenizer(CAPTIONS), build_gemma2),
        {0: (300, DIM)},
        {**UNGUIDED, "complex_human_instruction": ["Given a user prompt, x:", "User Prompt: "]},
    ),
    Case(
        "WanPipeline",
        lambda: with_tokenizer(build_t5_tokenizer(CAPTIONS), build_umt5),
        {0: (226, DIM)},
        UNGUIDED,
    ),
    Case("LTXPipeline", t5, {0: (128, DIM)}, UNGUIDED),
    Case(
        "LTX2Pipeline",
        lambda: with_tokenizer(build_gemma_tokenizer(CAPTIONS), build_gemma3),
        {0: (64, 4 * DIM)},  # the words, and all layers
        {**UNGUIDED, "max_sequence_length": 64},
    ),
    Case("HunyuanVideoPipeline", hunyuan_video, {0: (256, DIM), 1: (64,)}),
    Case(
        "HiDreamImagePipeline",
        hidream,
        {0: (128, DIM), 2: (4, 128, DIM), 4: (2 * DIM,)},
        UNGUIDED,
    ),
    Case(
        "AuraFlowPipeline",
        lambda: with_tokenizer(build_llama_tokenizer(CAPTIONS), build_umt5),
        {0: (256, DIM)},
        UNGUIDED,
    ),
    Case("PixArtSigmaPipeline", t5, {0: (300, DIM)}, UNGUIDED),
    Case("ChromaPipeline", t5, {0: (512, DIM)}, UNGUIDED),
    Case(
        "StableDiffusion3Pipeline",
        lambda: two_clips() | t5("_3", 3 * DIM),
        {0: (77 + 256, 3 * DIM), 2: (2 * DIM,)},
        {**UNGUIDED, "prompt_2": None, "prompt_3": None},
    ),
    Case(
        "StableDiffusionXLPipeline",
        lambda: two_clips(projected=False),
        {0: (77, 2 * DIM), 2: (DIM,)},
        UNGUIDED,
    ),
]


def empty_parts(case: Case) -> Parts:
    model = "unet" if case.pipeline == "StableDiffusionXLPipeline" else "transformer"
    sound = ("audio_vae", "vocoder", "connectors") if case.pipeline == "LTX2Pipeline" else ()
    return dict.fromkeys(("scheduler", "vae", model, *sound))


@torch.no_grad()
def encode(case: Case, pipeline: DiffusionPipeline, prompts: list[str]) -> list[list[torch.Tensor]]:
    """For each prompt its embeddings, in the order of the case's shapes."""
    given = pipeline.encode_prompt(prompt=[*prompts], device="cpu", **case.arguments)
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    for place in case.shapes:
        batch = given[place]
        if isinstance(batch, torch.Tensor) and batch.ndim == 4:
            batch = batch.movedim(1, 0)  # HiDream's layers come first.
        for texts, text in zip(found, batch, strict=True):
            texts.append(text)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.pipeline.removesuffix("Pipeline"))
def test_stock_pipeline_reads_prompts(case: Case, tmp_path: Path) -> None:
    kind = getattr(diffusers, case.pipeline)
    pipeline = kind(**empty_parts(case), **case.parts())
    pipeline.save_pretrained(tmp_path)
    red, *others = encode(case, pipeline, [RED_CIRCLE, GREEN_STAR, LAST_WORD])
    for place, (embeds, shape) in enumerate(zip(red, case.shapes.values(), strict=True)):
        assert embeds.shape == shape
        assert embeds.isfinite().all()
        words = embeds[embeds != 0.0]  # Some pipelines put zeros where a prompt ended.
        assert 0.3 < words.square().mean().sqrt() < 3.0
        for other in others:
            assert (embeds - other[place]).abs().max() > 0.1
    read_back = kind.from_pretrained(tmp_path, **empty_parts(case))
    again = encode(case, read_back, [RED_CIRCLE, GREEN_STAR, LAST_WORD])[0]
    assert all(map(torch.equal, red, again))


def test_nothing_of_a_template_is_left_of_a_video_prompt() -> None:
    parts = hunyuan_video()
    empty = {"scheduler": None, "vae": None, "transformer": None}
    _, _, mask = HunyuanVideoPipeline(**empty, **parts).encode_prompt(RED_CIRCLE, device="cpu")
    assert mask.sum() == 8  # 7 words and the end of the turn.


# The processor of FLUX.2-dev


@pytest.fixture
def flux2(tmp_path: Path) -> Flux2Pipeline:
    """The text parts of FLUX.2-dev, saved as published in `tmp_path`."""
    tokenizer = build_mistral_tokenizer(CAPTIONS)
    encoder = build_mistral3(tokenizer, DIM, seed=0)
    pipeline = Flux2Pipeline(None, None, encoder, tokenizer, None)
    pipeline.save_pretrained(tmp_path)
    save_pixtral_processor(tmp_path)
    return pipeline


def test_processor_files_are_a_tokenizer_too(flux2: Flux2Pipeline, tmp_path: Path) -> None:
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["tokenizer"] == ["transformers", "PixtralProcessor"]
    assert index["text_encoder"] == ["transformers", "Mistral3ForConditionalGeneration"]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "tokenizer")
    again = Flux2Pipeline(None, None, flux2.text_encoder, tokenizer, None)
    embeds, _ = again.encode_prompt(RED_CIRCLE, device="cpu", max_sequence_length=64)
    assert embeds.equal(flux2.encode_prompt(RED_CIRCLE, device="cpu", max_sequence_length=64)[0])


def test_processor_reads_prompts_and_pictures(flux2: Flux2Pipeline, tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    again = Flux2Pipeline.from_pretrained(tmp_path, scheduler=None, vae=None, transformer=None)
    assert type(again.tokenizer).__name__ == "PixtralProcessor"
    embeds, _ = again.encode_prompt(RED_CIRCLE, device="cpu", max_sequence_length=64)
    assert embeds.equal(flux2.encode_prompt(RED_CIRCLE, device="cpu", max_sequence_length=64)[0])
    picture = {"type": "image", "image": Image.new("RGB", (64, 48), "red")}
    content = [picture, {"type": "text", "text": RED_CIRCLE}]
    inputs = again.tokenizer.apply_chat_template(
        [[{"role": "user", "content": content}]],
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    with torch.no_grad():
        assert again.text_encoder(**inputs).logits.isfinite().all()


def test_qwen_sees_pictures() -> None:
    tokenizer = build_qwen_tokenizer(CAPTIONS)
    model = build_qwen2_5_vl(tokenizer, DIM, seed=0)
    # A picture of 4 x 4 patches: 2 x 2 tokens.
    text = f"<|vision_start|>{4 * '<|image_pad|>'}<|vision_end|>{RED_CIRCLE}"
    inputs = tokenizer(text, return_tensors="pt")
    patches = torch.randn(16, 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = [
            model(**inputs, pixel_values=pixels, image_grid_thw=torch.tensor([[1, 4, 4]])).logits
            for pixels in (patches, -patches)
        ]
    assert logits[0].isfinite().all()
    assert (logits[0] - logits[1]).abs().max() > 0.1
