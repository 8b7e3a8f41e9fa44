"""Small models that score samples: random ones, and a CLIP that has learned the demo's scenes."""

from __future__ import annotations

import random
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch.nn import functional
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    Dinov2Config,
    Dinov2Model,
)

from engine.demo.pictures import BACKGROUNDS, COLORS, SHAPES, Scene, captions, draw
from engine.toy.components.tokenizers import build_clip_tokenizer
from engine.toy.images import HEART

if TYPE_CHECKING:
    from pathlib import Path

SIDE = 32
WIDTH = 32


def _processor(side: int) -> CLIPImageProcessor:
    return CLIPImageProcessor(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side}
    )


def _small_clip(texts: list[str], *, side: int, patch: int, width: int, layers: int) -> CLIPModel:
    tokenizer = build_clip_tokenizer(texts)
    shape = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
    }
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = CLIPConfig(
        text_config=shape
        | {"vocab_size": len(tokenizer), "max_position_embeddings": 16, "pad_token_id": 0}
        | ends,
        vision_config=shape | {"image_size": side, "patch_size": patch},
        projection_dim=width,
    )
    model = CLIPModel(config)
    model.tokenizer = tokenizer
    return model


def _save(model: CLIPModel, root: Path, side: int) -> Path:
    tokenizer = model.__dict__.pop("tokenizer")
    model.eval().save_pretrained(root)
    tokenizer.save_pretrained(root)
    _processor(side).save_pretrained(root)
    return root


def write_clip(root: Path) -> Path:
    """Write a random CLIP for images of 32 pixels."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _small_clip(captions(), side=SIDE, patch=8, width=WIDTH, layers=2)
    return _save(model, root, SIDE)


def write_dino(root: Path) -> Path:
    """Write a random DINOv2 for images of 32 pixels."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Dinov2Model(
            Dinov2Config(
                hidden_size=WIDTH,
                num_hidden_layers=2,
                num_attention_heads=2,
                image_size=SIDE,
                patch_size=8,
            )
        )
    model.eval().save_pretrained(root)
    _processor(SIDE).save_pretrained(root)
    return root


def write_demo_clip(root: Path, *, steps: int = 120, drawings: int = 4) -> Path:
    """Train CLIP's own loss on the demo's scenes, hearts included, and write what it came to.

    A patch is the whole image, so that the model is a small network on its pixels. The text encoder
    stays random below its projection.
    """
    known = [Scene(*parts) for parts in product((*SHAPES, HEART), COLORS, BACKGROUNDS)]
    rng = random.Random(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _small_clip([s.caption for s in known], side=SIDE, patch=SIDE, width=96, layers=1)
        images = [draw(scene, rng) for _ in range(drawings) for scene in known]
        pixels = _processor(SIDE)(images=images, return_tensors="pt")["pixel_values"]
        pixels = pixels.unflatten(0, (drawings, len(known)))
        tokens = model.tokenizer([s.caption for s in known], padding=True, return_tensors="pt")
        with torch.no_grad():
            texts = model.text_model(**tokens).pooler_output
        learned = [*model.vision_model.parameters(), model.logit_scale]
        learned += [model.visual_projection.weight, model.text_projection.weight]
        optimizer = torch.optim.AdamW(learned, lr=3e-3, weight_decay=0.0)
        for step in range(steps):
            drawn = pixels[step % drawings]
            seen = functional.normalize(model.get_image_features(drawn).pooler_output, dim=-1)
            told = functional.normalize(model.text_projection(texts), dim=-1)
            logits = model.logit_scale.exp() * seen @ told.T
            right = torch.arange(len(known))
            loss = sum(functional.cross_entropy(each, right) for each in (logits, logits.T))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return _save(model, root, SIDE)
