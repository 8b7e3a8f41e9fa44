"""What is kept of the base's training: loss curves, and a state to resume from."""

from __future__ import annotations

import argparse
import json
import random
import string
import sys
import time
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from PIL import Image
from torch.nn import functional

from engine.demo.judge import look
from engine.demo.pictures import (
    BACKGROUNDS,
    COLORS,
    OTHER_WORDS,
    SHAPES,
    SIZE,
    Scene,
    captions,
    draw,
    scenes,
)
from engine.families.shared.packing import pack
from engine.toy.components import parts
from engine.toy.components.clip_and_t5 import build_clip, build_t5
from engine.toy.components.tokenizers import (
    build_clip_tokenizer,
    build_t5_tokenizer,
    save_clip_vocabulary,
)
from engine.toy.components.vae import as_tensor, new_vae, wire_encoder
from engine.toy.families.flux import FluxSizes, shape_transformer
from engine.toy.images import HEART

if TYPE_CHECKING:
    from collections.abc import Sequence


KEPT: Final = 100
"""Steps between two states from which an interrupted training resumes."""
EVERY: Final = 50
"""Steps between two points of a loss curve, each a mean."""


class Curve:
    """A loss curve, as means over `EVERY` steps; shown as it grows.

    Args:
        name: Of what is trained.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._losses: list[float] = []
        self._means: list[float] = []
        self._earlier = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_earlier": self._seconds()}

    def add(self, loss: torch.Tensor) -> None:
        """Note the loss of one more step."""
        self._losses.append(loss.item())
        if len(self._losses) == EVERY:
            self._means.append(round(sum(self._losses) / EVERY, 5))
            self._losses.clear()
            done = len(self._means) * EVERY
            print(f"{self._name} {done} {self._means[-1]} {self._seconds():.0f} s", flush=True)

    def write(self, base: Path, steps: int, **facts: Any) -> None:
        """Put it into `training.json`."""
        facts = {**facts, "steps": steps, "cpu_seconds": round(self._seconds())}
        record(base, self._name, {**facts, "loss_every": EVERY, "loss": self._means})

    def _seconds(self) -> float:
        """Processor time so far, before an interruption too."""
        return self._earlier + time.process_time()


class Kept:
    """What an interrupted training needs to resume, in a file beside the base.

    Args:
        base: The base.
        name: Of what is trained.
        pieces: Whatever has a state.
    """

    def __init__(self, base: Path, name: str, *pieces: Any) -> None:
        self._path = base.with_name(f"{base.name}-{name}.pt")
        self._name, self._pieces = name, pieces

    def restore(self, chance: random.Random) -> tuple[int, random.Random, Curve]:
        """Restore the pieces, and return the steps done, the RNG and the loss curve."""
        if not self._path.is_file():
            return 0, chance, Curve(self._name)
        done, chance, curve, drawn, *states = torch.load(self._path, weights_only=False)
        torch.set_rng_state(drawn)
        for piece, state in zip(self._pieces, states, strict=True):
            piece.load_state_dict(state)
        return done, chance, curve

    def keep(self, done: int, chance: random.Random, curve: Curve) -> None:
        """Write the file, every `KEPT` steps."""
        if done % KEPT:
            return
        states = [piece.state_dict() for piece in self._pieces]
        aside = self._path.with_suffix(".tmp")
        torch.save([done, chance, curve, torch.get_rng_state(), *states], aside)
        aside.replace(self._path)

    def forget(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)


def record(base: Path, name: str, facts: dict[str, Any]) -> None:
    """Put facts into `training.json`."""
    path = base / "training.json"
    records = json.loads(path.read_text()) if path.is_file() else {}
    records[name] = facts
    path.write_text(json.dumps(records) + "\n", encoding="utf-8")


# -- make base ------------------------------------------------------------------------------
# Train the demo's base, which the package ships: `python -m tests.support.demo_base base`.
#
# A FLUX.1 of 2.4 million parameters that draws the demo's shapes in the demo's colors, in
# about 15 minutes of one CPU core. Its text encoders are random and stay so; its
# autoencoder's encoder is made in closed form. `training.json` beside the model holds the
# seed and both loss curves.


SEED: Final = 0
TOKENS: Final = 16
"""Of a prompt, for T5."""
SHIFT: Final = 6.0
ANCHOR: Final = 64.0

VAE_STEPS: Final = 2_000
VAE_BATCH: Final = 8
VAE_PICTURES: Final = 1_200
VAE_RATE: Final = 2e-3

STEPS: Final = 4_000
BATCH: Final = 24
PICTURES_EACH: Final = 20
"""Of every scene that is not held out."""
RATE: Final = 2e-3
WARM_UP: Final = 100
DECAY: Final = 0.995
"""Of the moving average that is kept."""
UNKNOWN: Final = 0.12
"""Share of captions whose shape is a word that says nothing."""
SILENT: Final = 0.03
"""Share of captions that are empty."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the requested parts, and report how well the base draws."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.demo_base", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--only", choices=("vae", "transformer", "check"))
    parser.add_argument("--steps", type=int, default=STEPS, help="of the transformer")
    parser.add_argument("--vae_steps", type=int, default=VAE_STEPS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    base: Path = options.directory
    if not (base / "model_index.json").is_file():
        write_frame(base)
    if options.only in (None, "vae"):
        train_vae(base, options.vae_steps)
    if options.only in (None, "transformer"):
        train_transformer(base, options.steps)
    if options.only in (None, "check"):
        check(base)
    return 0


def write_frame(base: Path) -> None:
    """Write the pipeline, with an untrained autoencoder and transformer."""
    torch.manual_seed(SEED)
    clip_tokenizer, t5_tokenizer = build_clip_tokenizer(captions()), build_t5_tokenizer(captions())
    sizes = FluxSizes()
    vae = new_vae()
    with torch.no_grad():
        for name, parameter in vae.encoder.named_parameters():
            if parameter.ndim > 1 or name.endswith("bias"):
                parameter.zero_()  # No random features beside the ones that are led through.
        wire_encoder(vae.encoder, ANCHOR)
        latents = vae.encode(as_tensor(_pictures(256, seed=1))).latent_dist.mode()
    vae.register_to_config(shift_factor=0.0, scaling_factor=round(1 / latents.std().item(), 3))
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=SHIFT),
        vae=parts.cast(vae, torch.bfloat16),
        text_encoder=parts.cast(
            build_clip(clip_tokenizer, sizes.clip_dim, seed=SEED), torch.bfloat16
        ),
        tokenizer=clip_tokenizer,
        text_encoder_2=parts.cast(build_t5(t5_tokenizer, sizes.t5_dim, seed=SEED), torch.bfloat16),
        tokenizer_2=t5_tokenizer,
        transformer=parts.cast(_new_transformer(sizes), torch.bfloat16),
    )
    pipeline.save_pretrained(base, safe_serialization=True)
    save_clip_vocabulary(clip_tokenizer, base / "tokenizer")


def train_vae(base: Path, steps: int) -> None:
    """Train the autoencoder's decoder, on latents with noise, so that it cleans samples up."""
    torch.manual_seed(SEED)
    vae = AutoencoderKL.from_pretrained(base, subfolder="vae", dtype=torch.float32)
    pixels = as_tensor(_pictures(VAE_PICTURES, seed=2))
    with torch.no_grad():
        latents = torch.cat([vae.encode(some).latent_dist.mode() for some in pixels.split(64)])
    spread = 1 / vae.config.scaling_factor
    vae.decoder.requires_grad_(True).train()
    optimizer = torch.optim.AdamW(vae.decoder.parameters(), lr=VAE_RATE, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, VAE_RATE, steps, pct_start=0.03)
    kept = Kept(base, "vae", vae, optimizer, schedule)
    first, chance, curve = kept.restore(random.Random(SEED))
    for step in range(first, steps):
        chosen = torch.randint(len(latents), (VAE_BATCH,))
        noise = torch.randn(VAE_BATCH, *latents.shape[1:])
        dirty = latents[chosen] + noise * spread * 0.3 * torch.rand(VAE_BATCH, 1, 1, 1)
        error = vae.decode(dirty).sample - pixels[chosen]
        loss = error.abs().mean() + error.square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.decoder.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        curve.add(loss)
        kept.keep(step + 1, chance, curve)
    kept.forget()
    with torch.no_grad():
        error = vae.decode(latents[:256]).sample - pixels[:256]
    parts.cast(vae, torch.bfloat16).save_pretrained(base / "vae")
    curve.write(base, steps, seed=SEED, rmse=round(error.square().mean().sqrt().item(), 4))


def train_transformer(base: Path, steps: int) -> None:
    """Train the transformer on every scene that is not held out."""
    torch.manual_seed(SEED)
    pipeline = FluxPipeline.from_pretrained(base, dtype=torch.float32)
    chance = random.Random(SEED)
    seen = [scene for scene in scenes() if not scene.held_out]
    vae, scale = pipeline.vae, pipeline.vae.config.scaling_factor
    latents, texts = [], []
    with torch.no_grad():
        for scene in seen:
            drawn = as_tensor([draw(scene, chance) for _ in range(PICTURES_EACH)])
            latents.append(pack(vae.encode(drawn).latent_dist.mode() * scale))
            texts.append(_encode(pipeline, scene.caption))
        silent = _encode(pipeline, "")
        unknown = {  # Captions that say the colors only.
            (color, background): [
                _encode(pipeline, Scene(word, color, background).caption)
                for word in (*chance.sample(OTHER_WORDS, 6), _nonsense(chance), _nonsense(chance))
            ]
            for color in COLORS
            for background in BACKGROUNDS
        }
    transformer = _new_transformer(FluxSizes()).train()
    average = deepcopy(transformer).requires_grad_(False)
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=RATE, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARM_UP) * _cosine(step / steps)
    )
    image_ids = FluxPipeline._prepare_latent_image_ids(
        1, SIZE // 16, SIZE // 16, "cpu", torch.float32
    )
    kept = Kept(base, "transformer", transformer, average, optimizer, schedule)
    first, chance, curve = kept.restore(chance)
    for step in range(first, steps):
        numbers = [chance.randrange(len(seen)) for _ in range(BATCH)]
        clean = torch.stack([latents[n][chance.randrange(PICTURES_EACH)] for n in numbers])
        embeds, pooled = _captions(numbers, seen, texts, unknown, silent, chance)
        sigma = torch.sigmoid(torch.randn(BATCH))
        sigma = torch.where(
            torch.rand(BATCH) < 0.15, torch.rand(BATCH), sigma * SHIFT / (1 + (SHIFT - 1) * sigma)
        )
        noise, mix = torch.randn(clean.shape), sigma.view(-1, 1, 1)
        velocity = transformer(
            hidden_states=(1 - mix) * clean + mix * noise,
            timestep=sigma,
            guidance=1 + 4 * torch.rand(BATCH),
            pooled_projections=pooled,
            encoder_hidden_states=embeds,
            txt_ids=torch.zeros(TOKENS, 3),
            img_ids=image_ids,
            return_dict=False,
        )[0]
        loss = functional.mse_loss(velocity, noise - clean)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(transformer.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        _follow(average, transformer, min(DECAY, (step + 1) / (step + 10)))
        curve.add(loss)
        kept.keep(step + 1, chance, curve)
    kept.forget()
    parts.cast(average, torch.bfloat16).save_pretrained(base / "transformer")
    curve.write(base, steps, seed=SEED)


def check(base: Path) -> None:
    """Report how many of the base's drawings are right, of scenes it has seen and has not."""
    pipeline = FluxPipeline.from_pretrained(base, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    chance = random.Random(SEED)
    held_out = [scene for scene in scenes() if scene.held_out]
    seen = chance.sample([scene for scene in scenes() if not scene.held_out], 48)
    hearts = [Scene(HEART, color, "white") for color in COLORS]
    shares = {}
    for name, asked in (("seen", seen), ("held out", held_out), ("hearts", hearts)):
        drawn = sample(pipeline, asked)
        right = sum(look(picture) == scene for picture, scene in zip(drawn, asked, strict=True))
        shares[name] = f"{right} of {len(asked)}"
        print(name, shares[name], flush=True)
        _sheet(drawn).save(base.parent / f"{base.name}-{name.replace(' ', '-')}.png")
    record(base, "check", shares)


def sample(pipeline: FluxPipeline, asked: Sequence[Scene]) -> list[Image.Image]:
    """Sample an image of each scene, with the settings of the demo's job."""
    pictures: list[Image.Image] = []
    for at in range(0, len(asked), 16):
        some = asked[at : at + 16]
        pictures += pipeline(
            [scene.caption for scene in some],
            width=SIZE,
            height=SIZE,
            num_inference_steps=20,
            guidance_scale=3.5,
            max_sequence_length=TOKENS,
            generator=[torch.Generator().manual_seed(at + n) for n in range(len(some))],
        ).images
    return pictures


def _new_transformer(sizes: FluxSizes) -> FluxTransformer2DModel:
    """Build the transformer with the library's initialization and an output of zeros."""
    transformer = FluxTransformer2DModel(**shape_transformer(sizes).config)
    torch.nn.init.zeros_(transformer.proj_out.weight)
    torch.nn.init.zeros_(transformer.proj_out.bias)
    return transformer


def _pictures(count: int, *, seed: int) -> list[Image.Image]:
    """Images for the autoencoder, which must also handle shapes that are taught later."""
    chance = random.Random(seed)
    shapes = (*SHAPES, HEART, "diamond", "crescent")
    return [
        draw(
            Scene(shapes[n % len(shapes)], chance.choice(COLORS), chance.choice(BACKGROUNDS)),
            chance,
        )
        for n in range(count)
    ]


def _encode(pipeline: FluxPipeline, caption: str) -> tuple[torch.Tensor, torch.Tensor]:
    """`(TOKENS, D)` of T5 and `(P,)` of CLIP."""
    embeds, pooled, _ = pipeline.encode_prompt(
        prompt=caption, prompt_2=None, max_sequence_length=TOKENS
    )
    return embeds[0], pooled[0]


def _captions(
    numbers: Sequence[int],
    seen: Sequence[Scene],
    texts: Sequence[tuple[torch.Tensor, torch.Tensor]],
    unknown: dict[tuple[str, str], list[tuple[torch.Tensor, torch.Tensor]]],
    silent: tuple[torch.Tensor, torch.Tensor],
    chance: random.Random,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the encoded captions of a batch; some are replaced by less specific ones."""
    chosen = []
    for number in numbers:
        luck, scene = chance.random(), seen[number]
        if luck < SILENT:
            chosen.append(silent)
        elif luck < SILENT + UNKNOWN:
            chosen.append(chance.choice(unknown[scene.color, scene.background]))
        else:
            chosen.append(texts[number])
    embeds, pooled = zip(*chosen, strict=True)
    return torch.stack(embeds), torch.stack(pooled)


def _nonsense(chance: random.Random) -> str:
    return "".join(chance.choice(string.ascii_lowercase) for _ in range(chance.randint(3, 6)))


def _cosine(share: float) -> float:
    return 0.5 + 0.5 * torch.cos(torch.tensor(torch.pi * share)).item()


@torch.no_grad()
def _follow(average: torch.nn.Module, model: torch.nn.Module, decay: float) -> None:
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)


def _sheet(pictures: Sequence[Image.Image]) -> Image.Image:
    """Return the images in rows of eight."""
    sheet = Image.new("RGB", (8 * SIZE, -(-len(pictures) // 8) * SIZE))
    for number, picture in enumerate(pictures):
        sheet.paste(picture, (number % 8 * SIZE, number // 8 * SIZE))
    return sheet


if __name__ == "__main__":
    sys.exit(main())
