"""Keys for what is trained, and the model."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from jobs.spec.keys.groups import JOB
from jobs.spec.rules.no_effect import dataset_list, one_denoiser
from jobs.spec.values.field import Keys, field
from jobs.spec.values.value_types import Bool, ModelType, OptionalText, choice, read_family


class JobKeys(Keys):
    """A part of `jobs.spec.job_spec.JobSpec`."""

    name: str = field(
        "job",
        JOB,
        "Short name of the job; part of its run directory.",
        resume="same",
        memory=False,
        public=True,
        min_length=1,
        max_length=64,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
    )
    sweep: OptionalText = field(
        None,
        JOB,
        "Name of a group of jobs that differ in a few keys, which lists show together; "
        "`submit --sweep` sets it.",
        resume="same",
        memory=False,
        public=True,
        max_length=64,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
    )
    model_type: Annotated[ModelType, choice(ModelType)] = field(
        "lora",
        JOB,
        "What to train: a LoRA adapter, or all weights of the denoiser.",
        resume="impossible",
        mismatch="an adapter and a full model are not interchangeable",
        label="type",
    )
    model_family: Annotated[str, BeforeValidator(read_family)] = field(
        "flux",
        JOB,
        "Model family; `fsdp-tui families` lists them.",
        resume="impossible",
        mismatch="its weights belong to another model",
        label="family",
        public=True,
    )
    model_flavour: OptionalText = field(
        None,
        JOB,
        "Published variant of the family.",
        resume="ruled",
        mismatch="it trains a different denoiser of the model",
        label="flavour",
        public=True,
    )
    both_experts: Bool = field(
        False,
        JOB,
        "Train both experts of a model that has two (Wan 2.2 A14B): `submit` queues a job for "
        "each, NAME-high and NAME-low.",
        resume="same",
        no_effect=one_denoiser,
    )
    other_expert: OptionalText = field(
        None,
        JOB,
        "The job that trains the model's other expert: samples use its newest checkpoint for its "
        "noise levels, instead of the base model. ID, or the path of its run directory; "
        "both_experts sets it.",
        resume="same",
        no_effect=one_denoiser,
        blank="job or folder",
        path=True,
    )
    pretrained_model_name_or_path: str = field(
        "",
        JOB,
        "Diffusers model directory, or a hub id: ORG/NAME or ORG/NAME@REVISION.",
        resume="ruled",
        path=True,
        label="model",
    )
    dataset: str = field(
        "",
        JOB,
        "Folder of images, each with a .txt caption of the same name or a row in metadata.jsonl "
        "or .csv; a directory of the `datasets` library; a dataset of the hub: ORG/NAME; or one in "
        "an object store: s3://BUCKET/FOLDER.",
        resume="ruled",
        blank="folder with cat.png, cat.txt …",
        no_effect=dataset_list,
        path=True,
    )
