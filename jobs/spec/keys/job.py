"""What is trained, and on which model."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator

from jobs.spec.values.value_types import ModelType, OptionalText, choice, field, read_family


class JobKeys(BaseModel):
    """A part of `jobs.spec.job_spec.JobSpec`."""

    name: str = field(
        "job",
        "job",
        "Short name of the job; part of its run directory.",
        min_length=1,
        max_length=64,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
    )
    model_type: Annotated[ModelType, choice(ModelType)] = field(
        "lora", "job", "What to train: a LoRA adapter, or all weights of the denoiser."
    )
    model_family: Annotated[str, BeforeValidator(read_family)] = field(
        "flux", "job", "Model family; `fsdp-tui families` lists them."
    )
    model_flavour: OptionalText = field(None, "job", "Published variant of the family.")
    pretrained_model_name_or_path: str = field(
        "", "job", "Diffusers model directory, or a hub id: ORG/NAME or ORG/NAME@REVISION."
    )
    dataset: str = field(
        "",
        "job",
        "Folder of images, each with a .txt caption of the same name or a row in metadata.jsonl "
        "or .csv; a directory of the `datasets` library; or a dataset of the hub: ORG/NAME.",
    )
