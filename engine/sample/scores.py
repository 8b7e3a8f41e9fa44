"""Score a step's samples with CLIP and DINO, by the definitions of DreamBooth.

CLIP-T is the mean cosine of each sample's image embedding and its prompt's text embedding. CLIP-I
and DINO-I are the mean cosine of each sample and each reference image (Ruiz et al., "DreamBooth",
arXiv 2208.12242, "Evaluation Metrics"). The references are held-out images, so that copying the
training images wins nothing. Of a video its middle frame is scored.
"""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from PIL import Image
from torch.nn import functional

from engine.data.encode.latents import to_pixels
from engine.data.index.captions import prompt_text
from engine.data.index.views import view_of
from engine.model.release import give_back
from jobs.models.find_model import find_model
from jobs.models.scorers import CLIP, DINO, scorers_of
from jobs.run.events import Scores
from jobs.spec.keys.prompts import requests_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from engine.data.prepare import Prepared
    from engine.run_context import RunContext

BATCH: Final = 8
"""Images that a model embeds at once."""
MOST_REFERENCES: Final = 256
"""Held-out images that samples are compared with: the first ones, in the order of the data."""


class ScoringModel(NamedTuple):
    """A model of transformers with its preprocessing.

    Attributes:
        model: CLIP, or a vision transformer.
        processor: Turns images into pixels.
        tokenizer: Turns prompts into tokens; None for a vision transformer.
    """

    model: Any
    processor: Any
    tokenizer: Any = None

    def embed(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return image embeddings of length 1, `(B, D)` in fp32, of `pixels` `(B, 3, H, W)`."""
        if self.tokenizer is not None:
            return _unit(_pooled(self.model.get_image_features(pixel_values=pixels)))
        # The class token: some classes have a pooler, which DINO never trained.
        return _unit(self.model(pixel_values=pixels).last_hidden_state[:, 0])

    def images(self, images: Sequence[Image.Image], moved: Callable[[], None]) -> torch.Tensor:
        """Return the embeddings of images, `(N, D)` in fp32 on the CPU."""
        parts = []
        for start in range(0, len(images), BATCH):
            batch = [image.convert("RGB") for image in images[start : start + BATCH]]
            pixels = self.processor(images=batch, return_tensors="pt")["pixel_values"]
            parts.append(self.embed(pixels.to(self.model.device, self.model.dtype)).cpu())
            moved()
        return torch.cat(parts)

    def texts(self, texts: Sequence[str]) -> torch.Tensor:
        """Return the embeddings of texts, `(N, D)` in fp32 on the CPU, cut to CLIP's length."""
        tokens = self.tokenizer(
            list(texts),
            padding=True,
            truncation=True,
            max_length=self.model.config.text_config.max_position_embeddings,
            return_tensors="pt",
        ).to(self.model.device)
        features = self.model.get_text_features(
            input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]
        )
        return _unit(_pooled(features)).cpu()


def _pooled(features: Any) -> torch.Tensor:
    """Return the projected features, which transformers has wrapped in an output since 5.0."""
    return features if isinstance(features, torch.Tensor) else features.pooler_output


def _unit(features: torch.Tensor) -> torch.Tensor:
    return functional.normalize(features.float(), dim=-1)


def scoring_dtype(device: torch.device) -> torch.dtype:
    """Return the precision of scoring models: fp16 resolves cosines better than bf16."""
    return torch.float32 if device.type == "cpu" else torch.float16


def load_scoring_model(key: str, root: Path, device: torch.device) -> ScoringModel:
    """Load the model that a key of the job names.

    Args:
        key: `jobs.models.scorers.CLIP` or `DINO`.
        root: Its directory.
        device: Where it computes.
    """
    from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

    alone: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    model = AutoModel.from_pretrained(
        root, dtype=scoring_dtype(device), use_safetensors=True, **alone
    )
    tokenizer = AutoTokenizer.from_pretrained(root, **alone) if key == CLIP else None
    processor = AutoImageProcessor.from_pretrained(root, **alone)
    return ScoringModel(model.eval().to(device), processor, tokenizer)


def prompt_similarity(images: torch.Tensor, texts: torch.Tensor) -> float:
    """Return the mean cosine of each image and its text; both `(N, D)`, of length 1."""
    return float((images.double() * texts.double()).sum(dim=-1).mean())


def image_similarity(images: torch.Tensor, references: torch.Tensor) -> float:
    """Return the mean cosine of all pairs of `images` `(N, D)` and `references` `(M, D)`."""
    return float((images.double() @ references.double().T).mean())


class Scorer:
    """Scores samples on one rank; models are in memory only meanwhile.

    Args:
        run: The job and its ranks.
        data: The held-out samples. Their embeddings are kept for the next step.
    """

    def __init__(self, run: RunContext, data: Prepared) -> None:
        self._run = run
        self._data = data
        self._references: dict[str, torch.Tensor] = {}

    def score(self, step: int, folder: Path, files: Sequence[str]) -> Scores | None:
        """Score the samples of a step; say why in the log where that fails.

        Random numbers of the training are left as they are.

        Args:
            step: Which.
            folder: Of the samples.
            files: Their images, in the order of the prompts.
        """
        begun, requests = time.perf_counter(), requests_of(self._run.spec)
        if len(files) < len(requests):
            self._refuse(step, f"there are {len(files)} of {len(requests)} samples")
            return None
        try:
            with _own_random_numbers(self._run.world.device):
                values = self._values([folder / name for name in files])
        except Exception as error:  # a library's, a file's, or the GPU's; training continues
            why = str(error).strip().splitlines() or [type(error).__name__]
            self._refuse(step, why[0])
            return None
        finally:
            give_back(self._run.world.device)
        return Scores(
            step=step,
            **values,
            samples=len(files),
            references=max(map(len, self._references.values()), default=0) or None,
            seconds=round(time.perf_counter() - begun, 3),
        )

    def _refuse(self, step: int, why: str) -> None:
        self._run.telemetry.warn(
            f"the samples of step {step} were not scored ({why}); training continues"
        )

    @torch.no_grad()
    def _values(self, paths: Sequence[Path]) -> dict[str, float]:
        """Return the scores by name."""
        spec, moved = self._run.spec, self._run.telemetry.moved
        images = [_read(path) for path in paths]
        values: dict[str, float] = {}
        for key, name in scorers_of(spec).items():
            scoring = load_scoring_model(key, find_model(name), self._run.world.device)
            moved()
            embedded = scoring.images(images, moved)
            if "clip_t" in spec.validation_scores and key == CLIP:
                prompts = [prompt_text(r.prompt, spec) for r in requests_of(spec)]
                values["clip_t"] = prompt_similarity(embedded, scoring.texts(prompts))
            score = "dino_i" if key == DINO else "clip_i"
            if score in spec.validation_scores:
                if key not in self._references:
                    self._references[key] = scoring.images(self._held_out(), moved)
                values[score] = image_similarity(embedded, self._references[key])
            del scoring  # the next one needs its room
            give_back(self._run.world.device)
        if bad := [name for name, value in values.items() if not math.isfinite(value)]:
            raise ValueError(f"{bad[0]} is not finite")
        return {name: values[name] for name in spec.validation_scores}

    def _held_out(self) -> list[Image.Image]:
        """Return the held-out images as training would show them."""
        spec = self._run.spec
        held = self._data.held[:MOST_REFERENCES]
        return [_as_image(to_pixels(sample, view_of(sample, 0, spec), spec)) for sample in held]


def _read(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")


def _as_image(pixels: torch.Tensor) -> Image.Image:
    """Return the image of pixels `(1, 3, H, W)`, or the middle frame of `(1, 3, F, H, W)`."""
    frame = pixels[0] if pixels.dim() == 4 else pixels[0, :, pixels.shape[2] // 2]
    return Image.fromarray(((frame.permute(1, 2, 0) + 1) * 127.5).round().byte().numpy())


@contextmanager
def _own_random_numbers(device: torch.device) -> Iterator[None]:
    """Put torch's random numbers back afterwards: loading a model may draw some."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield
