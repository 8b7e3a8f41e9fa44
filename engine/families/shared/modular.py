"""Call modular blocks of diffusers as a stock pipeline is called.

Some models have no stock pipeline, only `…ModularPipeline`: blocks that run one after another over
components that are loaded on request. This is all that the engine asks of a pipeline:

- components: `from_pretrained(root, **given)`, where None leaves one out; `components`;
  `register_modules`;
- encode: whatever the family's `encode` calls;
- sample: `pipeline(**arguments, output_type="latent")[0]`, given encoded prompts;
- decode: the components that the family's `decode` uses;
- LoRA: `lora_state_dict`, `load_lora_weights`, `save_lora_weights`.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from diffusers.modular_pipelines import ModularPipeline, SequentialPipelineBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import torch


class BlocksPipeline(ModularPipeline):
    """A stock pipeline's calls for a modular one, which a subclass inherits from in addition.

    Attributes:
        WORKFLOW: Its workflow that makes images of texts.
        ENCODERS: Names of the workflow's blocks that an encoded prompt makes needless.
        DECODERS: Names of those after the latents.
        CLASSES: Classes to load components with in place of those in the index.
    """

    WORKFLOW: ClassVar[str] = "text2image"
    ENCODERS: ClassVar[tuple[str, ...]]
    DECODERS: ClassVar[tuple[str, ...]]
    CLASSES: ClassVar[Mapping[str, type]] = MappingProxyType({})

    @classmethod
    def from_pretrained(cls, root: Path, *, dtype: torch.dtype | None = None, **given: Any) -> Any:
        """Return the pipeline with its components loaded from a directory.

        The index may name repositories for them; none of those is asked.

        Args:
            root: The model.
            dtype: The precision of loaded models; None for that of their files.
            given: Components that are not loaded; None for those that are not needed.
        """
        pipeline = cls(pretrained_model_name_or_path=str(root))
        how = {"local_files_only": given.pop("local_files_only", True)}
        how |= {} if dtype is None else {"dtype": dtype}
        for name in pipeline.pretrained_component_names:
            if name not in given:
                spec = pipeline.get_component_spec(name)
                spec.type_hint = cls.CLASSES.get(name, spec.type_hint)
                given[name] = spec.load(
                    pretrained_model_name_or_path=str(root), revision=None, **how
                )
        pipeline.register_components(**given)
        return pipeline

    def register_modules(self, **components: Any) -> None:
        """Set components, or remove those that are None."""
        self.register_components(**components)

    def set_progress_bar_config(self, **settings: Any) -> None:
        """Keep settings of progress bars for the blocks that a call runs."""
        self.bars = settings

    def __call__(
        self,
        prompt: str | None = None,
        negative_prompt: str | None = None,
        *,
        max_sequence_length: int = 512,
        guidance_scale: float | None = None,
        output_type: str = "pil",
        **arguments: Any,
    ) -> tuple[Any]:
        """Run the blocks that are needed, and return latents or images, as the only entry.

        Args:
            prompt: The text; None if `prompt_embeds` are given.
            negative_prompt: The same for guidance.
            max_sequence_length: Limit in tokens.
            guidance_scale: A setting of the guider, which is a component; None to keep it.
            output_type: "latent", or what the last block takes.
            arguments: Inputs of the blocks.
        """
        if guidance_scale is not None:
            self.guider.guidance_scale = guidance_scale
        if prompt is not None:
            arguments |= {
                "prompt": prompt,
                "negative_prompt": negative_prompt,
                "max_sequence_length": max_sequence_length,
            }
        latents = output_type == "latent"
        skipped = (self.ENCODERS if prompt is None else ()) + (self.DECODERS if latents else ())
        workflow = self.blocks.get_workflow(self.WORKFLOW).sub_blocks
        blocks = {name: block for name, block in workflow.items() if name not in skipped}
        pipeline = SequentialPipelineBlocks.from_blocks_dict(blocks).init_pipeline()
        pipeline.register_components(
            **{name: part for name, part in self.components.items() if name in pipeline.components}
        )
        pipeline.set_progress_bar_config(**getattr(self, "bars", {}))
        if latents:
            return (pipeline(**arguments, output="latents"),)
        return (pipeline(**arguments, output_type=output_type, output="images"),)

    @classmethod
    def save_lora_weights(
        cls,
        directory: Path,
        *,
        save_function: Callable[[dict[str, torch.Tensor], str], None],
        **layers: Mapping[str, torch.Tensor],
    ) -> None:
        """Write a LoRA under the names that `load_lora_weights` reads, as stock pipelines do.

        Args:
            directory: Where to.
            save_function: Writes tensors to a path.
            layers: `<component>_lora_layers`, by the component's own names.
        """
        named = {
            f"{part.removesuffix('_lora_layers')}.{name}": tensor
            for part, tensors in layers.items()
            for name, tensor in tensors.items()
        }
        cls.write_lora_layers(
            state_dict=named,
            save_directory=directory,
            is_main_process=True,
            weight_name="pytorch_lora_weights.safetensors",
            save_function=save_function,
            safe_serialization=True,
        )
