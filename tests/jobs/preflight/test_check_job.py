"""What is said about a job that cannot run, before any rank starts: one clear line each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jobs import service
from jobs.errors import SpecError, UserError
from jobs.machine.devices import Gpu
from jobs.models.find_model import find_lora, find_model
from jobs.preflight import check_job
from jobs.spec.file.load import load_spec
from jobs.spec.values.dataset_files import list_files

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs.queue.store import Store
    from jobs.spec.job_spec import JobSpec


def read(job_values: dict[str, Any], **changes: Any) -> JobSpec:
    values = job_values | changes
    return load_spec(None, {key: value for key, value in values.items() if value != "left out"})


def check_all(spec: JobSpec) -> int | list[str] | None:
    check_job.check(spec)
    return check_job.check_here(spec)


def complaint(spec: JobSpec) -> str:
    """The one line that the check must raise."""
    with pytest.raises(UserError) as caught:
        check_all(spec)
    text = str(caught.value)
    assert "\n" not in text
    return text


def gpus(count: int) -> list[Gpu]:
    return [Gpu(index=n, uuid=f"GPU-{n}{n}-abc", name="H", memory_total=1) for n in range(count)]


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.machine.devices.gpus", lambda: gpus(4))


def test_a_good_job_has_nothing_against_it(job_spec: JobSpec, tmp_path: Path) -> None:
    assert check_all(job_spec) is None
    assert not (tmp_path / "cache" / "fsdp-tui").exists(), "made when it is queued"


def test_nothing_of_it_is_queued(store: Store, job_values: dict[str, Any]) -> None:
    spec = read(job_values, dataset="/no/such/folder")
    with pytest.raises(UserError, match="no such dataset folder: /no/such/folder"):
        service.submit(store, spec)
    assert store.all() == []
    assert not (store.home / "runs").exists()


# -- the model -----------------------------------------------------------------------------


def test_a_model_directory_that_is_not_there(job_values: dict[str, Any]) -> None:
    spec = read(job_values, pretrained_model_name_or_path="/no/such/model")
    assert complaint(spec) == "no such model directory: /no/such/model"


def test_a_hub_id_that_is_not_in_the_local_cache(job_values: dict[str, Any]) -> None:
    spec = read(job_values, pretrained_model_name_or_path="nobody-at-all/no-such-model")
    text = complaint(spec)
    assert "nobody-at-all/no-such-model is neither a directory nor in the hub cache" in text
    assert "fsdp-tui fetch nobody-at-all/no-such-model" in text


@pytest.mark.parametrize(
    ("key", "score"), [("validation_clip_model", "clip_t"), ("validation_dino_model", "dino_i")]
)
def test_a_model_that_scores_samples_and_is_not_there(
    job_values: dict[str, Any], key: str, score: str
) -> None:
    values = {"validation_prompts": ["a"], "validation_fraction": 0.5}
    text = complaint(read(job_values, **values, validation_scores=[score]))
    assert f"{key}: no such model: " in text
    assert "`fsdp-tui fetch " in text
    check_all(read(job_values, **values))


def test_a_model_that_is_a_file(job_values: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "flux.safetensors"
    file.touch()
    spec = read(job_values, pretrained_model_name_or_path=str(file))
    assert complaint(spec) == f"{file} is a file, not a model directory"


def test_gguf_files_are_refused_with_what_to_use_instead(
    job_values: dict[str, Any], make_model: Callable[..., Path], tmp_path: Path
) -> None:
    file = tmp_path / "flux1-dev-Q4_K_S.gguf"
    file.touch()
    for model in (file, make_model("packed", suffix=".gguf")):
        text = complaint(read(job_values, pretrained_model_name_or_path=str(model)))
        assert text.endswith(
            "GGUF files are not read; use the model's bf16 weights, which base_precision: int8 or "
            "nf4 packs"
        )


@pytest.mark.parametrize("text", [None, "", "{torn", "[]"])
def test_a_directory_that_is_no_model(
    job_values: dict[str, Any], tmp_path: Path, text: str | None
) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    if text is not None:
        (folder / "model_index.json").write_text(text)
    spec = read(job_values, pretrained_model_name_or_path=str(folder))
    assert complaint(spec).startswith(f"{folder} is not a diffusers model")


def test_a_model_of_another_family(
    job_values: dict[str, Any], make_model: Callable[..., Path]
) -> None:
    other = make_model("kandinsky", pipeline="KandinskyPipeline")
    spec = read(job_values, pretrained_model_name_or_path=str(other))
    assert complaint(spec) == (
        f"{other} is a KandinskyPipeline, not a FLUX.1 model; use a model whose pipeline is "
        "FluxPipeline, FluxKontextPipeline, FluxControlPipeline or FluxFillPipeline"
    )


@pytest.mark.parametrize("part", ["transformer", "vae"])
def test_a_model_that_lacks_a_part(
    job_values: dict[str, Any], make_model: Callable[..., Path], part: str
) -> None:
    parts = tuple({"transformer", "vae"} - {part})
    spec = read(job_values, pretrained_model_name_or_path=str(make_model("half", parts=parts)))
    assert f"is incomplete: {part}/config.json is missing or damaged" in complaint(spec)


def test_pickled_weights_are_not_loaded(
    job_values: dict[str, Any], make_model: Callable[..., Path]
) -> None:
    old = make_model("old", suffix=".bin")
    text = complaint(read(job_values, pretrained_model_name_or_path=str(old)))
    assert f"{old / 'transformer'} has no .safetensors weights" in text
    assert "convert the .bin files" in text


def test_weights_that_are_missing(
    job_values: dict[str, Any], make_model: Callable[..., Path]
) -> None:
    model = make_model("empty", suffix=".txt")
    text = complaint(read(job_values, pretrained_model_name_or_path=str(model)))
    assert text.endswith("has no .safetensors weights")


def test_a_local_directory_comes_before_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find_model("org/name") == Path("org/name")


@pytest.mark.parametrize("name", ["~no_such_user_here/x", "x" * 5000, "a\0b", "a//b", "../gone"])
def test_no_model_name_crashes(name: str) -> None:
    with pytest.raises(SpecError):
        find_model(name)


# -- the pictures --------------------------------------------------------------------------


def test_a_dataset_that_is_a_file(job_values: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "data.zip").touch()
    text = complaint(read(job_values, dataset=str(tmp_path / "data.zip")))
    assert text == f"the dataset {tmp_path / 'data.zip'} is a file, not a folder of images"


def test_a_lora_to_begin_from_that_is_not_there(
    store: Store, job_values: dict[str, Any], tmp_path: Path
) -> None:
    """Only of new jobs: one that resumes reads its checkpoint."""
    (tmp_path / "a.bin").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "two").mkdir()
    for file in ("v1", "v2"):
        (tmp_path / "two" / f"{file}.safetensors").touch()
    for name, why in (
        ("two", "has several .safetensors files; set .* to one of them"),
        ("gone.safetensors", "does not exist"),
        ("a.bin", "is not a .safetensors file"),
        ("empty", "has no .safetensors file"),
    ):
        spec = read(job_values, init_lora=str(tmp_path / name))
        with pytest.raises(UserError, match=f"init_lora: .*{name} {why}"):
            service.submit(store, spec)
        resumed = spec.model_copy(update={"resume_from_checkpoint": "1"})
        check_job.check_beginning(resumed)
        check_job.check_beginning(spec.model_copy(update={"model_type": "full"}))
        adapted = read(
            job_values, training_adapter=str(tmp_path / name), resume_from_checkpoint="1"
        )
        with pytest.raises(UserError, match=f"training_adapter: .*{name} {why}"):
            check_job.check_beginning(adapted)
    assert store.all() == []


def test_a_lora_of_the_hub_is_to_be_downloaded(job_values: dict[str, Any]) -> None:
    spec = read(job_values, training_adapter="of/the-hub")
    with pytest.raises(UserError, match=r"of/the-hub does not exist; .*hf download.*to the file"):
        check_job.check_beginning(spec)


def test_what_is_checked_is_what_the_ranks_read(job_values: dict[str, Any], tmp_path: Path) -> None:
    """The only file of a directory; of several, the one with diffusers' or peft's name."""
    only = tmp_path / "adapter_v2.safetensors"
    only.touch()
    check_job.check_beginning(read(job_values, init_lora=str(tmp_path)))
    assert find_lora(str(tmp_path)) == only
    usual = tmp_path / "adapter_model.safetensors"
    usual.touch()
    check_job.check_beginning(read(job_values, init_lora=str(tmp_path)))
    assert find_lora(str(tmp_path)) == usual


def test_no_pictures(job_values: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "none"
    (folder / ".hidden").mkdir(parents=True)
    for name in ("notes.txt", "film.mp4", ".hidden/a.png", ".b.png"):
        (folder / name).touch()
    (folder / "folder.png").mkdir()
    text = complaint(read(job_values, dataset=str(folder)))
    assert text.startswith(f"0 images in the dataset folder {folder}")
    assert ".jpg" in text


def test_pictures_without_captions(
    job_values: dict[str, Any], make_data: Callable[..., Path]
) -> None:
    folder = make_data("bare", pictures=2, captions=False)
    text = complaint(read(job_values, dataset=str(folder)))
    assert text.startswith(f"none of the 2 images in {folder} has a caption")


def test_empty_captions_are_none(
    job_values: dict[str, Any], make_data: Callable[..., Path]
) -> None:
    """Also those of videos, which are called so."""
    folder = make_data("empty", pictures=2)
    (folder / "0.txt").write_text("")
    assert check_job.check_dataset(read(job_values, dataset=str(folder))) == 2
    (folder / "1.txt").write_text(" \n")
    (folder / "1.png").rename(folder / "1.mp4")
    spec = read(job_values, dataset=str(folder), model_family="ltx2", model_flavour="2-19b")
    with pytest.raises(SpecError, match=r"none of the 2 images and videos in .* has a caption"):
        check_job.check_dataset(spec)


def test_pictures_are_counted_in_all_folders(
    job_values: dict[str, Any], make_data: Callable[..., Path]
) -> None:
    folder = make_data("deep", pictures=2)
    (folder / "more").mkdir()
    (folder / "0.png").rename(folder / "more" / "Z.PNG")
    (folder / "0.txt").rename(folder / "more" / "Z.txt")
    assert check_job.check_dataset(read(job_values, dataset=str(folder))) == 2
    assert list_files(folder).pictures == [folder / "1.png", folder / "more" / "Z.PNG"]


# -- where it writes -----------------------------------------------------------------------


@pytest.mark.parametrize("below", ["", "sub/folder"])
def test_a_cache_that_cannot_be_written(
    job_values: dict[str, Any], tmp_path: Path, below: str
) -> None:
    """A file in the place of a directory is in root's way too."""
    (tmp_path / "file").touch()
    cache = tmp_path / "file" / below
    text = complaint(read(job_values, cache_dir=str(cache)))
    assert text.startswith(f"cannot create the directory {cache} (")
    assert "cache_dir" in text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission(job_values: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    assert "permission denied" in complaint(read(job_values, cache_dir=str(folder)))
    assert "ermission denied" in complaint(read(job_values, cache_dir=str(folder / "sub")))


# -- devices -------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [{"gpus": 2}, {"gpus": [0, 1]}, {"device": "cuda"}])
def test_gpus_on_a_machine_without(
    job_values: dict[str, Any], no_gpus: None, asked: dict[str, Any]
) -> None:
    spec = read(job_values, **{"device": "auto"} | asked)
    assert "the job asks for GPUs, and this machine has none" in complaint(spec)


def test_a_job_that_does_not_mind_runs_on_the_cpu(
    job_values: dict[str, Any], no_gpus: None
) -> None:
    assert check_job.check_devices(read(job_values, device="auto")) is None


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({"num_processes": 2}, 2),
        ({"num_processes": "left out"}, 1),
        ({"num_processes": 2, "device": "cpu"}, None),
        ({"num_processes": 64, "device": "cpu"}, None),
        ({"gpus": 3, "num_processes": "left out"}, 3),
        ({"gpus": [3, 1]}, ["GPU-33-abc", "GPU-11-abc"]),
        ({"gpus": ["GPU-22-abc", 0]}, ["GPU-22-abc", "GPU-00-abc"]),
        ({"gpus": ["GPU-2", "GPU-0"]}, ["GPU-22-abc", "GPU-00-abc"]),
    ],
)
def test_what_is_asked_is_matched_to_the_machine(
    job_values: dict[str, Any], four_gpus: None, asked: dict[str, Any], wanted: Any
) -> None:
    spec = read(job_values, **{"device": "auto"} | asked)
    assert check_job.check_devices(spec) == wanted


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"num_processes": 5}, "the job asks for 5 GPUs, and this machine has 4"),
        ({"gpus": 5, "num_processes": "left out"}, "5 GPUs, and this machine has 4"),
        ({"gpus": [0, 4]}, "no GPU 4 on this machine"),
        ({"gpus": [0, -1]}, "no GPU -1 on this machine"),
        ({"gpus": [0, "GPU-9"]}, "no GPU GPU-9 on this machine"),
        ({"gpus": [0, "GPU-"]}, "GPU-"),
        ({"gpus": [0, "GPU-00-abc"]}, "twice"),
        ({"gpus": ["GPU-1", "GPU-11"]}, "twice"),
    ],
)
def test_what_the_machine_can_never_give(
    job_values: dict[str, Any], four_gpus: None, asked: dict[str, Any], said: str
) -> None:
    assert said in complaint(read(job_values, **{"device": "auto"} | asked))


def test_gpus_are_named_as_people_number_them(
    job_values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With CUDA_VISIBLE_DEVICES=2,3 the visible GPUs keep their numbers."""
    monkeypatch.setattr("jobs.machine.devices.gpus", lambda: gpus(4)[2:])
    spec = read(job_values, device="auto", gpus=[2, 3])
    assert check_job.check_devices(spec) == ["GPU-22-abc", "GPU-33-abc"]
    text = complaint(read(job_values, device="auto", gpus=[0, 2]))
    assert "no GPU 0 on this machine" in text
    assert "2 (GPU-22-abc), 3 (GPU-33-abc)" in text


# -- what compiles -----------------------------------------------------------------------------


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder as the only one of PATH."""
    found = tmp_path / "tools"
    found.mkdir()
    monkeypatch.setenv("PATH", str(found))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    return found


def add_tool(folder: Path, name: str) -> None:
    (folder / name).write_text("")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"torch_compile": True}, "torch_compile"),
        ({"optimizer": "adamw_8bit"}, "optimizer: adamw_8bit"),
    ],
)
def test_a_job_on_gpus_that_compiles_needs_a_c_compiler(
    job_values: dict[str, Any], four_gpus: None, tools: Path, changes: dict[str, Any], key: str
) -> None:
    spec = read(job_values, device="auto", gpus=1, num_processes="left out", **changes)
    assert complaint(spec) == (
        f"{key} compiles kernels at run time, but there is no gcc or clang (PATH); "
        "apt install gcc python3-dev, or the equivalent"
    )
    add_tool(tools, "clang")
    assert check_job.check_here(spec) == 1


def test_the_compiler_that_a_variable_names_is_looked_for(
    job_values: dict[str, Any], four_gpus: None, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_tool(tools, "gcc")
    monkeypatch.setenv("CC", "/no/cc -m64")
    spec = read(job_values, device="auto", gpus=1, num_processes="left out", torch_compile=True)
    assert "there is no /no/cc (CC=/no/cc -m64)" in complaint(spec)


def test_the_headers_of_python_are_needed_too(
    job_values: dict[str, Any], four_gpus: None, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_tool(tools, "gcc")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tools)})
    spec = read(job_values, device="auto", gpus=1, num_processes="left out", torch_compile=True)
    assert f"there is no Python.h in {tools}" in complaint(spec)


@pytest.mark.parametrize(
    "changes",
    [{}, {"optimizer": "adamw_8bit"}, {"torch_compile": True, "torch_compile_backend": "eager"}],
)
def test_what_compiles_nothing_needs_no_compiler(
    job_values: dict[str, Any], tools: Path, changes: dict[str, Any]
) -> None:
    spec = read(job_values, **changes)
    assert check_all(spec) is None


def test_flash_attention_3_is_looked_for(
    job_values: dict[str, Any], four_gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = read(
        job_values,
        device="auto",
        gpus=1,
        num_processes="left out",
        mixed_precision="bf16",
        attention_backend="flash-attention-3",
    )
    assert "needs the package flash_attn_3; it is not installed" in complaint(spec)
    (tmp_path / "flash_attn_interface.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert check_job.check_here(spec) == 1


def test_cpu_ranks_compile_with_a_cpp_compiler(job_values: dict[str, Any], tools: Path) -> None:
    spec = read(job_values, torch_compile=True)
    assert "there is no g++ (PATH); apt install g++" in complaint(spec)
    add_tool(tools, "g++")
    assert check_job.check_here(spec) is None
