"""Qwen-Image: packed 2×2 latents of a video VAE, text of any length, rectified flow."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.overrides import TorchFunctionMode

from engine.families.shared.lora_names import ComfyUI, Kohya, as_in_diffusers
from engine.families.shared.packing import PackedFamily, pack, unpack

if TYPE_CHECKING:
    from collections.abc import Iterator

    from PIL import Image

    from jobs.spec.keys.prompts import SampleRequest

_LONGEST_TEXT: Final = 1024  # tokens; the pipeline takes no more, and cuts at 512 if not told


class QwenImage(PackedFamily):
    """Qwen-Image."""

    # Every linear layer of the blocks: attention of both streams, and both feed-forwards.
    LORA_TARGETS = (
        r"transformer_blocks\.\d+\."
        r"(attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)"
        r"|(img|txt)_mlp\.net\.(0\.proj|2))"
    )
    KOHYA = Kohya(as_in_diffusers, {"ss_network_module": "networks.lora_qwen_image"})
    COMFYUI = ComfyUI(as_in_diffusers)

    def encode(
        self, pipeline: Any, prompt: str, max_sequence_length: int, *, negative: bool = False
    ) -> dict[str, torch.Tensor]:
        """`prompt_embeds (L, D)` and `prompt_embeds_mask (L,)`; L is as long as the prompt."""
        # A single text has nothing filled up, and so no mask.
        embeds, _ = pipeline.encode_prompt(prompt=prompt, max_sequence_length=max_sequence_length)
        mask = torch.ones(embeds.shape[1], dtype=torch.bool, device=embeds.device)
        return {"prompt_embeds": embeds[0].contiguous(), "prompt_embeds_mask": mask}

    def encode_pictures(self, vae: Any, pixels: torch.Tensor) -> torch.Tensor:
        """A picture is a video of one frame to the VAE."""
        return super().encode_pictures(vae, pixels.unsqueeze(2)).squeeze(2)

    def arrange(self, condition: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Without a mask that masks nothing, as in the pipeline: faster kernels take none."""
        mask = condition.get("prompt_embeds_mask")
        if mask is None or not mask.all():
            return condition
        return {name: text for name, text in condition.items() if text is not mask}

    def predict(
        self,
        transformer: Any,
        noisy: torch.Tensor,
        level: torch.Tensor,
        condition: dict[str, torch.Tensor],
        guidance: float,
    ) -> torch.Tensor:
        batch, _, height, width = noisy.shape
        mask = condition.get("prompt_embeds_mask")
        with nullcontext() if mask is None else filled_numbers(transformer):
            velocity = transformer(
                hidden_states=pack(noisy),
                timestep=level,
                encoder_hidden_states=condition["prompt_embeds"],
                encoder_hidden_states_mask=mask,
                img_shapes=[[(1, height // 2, width // 2)]] * batch,
                return_dict=False,
            )[0]
        return unpack(velocity, height, width)

    def sample_arguments(
        self,
        request: SampleRequest,
        condition: dict[str, torch.Tensor],
        negative: dict[str, torch.Tensor] | None,
    ) -> dict[str, Any]:
        """`guidance_scale` is for distilled models only, and there are none."""
        arguments = super().sample_arguments(request, condition, negative)
        arguments["true_cfg_scale"] = arguments.pop("guidance_scale")
        if condition:
            arguments["max_sequence_length"] = _LONGEST_TEXT
        return arguments

    def decode(
        self, pipeline: Any, latents: torch.Tensor, request: SampleRequest
    ) -> list[Image.Image]:
        latents = self.denormalise(pipeline.vae, self.unpack(pipeline, latents, request))
        pixels = pipeline.vae.decode(latents.unsqueeze(2), return_dict=False)[0][:, :, 0]
        pictures: list[Image.Image] = pipeline.image_processor.postprocess(
            pixels, output_type="pil"
        )
        return pictures


class _Filled(TorchFunctionMode):
    """Has a number that becomes a tensor be filled in by a kernel; to copy it waits for the GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.as_tensor and isinstance(args[0], int) and kwargs.keys() == {"device"}:
            return torch.full((), args[0], **kwargs)
        return func(*args, **kwargs)


@contextmanager
def filled_numbers(transformer: Any) -> Iterator[None]:
    """Let a forward with masked texts not wait for the GPU.

    Diffusers (0.42) moves the length of the texts there, to count tokens that it then does not
    use. It does so before it embeds positions: only until then is every function looked at.
    """
    with ExitStack() as stack:
        stack.enter_context(_Filled())
        hook = transformer.pos_embed.register_forward_pre_hook(lambda *_: stack.close())
        stack.callback(hook.remove)
        yield


FAMILY = QwenImage
