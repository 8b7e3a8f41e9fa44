"""Keys of conditioning images: what they are read as, and what of them cannot be."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from jobs.errors import SpecError
from jobs.spec.file.load import dump_spec, load_spec
from jobs.spec.keys.prompts import requests_of
from jobs.spec.rules.no_effect import find_inapplicable

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.spec.job_spec import JobSpec


I2V = "2.1-i2v-14b-480p"
CONTROL = [{"path": "d", "conditioning_path": "c"}]


def read(*entries: dict[str, Any], **values: Any) -> JobSpec:
    data = {"datasets": list(entries)} if entries else {"dataset": "d"}
    usual = {"pretrained_model_name_or_path": "m", "model_flavour": "kontext"}
    return load_spec(None, usual | data | values)


def test_others_names_are_read_and_paths_are_found(tmp_path: Path) -> None:
    (tmp_path / "control").mkdir()
    (tmp_path / "a.png").touch()
    job = tmp_path / "job.yaml"
    job.write_text(
        "pretrained_model_name_or_path: m\nmodel_flavour: kontext\n"
        "datasets: [{path: d, control_path: control}]\n"
        "validation_prompts: [{prompt: p, ctrl_img: a.png}, q]\n"
    )
    spec = load_spec(job)
    (entry,) = spec.datasets or []
    assert entry.conditioning_path == [str(tmp_path / "control")]
    assert entry.references == 1
    first, second = requests_of(spec)
    assert (first.conditioning, second.conditioning) == ((str(tmp_path / "a.png"),), ())
    # The job file and the form show what was written, by the names that it was written with.
    own = {"path": "d", "control_path": [str(tmp_path / "control")]}
    assert spec.to_dict()["datasets"] == [own]
    own["conditioning_path"] = own.pop("control_path")
    assert read(own).datasets == spec.datasets
    job.write_text(dump_spec(spec))
    assert load_spec(job) == spec


@pytest.mark.parametrize(
    ("entries", "values", "words"),
    [
        (
            [{"path": "d", "conditioning_path": "c"}],
            {"model_flavour": "dev"},
            "datasets: FLUX.1 dev takes no conditioning images; choose model_flavour: kontext or "
            "control or canny or depth",
        ),
        (
            [],
            {"model_family": "sdxl", "model_flavour": None, "validation_prompts": "c"},
            "validation_prompts: Stable Diffusion XL takes no conditioning images",
        ),
        (
            [{"path": "d", "conditioning_path": "c", "conditioning_suffix": "_c"}],
            {},
            "d has conditioning_path and conditioning_suffix; keep one",
        ),
        (
            [{"path": "d", "conditioning_path": ["c", "e"]}],
            {},
            "datasets: d has 2 conditioning images; the model takes only one",
        ),
        (
            [{"path": "d", "conditioning_path": "c"}],
            {"num_processes": 2, "context_parallel_size": 2},
            "conditioning images are tokens that ranks cannot share evenly; use 1",
        ),
        (CONTROL, {"model_flavour": "control", "model_type": "full"}, "control trains a LoRA only"),
        (
            CONTROL,
            {"model_flavour": "control", "lora_variant": "dora"},
            "model_flavour: control is not supported with dora; use lora or rslora",
        ),
        (
            CONTROL,
            {"model_flavour": "control", "lora_variant": "lokr"},
            "model_flavour: control is not supported with lokr; use lora or rslora",
        ),
        (
            CONTROL,
            {"model_flavour": "control", "lora_target_modules": ["to_q"]},
            "sees its conditioning images through x_embedder; adapt it too",
        ),
        (
            CONTROL,
            {"model_flavour": "control", "lora_exclude_modules": ["x_embedder"]},
            "lora_exclude_modules: model_flavour: control sees its conditioning images through",
        ),
        (
            [],
            {"model_flavour": "canny"},
            "d has no conditioning image, which the model needs; set one of conditioning_path",
        ),
        (
            [],
            {"model_flavour": "fill", "sample_prompts": ["bare"]},
            'flags: validation_prompts: "bare" needs an image and its mask; set',
        ),
        (
            [],
            {"model_flavour": "fill", "validation_prompts": "c"},
            '"p" needs an image and its mask; set conditioning_image: [IMAGE, MASK]',
        ),
        ([{"path": "d", "conditioning_path": []}], {}, "conditioning_path"),
        (
            [{"path": "d", "do_i2v": True}],
            {"model_family": "wan", "model_flavour": "2.1-t2v-14b"},
            "Wan 2.1-t2v-14b cannot be trained with first_frame; choose model_flavour: "
            "2.1-i2v-14b-480p or 2.1-i2v-14b-720p or 2.1-flf2v-14b-720p or 2.2-ti2v-5b or "
            "2.2-i2v-a14b-high or 2.2-i2v-a14b-low or 2.2-flf2v-a14b-high or 2.2-flf2v-a14b-low",
        ),
        (
            [{"path": "d", "conditioning_path": "c"}],
            {"model_family": "wan", "model_flavour": "2.2-ti2v-5b"},
            "Wan takes no conditioning_path; to train from the first frame of each video, set "
            "first_frame: true instead",
        ),
        (
            [{"path": "d", "conditioning_suffix": "_c"}],
            {"model_family": "wan", "model_flavour": I2V},
            "Wan takes no conditioning_suffix; remove it: the model trains from the first frame of "
            "each video",
        ),
        (
            [],
            {"model_family": "qwen_image", "model_flavour": "edit"},
            "d has no conditioning image, which the model needs; set one of conditioning_path",
        ),
        (
            [{"path": "d", "conditioning_path": ["c", "e", "f", "g"]}],
            {"model_family": "qwen_image", "model_flavour": "edit-2509"},
            "d has 4 conditioning images; the model takes at most 3",
        ),
        (
            [{"path": "d", "conditioning_path": "c"}],
            {"model_family": "qwen_image", "model_flavour": "edit", "sample_prompts": ["bare"]},
            '"bare" has no conditioning image, which the model needs; set conditioning_image',
        ),
        (
            [],
            {"model_family": "wan", "model_flavour": I2V, "sample_prompts": ["bare"]},
            '"bare" has no conditioning image, which the model needs; set conditioning_image',
        ),
        *(
            (
                [],
                {"model_family": "wan", "model_flavour": "2.1-flf2v-14b-720p", **prompts},
                f'"{named}" needs a first and a last frame; set conditioning_image: [FIRST, LAST]',
            )
            for named, prompts in (
                ("bare", {"sample_prompts": ["bare"]}),
                ("p", {"validation_prompts": "c"}),
            )
        ),
        (
            [],
            {"model_family": "wan", "model_flavour": "2.1-vace-14b"},
            "d has no control video, which the model needs; set one of conditioning_path",
        ),
        (
            [{"path": "d", "conditioning_path": "c"}],
            {"model_family": "wan", "model_flavour": "2.1-vace-14b", "sample_prompts": ["bare"]},
            '"bare" has no control video, which the model needs; set conditioning_image',
        ),
        *(
            (
                [{"path": "d", **entry}],
                {"model_family": "wan", "model_flavour": "2.1-vace-14b", **prompt},
                words,
            )
            for entry, prompt, words in (
                (
                    {"conditioning_suffix": list("abcdefghijk")},
                    {},
                    "d has 11 conditioning images; the model takes at most 10",
                ),
                (
                    {"conditioning_suffix": ["_1", "_2"], "conditioning_roles": ["control"] * 2},
                    {},
                    "d has several control videos; the model takes one",
                ),
                (
                    {"conditioning_suffix": "_1"},
                    {
                        "sample_prompts": [
                            {"prompt": "p", "image": "m", "conditioning_roles": "fill_mask"}
                        ]
                    },
                    '"p" has a fill mask and no control video, a part of which is filled in; add '
                    "it to conditioning_image",
                ),
                (
                    {"conditioning_suffix": ["_1", "_2"], "conditioning_roles": "reference"},
                    {},
                    "d has 2 conditioning images and 1 in conditioning_roles; name one for each",
                ),
                (
                    {"conditioning_suffix": "_1"},
                    {"sample_prompts": [{"prompt": "p", "conditioning_roles": "reference"}]},
                    '"p" has no conditioning images and 1 in conditioning_roles; name one for each',
                ),
            )
        ),
        (
            [{"path": "d", "conditioning_path": "c", "conditioning_roles": "reference"}],
            {},
            "d has conditioning_roles, which only models with control videos have; remove it",
        ),
        (
            [{"path": "d", "conditioning_path": "c"}],
            {"model_family": "qwen_image", "model_flavour": "layered", "context_parallel_size": 2},
            "are tokens that ranks cannot share evenly; use 1",
        ),
        *(
            (
                [{"path": "d", "layer_suffix": "_1"}],
                {"model_family": "qwen_image", "model_flavour": flavour},
                f"Qwen-Image {flavour} makes no layers; choose model_flavour: layered",
            )
            for flavour in ("base", "edit")
        ),
        (
            [{"path": "d", "conditioning_path": "c"}],
            {"model_family": "wan", "model_flavour": "2.1-vace-14b", "tread": {"2..-2": 0.5}},
            "tread does not support Wan 2.1-vace-14b: its control blocks add to the tokens of all "
            "layers; remove it",
        ),
        (
            [],
            {"model_family": "wan", "model_flavour": "2.1-flf2v-14b-720p"}
            | {"sample_prompts": [{"prompt": "a", "conditioning_image": ["b", "c"]}]},
            '"a" is sampled as one frame, and the model makes videos from a first to a last one; '
            "set validation_num_frames, or num_frames, to more",
        ),
        (
            [],
            {"model_family": "wan", "model_flavour": I2V, "max_sequence_length": 600},
            f"Wan {I2V} takes at most 512 text tokens; use 512 or fewer",
        ),
        (
            [],
            {
                "model_family": "wan",
                "model_flavour": I2V,
                "num_class_images": 4,
                "class_prompt": "a cat",
            },
            "the model makes no images without a conditioning image; use a dataset with "
            "regularization: true",
        ),
        (
            [{"path": "d", "first_frame": True}],
            {"model_family": "hunyuanvideo", "model_flavour": "t2v"},
            "HunyuanVideo t2v cannot be trained with first_frame",
        ),
        (
            [{"path": "d", "first_frame": True, "last_frame": True}],
            {"model_family": "ltx2", "model_flavour": "2-19b"},
            "LTX-2 2-19b cannot be trained with last_frame; remove it",
        ),
        (
            [{"path": "d", "first_frame": True, "last_frame": True}],
            {"model_family": "wan", "model_flavour": "2.2-ti2v-5b"},
            "Wan 2.2-ti2v-5b cannot be trained with last_frame; remove it, or choose "
            "model_flavour: 2.1-flf2v-14b-720p or 2.2-flf2v-a14b-high or 2.2-flf2v-a14b-low, which "
            "always has both frames",
        ),
        (
            [{"path": "d", "last_frame": True}],
            {"model_family": "wan", "model_flavour": "2.1-flf2v-14b-720p"},
            "Wan 2.1-flf2v-14b-720p cannot be trained with last_frame; remove it: the model trains "
            "from the first and the last frame of each video",
        ),
        (
            [{"path": "d", "last_frame": 0.5}],
            {"model_family": "minimax_h3", "model_flavour": "fl2va"},
            "d has a last_frame and no first_frame; set first_frame: true, or a share",
        ),
        (
            [],
            {"model_family": "minimax_h3", "model_flavour": "fl2va"}
            | {"sample_prompts": [{"prompt": "a", "conditioning_image": ["b", "c", "d"]}]},
            '"a" has 3 conditioning images; the model takes a first frame and a last one',
        ),
        (
            [],
            {"model_family": "ltx2", "model_flavour": None, "train_audio": True}
            | {"loss_type": "huber"},
            "loss_type: huber is not supported with train_audio; use mse",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    entries: list[dict[str, Any]], values: dict[str, Any], words: str
) -> None:
    bare = values.get("sample_prompts")
    values = {key: value for key, value in values.items() if key != "sample_prompts"}
    if bare:
        values["validation_prompts"] = bare
    elif "validation_prompts" in values:
        values = values | {"validation_prompts": [{"prompt": "p", "conditioning_image": "c"}]}
    with pytest.raises(SpecError, match=re.escape(words)) as refused:
        read(*entries, **values)
    said = refused.value.message.split(": ")
    assert len({*said}) == len(said)  # no key is named twice


def test_random_masks_matter_where_there_are_no_others() -> None:
    fill = {"model_flavour": "fill"}
    paired = {"path": "d", "conditioning_path": "c"}
    for why, *entries in (
        ("", {"path": "e"}),
        ("", paired, {"path": "e"}),
        ("all datasets have conditioning images, which are the masks", paired),
    ):
        assert find_inapplicable(read(*entries, **fill)).get("mask_variants", "") == why
    why = find_inapplicable(read(model_flavour="dev"))["mask_variants"]
    assert why == "the model fills in no masked parts of images"


def test_the_size_matters_only_to_models_that_take_them() -> None:
    assert "conditioning_resolution" not in find_inapplicable(read())
    why = find_inapplicable(read(model_flavour="dev"))["conditioning_resolution"]
    assert why == "FLUX.1 dev takes no conditioning images"
