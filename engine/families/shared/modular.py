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

from functools import partial
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
        WORKFLOW: Its workflow that makes images of texts. Other components are not loaded.
        WORKFLOWS: Others, by the argument that asks for them.
        LEFT_OUT: Names of the workflow's blocks that are never run.
        ENCODERS: Names of the workflow's blocks that an encoded prompt makes needless.
        DECODERS: Names of those after the latents.
        LATENTS: What is returned of those before them, the latents first.
        OUTPUT: What the last of them call the images.
        FEWEST_STEPS: What its scheduler takes at least; fewer are made that many.
        CLASSES: Classes to load components with in place of those in the index.
    """

    WORKFLOW: ClassVar[str] = "text2image"
    WORKFLOWS: ClassVar[Mapping[str, str]] = MappingProxyType({})
    LEFT_OUT: ClassVar[tuple[str, ...]] = ()
    ENCODERS: ClassVar[tuple[str, ...]]
    DECODERS: ClassVar[tuple[str, ...]]
    LATENTS: ClassVar[tuple[str, ...]] = ("latents",)
    OUTPUT: ClassVar[str] = "images"
    FEWEST_STEPS: ClassVar[int] = 1
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
        needed = {spec.name for spec in pipeline.workflow().expected_components}
        for name in pipeline.pretrained_component_names:
            if name not in needed:
                given[name] = None
            elif name not in given:
                spec = pipeline.get_component_spec(name)
                spec.type_hint = cls.CLASSES.get(name, spec.type_hint)
                given[name] = spec.load(
                    pretrained_model_name_or_path=str(root), revision=None, **how
                )
        pipeline.register_components(**given)
        return pipeline

    def workflow(self, *skipped: str, of: str | None = None) -> Any:
        """Return the blocks of a workflow, `WORKFLOW` by default, without those of these names."""
        steps = self.blocks.get_workflow(of or self.WORKFLOW).sub_blocks
        without = (*self.LEFT_OUT, *skipped)
        kept = {name: block for name, block in steps.items() if name not in without}
        return SequentialPipelineBlocks.from_blocks_dict(kept)

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
        num_inference_steps: int = 50,
        output_type: str = "pil",
        **arguments: Any,
    ) -> tuple[Any, ...]:
        """Run the blocks that are needed, and return what `LATENTS` names, or the images.

        Args:
            prompt: The text; None if `prompt_embeds` are given.
            negative_prompt: The same for guidance.
            max_sequence_length: Limit in tokens.
            guidance_scale: A setting of the guider, which is a component; None to keep it.
            num_inference_steps: Steps.
            output_type: "latent", or what the last block takes.
            arguments: Inputs of the blocks.
        """
        if guidance_scale is not None:
            self.guider.guidance_scale = guidance_scale
        arguments["num_inference_steps"] = max(self.FEWEST_STEPS, num_inference_steps)
        names = [name for argument, name in self.WORKFLOWS.items() if argument in arguments]
        workflow = partial(self.workflow, of=names[0] if names else self.WORKFLOW)
        if prompt is not None:
            words = {
                "prompt": prompt,
                "negative_prompt": negative_prompt,
                "max_sequence_length": max_sequence_length,
            }
            taken = {entry.name for entry in workflow().inputs}
            arguments |= {name: word for name, word in words.items() if name in taken}
        latents = output_type == "latent"
        skipped = (self.ENCODERS if prompt is None else ()) + (self.DECODERS if latents else ())
        # Of this class, whose properties blocks read.
        pipeline = type(self)(blocks=workflow(*skipped))
        pipeline.register_components(
            **{name: part for name, part in self.components.items() if name in pipeline.components}
        )
        ModularPipeline.set_progress_bar_config(pipeline, **getattr(self, "bars", {}))
        run = partial(ModularPipeline.__call__, pipeline)
        if latents:
            made = run(**arguments, output=self.LATENTS)
            return tuple(made[name] for name in self.LATENTS)
        return (run(**arguments, output_type=output_type, output=self.OUTPUT),)

    @classmethod
    def save_lora_weights(
        cls,
        directory: Path,
        *,
        save_function: Callable[[dict[str, torch.Tensor], str], None],
        weight_name: str | None = None,
        **layers: Mapping[str, torch.Tensor],
    ) -> None:
        """Write a LoRA under the names that `load_lora_weights` reads, as stock pipelines do.

        Args:
            directory: Where to.
            save_function: Writes tensors to a path.
            weight_name: The file's name; that of all LoRAs in diffusers by default.
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
            weight_name=weight_name or "pytorch_lora_weights.safetensors",
            save_function=save_function,
            safe_serialization=True,
        )
