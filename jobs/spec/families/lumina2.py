"""Lumina-Image 2.0 of Alpha-VLLM."""

from jobs.spec.families.base import FLUX_LINE, Family, Flavour

FAMILY = Family(
    name="lumina2",
    title="Lumina-Image 2.0",
    pipelines=("Lumina2Pipeline",),
    transformer="Lumina2Transformer2DModel",
    blocks=("Lumina2TransformerBlock",),
    not_routed="its samples' texts have other lengths in one sequence with the image",
    attention="fixed",
    flavours={"2.0": Flavour("Alpha-VLLM/Lumina-Image-2.0", note="with Gemma 2")},
    # vLLM refuses Gemma 2 in fp16 ("numerical instability", vllm/config/model.py). In ComfyUI, a
    # finetune of this model makes black images with --force-fp16 (issue 8528).
    overflows_fp16="its text encoder, Gemma 2",
    latent_step=16,  # the VAE shrinks by 8, and the transformer takes 2x2 latents
    # As the authors' trainer shifts (transport/transport.py; nextdit_shift in sd-scripts).
    # The scheduler's 6 is for sampling.
    trained_shift=FLUX_LINE,
    defaults={
        "max_sequence_length": 256,
        "timestep_sampling": "shift",
        "validation_num_inference_steps": 30,
        "validation_guidance": 4.0,
    },
)
