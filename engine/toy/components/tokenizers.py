"""Build the tokenizers of language models used as text encoders, from the toy's captions.

Every word of the captions is one token, and so is every word of the templates that pipelines put
around a prompt: pipelines strip a template by its published number of tokens, which must match here
too. Any other text is encoded byte by byte.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer
from transformers import (
    CLIPTokenizer,
    GemmaTokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
    T5TokenizerFast,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path


# Templates that `QwenImagePipeline` and `Lumina2Pipeline` set in their constructors.
QWEN_IMAGE_TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, "
    "quantity, text, spatial relationships of the objects and background:<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
LUMINA_TEMPLATE = (
    "You are an assistant designed to generate superior images with the superior degree of "
    "image-text alignment based on textual prompts or user prompts. <Prompt Start> {}"
)

QWEN_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
QWEN_THINK = ("<think>", "</think>")
QWEN_CHAT = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\n\n</think>\n\n' }}
{%- endif %}
{%- endif %}"""

QWEN_VL_CHAT = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' }}
{%- for block in message['content'] %}{{- block['text'] }}{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

LLAMA3_SPECIAL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<image>",
    "<pad>",
)
# Words with the preceding space, numbers of up to three digits, runs of other characters.
LLAMA3_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

MISTRAL_SPECIAL = (
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
)
MISTRAL_CHAT = """\
{%- macro text(content) %}
{%- if content is string %}{{- content }}{%- else %}
{%- for block in content %}
{%- if block['type'] == 'text' %}{{- block['text'] }}{%- else %}{{- '[IMG]' }}{%- endif %}
{%- endfor %}
{%- endif %}
{%- endmacro %}
{{- bos_token }}
{%- for message in messages %}
{%- if message['role'] == 'system' %}
{{- '[SYSTEM_PROMPT]' + text(message['content']) + '[/SYSTEM_PROMPT]' }}
{%- elif message['role'] == 'user' %}
{{- '[INST]' + text(message['content']) + '[/INST]' }}
{%- else %}
{{- text(message['content']) + eos_token }}
{%- endif %}
{%- endfor %}"""

GEMMA_SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>")
LLAMA_SPECIAL = ("<unk>", "<s>", "</s>")
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))

EVERYTHING = 1_000_000
"""A vocabulary size that the texts cannot reach: training ends when every word is one token."""


def build_other_clip_tokenizer(
    captions: Iterable[str], *, pad_token: str = "!", length: int = 77
) -> CLIPTokenizer:
    """Build CLIP's tokenizer with other settings than CLIP-L's.

    Args:
        captions: As for `build_clip_tokenizer`.
        pad_token: "!" for CLIP-G, as in SDXL and SD3.
        length: Maximum length of a text in tokens.
    """
    model = json.loads(build_clip_tokenizer(captions).backend_tokenizer.to_str())["model"]
    return CLIPTokenizer(
        vocab=model["vocab"],
        merges=_as_pairs(model["merges"]),
        pad_token=pad_token,
        model_max_length=length,
    )


def build_qwen_tokenizer(
    captions: Iterable[str], template: str = QWEN_IMAGE_TEMPLATE
) -> Qwen2Tokenizer:
    """Build the tokenizer of Qwen2.5-VL and Qwen3: bytes, no start token, a chat template.

    Qwen-Image uses the former, FLUX.2 klein and Z-Image the latter.
    """
    # Use an untrained instance only for its pre-tokenizer.
    pieces = Qwen2Tokenizer(vocab={}, merges=[]).backend_tokenizer
    vocabulary, merges = _train(
        _words_too([*captions, *_plain(template)]),
        pieces.pre_tokenizer,
        alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=merges,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(QWEN_SPECIAL),
        model_max_length=131072,
    )
    tokenizer.add_tokens(list(QWEN_THINK))
    tokenizer.chat_template = QWEN_CHAT
    return tokenizer


def build_llama3_tokenizer(captions: Iterable[str]) -> PreTrainedTokenizerFast:
    """Build the tokenizer of Llama 3: byte-level, with a start token, padded on the right.

    HunyuanVideo and HiDream use it.
    """
    texts = [*captions, *_plain(DEFAULT_PROMPT_TEMPLATE["template"])]
    backend = _byte_level(_words_too(texts))
    backend.add_special_tokens(list(LLAMA3_SPECIAL))
    start = LLAMA3_SPECIAL[0]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{start} $A",
        pair=f"{start} $A {start} $B",
        special_tokens=[(start, backend.token_to_id(start))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=start,
        eos_token="<|eot_id|>",
        pad_token="<pad>",
        padding_side="right",
        model_max_length=131072,
    )


def build_mistral_tokenizer(captions: Iterable[str]) -> PreTrainedTokenizerFast:
    """Build the tokenizer of Mistral Small 3: byte-level, start token in its chat, left-padded.

    FLUX.2-dev uses it.
    """
    backend = _byte_level(_words_too([*captions, SYSTEM_MESSAGE]), special=MISTRAL_SPECIAL)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        padding_side="left",
        model_max_length=131072,
    )
    tokenizer.chat_template = MISTRAL_CHAT
    return tokenizer


def build_gemma_tokenizer(captions: Iterable[str]) -> GemmaTokenizer:
    """Build the tokenizer of Gemma 2: SentencePiece, with a start token, padded on the left.

    Lumina 2 and Sana use it.
    """
    vocabulary, merges = _sentence_pieces(
        [*captions, *_plain(LUMINA_TEMPLATE)], special=(*GEMMA_SPECIAL, *BYTES)
    )
    return GemmaTokenizer(
        vocab=vocabulary,
        merges=merges,
        add_bos_token=True,
        extra_special_tokens=["<start_of_turn>", "<end_of_turn>"],
        padding_side="left",
        model_max_length=8192,
    )


def build_llama_tokenizer(captions: Iterable[str]) -> LlamaTokenizer:
    """Build the tokenizer of Llama 2, for AuraFlow's T5: SentencePiece, with an end token."""
    vocabulary, merges = _sentence_pieces([*captions], special=(*LLAMA_SPECIAL, *BYTES))
    return LlamaTokenizer(
        vocab=vocabulary,
        merges=merges,
        add_bos_token=False,
        add_eos_token=True,
        pad_token="<pad>",
        padding_side="right",
        model_max_length=512,
    )


def _byte_level(texts: Sequence[str], *, special: Sequence[str] = ()) -> Tokenizer:
    """Build a byte-level tokenizer with Llama 3's pre-tokenizer from `texts`."""
    pieces = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    vocabulary, merges = _train(
        texts, pieces, alphabet=pre_tokenizers.ByteLevel.alphabet(), special=special
    )
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pieces
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return backend


def _sentence_pieces(
    texts: Sequence[str], *, special: Sequence[str]
) -> tuple[dict[str, int], list[Pair]]:
    """Return a vocabulary in which a space is `WORD_START`, and part of the following word."""
    pieces = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(WORD_START, behavior="merged_with_next"),
            pre_tokenizers.Punctuation(),
        ]
    )
    # Printable ASCII; other text is encoded as `BYTES`, which are part of the special tokens.
    alphabet = [WORD_START, *(chr(code) for code in range(0x21, 0x7F))]
    spaces = normalizers.Replace(" ", WORD_START)
    learned = [spaces.normalize_str(text) for text in _words_too(texts)]
    return _train(learned, pieces, alphabet=alphabet, special=special)


def _train(
    texts: Iterable[str],
    pieces: pre_tokenizers.PreTokenizer,
    *,
    alphabet: Sequence[str],
    special: Sequence[str] = (),
) -> tuple[dict[str, int], list[Pair]]:
    """Return a vocabulary and merges that make each piece of `texts` one token."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pieces
    trainer = BpeTrainer(
        vocab_size=EVERYTHING,
        initial_alphabet=list(alphabet),
        special_tokens=list(special),
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer)
    model = json.loads(learner.to_str())["model"]
    return model["vocab"], _as_pairs(model["merges"])


def _as_pairs(merges: Iterable[str | Sequence[str]]) -> list[Pair]:
    """Return merges of a tokenizer's JSON as pairs; older versions join the two by a space."""
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in merges)
    return [(left, right) for left, right in pairs]


def _words_too(texts: Sequence[str]) -> list[str]:
    """Return `texts`, plus their words without the preceding space, as at the start of a prompt."""
    return [*texts, *sorted({word for text in texts for word in text.split()})]


def _plain(template: str) -> list[str]:
    """Split a template into its texts: the parts between special tokens and around the prompt."""
    marks = Regex(r"<\|[a-z_]+\|>|\{\}")
    parts = pre_tokenizers.Split(marks, behavior="removed").pre_tokenize_str(template)
    return [part for part, _ in parts]


# -- vocabulary -----------------------------------------------------------------------------
# Build the two tokenizers of a FLUX model from the toy's own captions.
#
# Both are of the published types: byte-pair merges for CLIP, which encode any text, and a unigram
# vocabulary for T5, with words, single characters and `<unk>`.


CLIP_LENGTH = 77
T5_LENGTH = 512

WORD_END = "</w>"
START, END = "<|startoftext|>", "<|endoftext|>"
WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"  # T5's character for a space

Pair = tuple[str, str]


def build_clip_tokenizer(captions: Iterable[str]) -> CLIPTokenizer:
    """Build a CLIP tokenizer in which every word of `captions` is one token."""
    merges = byte_pair_merges(_count_words(captions))
    signs = byte_signs()
    tokens = [
        *signs,
        *(sign + WORD_END for sign in signs),
        *(left + right for left, right in merges),
        START,
        # Keep this last: the text encoder may look for the end of a text by the highest id.
        END,
    ]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=CLIP_LENGTH)


def save_clip_vocabulary(tokenizer: CLIPTokenizer, directory: Path) -> None:
    """Write `vocab.json` and `merges.txt` too, which published models have.

    transformers 5 writes only `tokenizer.json`, while older readers need the other two.
    """
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    vocabulary = json.dumps(model["vocab"], ensure_ascii=False)
    (directory / "vocab.json").write_text(vocabulary, encoding="utf-8")
    lines = ["#version: 0.2", *merges]
    (directory / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def build_t5_tokenizer(captions: Iterable[str]) -> T5TokenizerFast:
    """Build a T5 tokenizer in which every word of `captions` is one token."""
    words = _count_words(captions)
    total = sum(words.values())
    pieces = [(WORD_START + word, math.log(words[word] / total)) for word in sorted(words)]
    # Printable ASCII and Latin-1 as single characters, far less likely than the rarest word.
    signs = [chr(code) for code in (*range(0x21, 0x7F), *range(0xA1, 0x100))]
    rare = min(score for _, score in pieces) - 4.0
    pieces += [(sign, rare) for sign in (WORD_START, *signs)]
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    return T5TokenizerFast(
        vocab=[*special, *pieces],
        extra_ids=0,
        additional_special_tokens=[],
        model_max_length=T5_LENGTH,
    )


def byte_signs() -> list[str]:
    """Return the 256 printable characters for bytes 0 to 255 in byte-level vocabularies.

    A printable byte is its own Latin-1 character; the others get characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [
        chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)
    ]


def byte_pair_merges(words: Counter[str]) -> list[Pair]:
    """Merge the most frequent neighbors repeatedly, until every word is one token.

    Args:
        words: Count of each (ASCII) word. Ties go to the pair that is first alphabetically.
    """
    split = {word: (*word[:-1], word[-1] + WORD_END) for word in words}
    merges: list[Pair] = []
    while True:
        pairs: Counter[Pair] = Counter()
        for word, parts in split.items():
            for pair in pairwise(parts):
                pairs[pair] += words[word]
        if not pairs:
            return merges
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        split = {word: _merge(parts, best) for word, parts in split.items()}


def _merge(parts: Sequence[str], pair: Pair) -> tuple[str, ...]:
    """Return `parts` with every occurrence of `pair` merged."""
    merged: list[str] = []
    for part in parts:
        if merged and (merged[-1], part) == pair:
            merged[-1] += part
        else:
            merged.append(part)
    return tuple(merged)


def _count_words(captions: Iterable[str]) -> Counter[str]:
    return Counter(word for caption in captions for word in caption.lower().split())
